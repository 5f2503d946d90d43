"""A rule as a sentence: "5 requests per second, bursts to 10, per API key"."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from decimal import Decimal
from functools import lru_cache
from typing import Protocol

from django.utils.translation import get_language, ngettext
from django.utils.translation import gettext as _

from ratelimits.algorithms.base import Algorithm, Wording
from ratelimits.models.fields.rule_fields import IPV4_PREFIX, IPV6_PREFIX

_WORDS = Wording(_, ngettext)

#: Words of the sentence, by the kind of key that a rule counts.
COUNTED_PER: dict[str, Callable[[], str]] = {
    "caller": lambda: _("per caller"),
    "user": lambda: _("per user"),
    "api_key": lambda: _("per API key"),
    "account": lambda: _("per account"),
    "ip": lambda: _("per address"),
    "global": lambda: _("for everyone together"),
    "view_key": lambda: _("per key that the view gives"),
}
#: Words of the sentence, by the callers to whom a rule applies.
FOR_CALLERS: dict[str, Callable[[], str]] = {
    "anonymous": lambda: _("for anonymous callers"),
    "authenticated": lambda: _("for authenticated callers"),
}


class CountedCallers(Protocol):
    """The attributes of a rule that say whose requests it counts, and by which key."""

    @property
    def key_kind(self) -> str: ...
    @property
    def view_key(self) -> str: ...
    @property
    def callers(self) -> str: ...
    @property
    def group(self) -> str: ...
    @property
    def ipv4_prefix(self) -> int | None: ...
    @property
    def ipv6_prefix(self) -> int | None: ...


def counted_per(key_kind: str, view_key: str) -> str:
    """Return the words for the key that a rule counts, such as "per user" or "per header:X-Tenant"."""
    if view_key and key_kind == "view_key":
        return _("per %(key)s") % {"key": view_key}
    return COUNTED_PER[key_kind]()


def _of_callers(
    key_kind: str, view_key: str, ipv4_prefix: int | None, ipv6_prefix: int | None, group: str, callers: str
) -> list[str]:
    """Return the parts of a sentence that say whose requests are counted, and by which key."""
    parts = [counted_per(key_kind, view_key)]
    ipv4_prefix, ipv6_prefix = ipv4_prefix or IPV4_PREFIX, ipv6_prefix or IPV6_PREFIX
    if (ipv4_prefix, ipv6_prefix) != (IPV4_PREFIX, IPV6_PREFIX):
        text = _("addresses by network: /%(ipv4)s for IPv4, /%(ipv6)s for IPv6")
        parts.append(text % {"ipv4": ipv4_prefix, "ipv6": ipv6_prefix})
    if group:
        parts.append(_("for the group %(group)s") % {"group": group})
    elif callers in FOR_CALLERS:
        parts.append(FOR_CALLERS[callers]())
    return parts


@lru_cache(maxsize=4_000)
def _cached(
    algorithm: Algorithm,
    unit: str,
    callers: tuple[str, str, int | None, int | None, str, str],
    scope: str,
    except_scopes: tuple[str, ...],
    max_wait: Decimal | None,
    _language: str | None,
) -> str:
    """Return a sentence in the current language, from a cache, because translation is slow for many rules.

    `callers` has the arguments of `_of_callers`. `_language` is an argument because each language needs its own entries
    in the cache.
    """
    parts = [_("nothing passes")] if algorithm.admits_nothing else list(algorithm.sentence(_WORDS, unit))
    if algorithm.may_wait and max_wait and not algorithm.admits_nothing:
        parts.append(_("waiting up to %(span)s") % {"span": _WORDS.span(max_wait)})
    parts += _of_callers(*callers)
    if scope != "*":
        parts.append(_("on %(scope)s") % {"scope": scope})
    if except_scopes:
        parts.append(_("except on %(scopes)s") % {"scopes": ", ".join(except_scopes)})
    return ", ".join(parts)


def sentence(
    algorithm: Algorithm,
    unit: str,
    rule: CountedCallers,
    scope: str = "*",
    except_scopes: Iterable[str] = (),
    max_wait: Decimal | None = None,
) -> str:
    """Return a limit as a sentence for people.

    `unit` is the unit of the rule's meter, such as "requests". `max_wait` is in seconds.
    """
    callers = rule.key_kind, rule.view_key, rule.ipv4_prefix, rule.ipv6_prefix, rule.group, rule.callers
    return _cached(algorithm, unit, callers, scope, tuple(except_scopes), max_wait, get_language())
