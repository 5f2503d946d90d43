"""A rule as a sentence: "5 requests per second, bursts to 10, per API key"."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ratelimits.algorithms.base import Algorithm
from ratelimits.algorithms.wording import Wording

_WORDS = Wording(_, ngettext)
#: Words of the sentence, by the kind of key that a rule counts.
COUNTED_PER: dict[str, Callable[[], str]] = {
    "user": lambda: _("per user"),
    "api_key": lambda: _("per API key"),
    "account": lambda: _("per account"),
    "ip": lambda: _("per address"),
    "global": lambda: _("for everyone together"),
    "key": lambda: _("per key"),
}


def sentence(algorithm: Algorithm, unit: str, key_kind: str, scope: str = "*", max_wait: Decimal | None = None) -> str:
    """Return a limit as a sentence for people. `unit` is the unit of its meter, such as "requests"."""
    parts = [_("nothing passes")] if algorithm.admits_nothing else algorithm.sentence(_WORDS, unit)
    if algorithm.may_wait and max_wait and not algorithm.admits_nothing:
        parts.append(_("waiting up to %(span)s") % {"span": _WORDS.span(max_wait)})
    parts.append(COUNTED_PER[key_kind]())
    if scope != "*":
        parts.append(_("on %(scope)s") % {"scope": scope})
    return ", ".join(parts)
