"""Find keys by a part of the key, or by a part of the name of its user or account."""

from __future__ import annotations

import logging
import time
from collections.abc import Container, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

from django.contrib.auth import get_user_model
from django.core.exceptions import ValidationError
from django.db.models import Model, Q

from ratelimits.conf import conf
from ratelimits.identity import network
from ratelimits.models import Access, Account, KeyOverride, KeyTotal, PlanMembership
from ratelimits.models.keys import validate_key
from ratelimits.models.status.totals import DAY, newest_days

logger = logging.getLogger(__name__)

#: Maximum number of keys that are listed, and number of days (including today) whose usage is searched.
MAX_KEYS, USED_DAYS = 50, 3


class KnownKey(NamedTuple):
    """A key that was found, and the name of its user or account, if it is known."""

    key: str
    name: str = ""


class Found(NamedTuple):
    """The keys that were found, at most MAX_KEYS; whether there are more; and whether KEY_SEARCH failed."""

    keys: list[KnownKey]
    more: bool
    failed: bool


def typed_key(text: str) -> str | None:
    """Return the key that a text names; None if it is not a key. An IP address may be written without "ip:"."""
    try:
        validate_key(text)
    except ValidationError:
        return network(text.removeprefix("ip:"))
    return text


def known_keys(text: str, tables: Container[type[Model]]) -> Found:
    """Return the keys that contain a text, in the key or in its name. Keys that are equal to the text come first.

    `tables` are the tables to search: accounts, users, overrides, memberships, blocks, totals of keys. The project's
    function in the setting KEY_SEARCH is called too.
    """
    failed = False
    found: dict[str, KnownKey] = {}
    for model, search in _SEARCHES:
        if model() in tables:
            _add(found, search(text))
    if conf.KEY_SEARCH is not None:
        try:
            _add(found, (KnownKey(str(key), str(name)) for key, name in islice(conf.KEY_SEARCH(text), MAX_KEYS + 1)))
        except Exception:
            logger.exception("RATELIMITS['KEY_SEARCH'] failed for a text of %s characters", len(text))
            failed = True
    wanted = text.casefold()

    def order(one: KnownKey) -> tuple[bool, str]:
        exact = wanted in (one.key.casefold(), one.key.partition(":")[2].casefold(), one.name.casefold())
        return not exact, one.key

    keys = sorted(found.values(), key=order)
    return Found(keys[:MAX_KEYS], len(keys) > MAX_KEYS, failed)


def keys_of_account(account: str) -> list[str]:
    """Return the keys that an account has used in the newest days; one more than MAX_KEYS if there are more."""
    used = _used().filter(account=account).order_by().values_list("key", flat=True)
    return sorted(used.distinct()[: MAX_KEYS + 1])


def _add(found: dict[str, KnownKey], keys: Iterable[KnownKey]) -> None:
    """Add new keys, and add names to keys that were found already. Texts that are not keys are left out."""
    for one in keys:
        with suppress(ValidationError):
            validate_key(one.key)
            known = found.setdefault(one.key, one)
            found[one.key] = KnownKey(one.key, known.name or one.name)


def _used() -> Any:
    return KeyTotal.objects.using(conf.DATABASE).filter(span=DAY, start__in=newest_days(time.time(), USED_DAYS))


def _accounts(text: str) -> Iterator[KnownKey]:
    accounts = Account.objects.using(conf.DATABASE)
    columns = "identifier", "name"
    # Search for the whole text separately: there may be too many accounts that contain the text.
    whole = accounts.filter(identifier=text)
    parts = accounts.filter(Q(identifier__icontains=text) | Q(name__icontains=text)).order_by("identifier")
    for rows in whole, parts:
        for own, name in rows.values_list(*columns)[: MAX_KEYS + 1]:
            yield KnownKey(f"account:{own}", name)


def _users(text: str) -> Iterator[KnownKey]:
    users: Any = get_user_model()
    names = list(dict.fromkeys([users.USERNAME_FIELD, users.get_email_field_name()]))
    fields = {field.name for field in users._meta.get_fields()}
    condition, exact = Q(), Q()
    for name in names:
        if name in fields:
            condition |= Q(**{f"{name}__icontains": text})
            exact |= Q(**{name: text})
    with suppress(ValidationError, ValueError, TypeError, OverflowError):
        exact |= Q(pk=users._meta.pk.to_python(text))
    for rows in (users._default_manager.filter(exact), users._default_manager.filter(condition).order_by("pk")):
        for pk, name in rows.values_list("pk", users.USERNAME_FIELD)[: MAX_KEYS + 1]:
            yield KnownKey(f"user:{pk}", str(name))


def _overrides(text: str) -> Iterator[KnownKey]:
    rows = KeyOverride.objects.using(conf.DATABASE).filter(key__icontains=text).order_by("key")
    yield from map(KnownKey, rows.values_list("key", flat=True).distinct()[: MAX_KEYS + 1])


def _memberships(text: str) -> Iterator[KnownKey]:
    rows = PlanMembership.objects.using(conf.DATABASE).filter(key__icontains=text).order_by("key")
    yield from map(KnownKey, rows.values_list("key", flat=True).distinct()[: MAX_KEYS + 1])


def _targets(text: str) -> Iterator[KnownKey]:
    rows = Access.objects.using(conf.DATABASE).filter(target__icontains=text).order_by("target")
    yield from map(KnownKey, rows.values_list("target", flat=True).distinct()[: MAX_KEYS + 1])


def _used_keys(text: str) -> Iterator[KnownKey]:
    keys = _used().filter(key__icontains=text).order_by().values_list("key", flat=True).distinct()
    yield from map(KnownKey, keys[: MAX_KEYS + 1])
    accounts = _used().filter(account__icontains=text).order_by().values_list("account", flat=True).distinct()
    yield from (KnownKey(f"account:{account}") for account in accounts[: MAX_KEYS + 1])


#: The searches, each with a function that returns its table: the user model is known only after Django has started.
_SEARCHES: tuple[tuple[Any, Any], ...] = (
    (lambda: Account, _accounts),
    (get_user_model, _users),
    (lambda: KeyOverride, _overrides),
    (lambda: PlanMembership, _memberships),
    (lambda: Access, _targets),
    (lambda: KeyTotal, _used_keys),
)
