"""Find keys by a part of the key, or of the name of its user or account; and say whether anybody has a key."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

from django.contrib.auth import get_user_model
from django.core.exceptions import ValidationError
from django.db.models import Model, Q
from django.utils.translation import gettext as _

from ratelimits.addresses import address_key
from ratelimits.conf import conf
from ratelimits.engine.keys import ledger_name
from ratelimits.models import Access, Account, KeyOverride, PlanMembership
from ratelimits.models.access.targets import canonical
from ratelimits.models.keys import canonical_key, validate_key
from ratelimits.models.users import accounts_without_rows, existing_users
from ratelimits.naming import spelled
from ratelimits.status.additions import used_keys

# Projects can configure these names, which are older than this module.
_search_logger = logging.getLogger("ratelimits.status.known_keys")
_name_logger = logging.getLogger("ratelimits.status.key_owners")

#: At least 20 characters of the kinds that tokens consist of, with at least one letter and one digit.
_SECRET = re.compile(r"(?=.*[a-zA-Z])(?=.*[0-9])[\w+/=.~-]{20,}", re.ASCII)
#: The id of an API key: a digest of 24 hexadecimal digits, or the UUID of a row.
_ID = re.compile("[0-9a-f]{24}|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
#: Maximum number of keys that are listed.
MAX_KEYS = 50
#: A search also looks at the usage of this number of days. Today is one of these days.
USED_DAYS = 3


class KnownKey(NamedTuple):
    """A key that a search found."""

    key: str
    #: The name of the key's user or account; "" if it is not known.
    name: str = ""

    @property
    def about(self) -> str:
        """Return a note that helps people to choose between an account and a user; "" for other keys."""
        if self.key.startswith("account:"):
            return _("the customer, with all keys")
        return _("only requests of this user without an API key") if self.key.startswith("user:") else ""


class SearchResult(NamedTuple):
    """The result of a search."""

    #: The keys that were found, at most `MAX_KEYS`.
    keys: list[KnownKey]
    #: Whether the search found more than `MAX_KEYS` keys.
    has_more: bool
    #: Whether the project's function KEY_SEARCH failed.
    failed: bool


def typed_key(text: str) -> str | None:
    """Return the key that a text names; None if the text is not a key.

    An address can be written without "ip:", with a port, or as a network of one address such as "203.0.113.9/32". A key
    that a view gives, such as "header:x-tenant=acme", is returned in the form in which it is stored.
    """
    try:
        validate_key(text)
    except ValidationError:
        return address_key(text.removeprefix("ip:")) or _network_key(text)
    return canonical_key(text)


def _network_key(text: str) -> str | None:
    """Return the key of a network under which one caller is counted: a single IPv4 address, or a /64 network of IPv6.

    Return None for a larger network, and for any other text.
    """
    try:
        key = canonical(text)
        validate_key(key)
    except ValidationError:
        return None
    return key


def looks_secret(text: str) -> bool:
    """Return whether a text looks like the secret of an API key, a token or a password, not like a key or a name.

    A secret is a long word of mixed letters and digits. The digests and UUIDs that are ids of API keys are not secret.
    """
    # Only the last word, for texts such as "Bearer …".
    word = text.rpartition(" ")[2]
    return bool(_SECRET.fullmatch(word)) and not _ID.fullmatch(word)


def known_keys(text: str, tables: Container[type[Model]]) -> SearchResult:
    """Find the keys that contain a text, and the keys whose name contains the text.

    A key comes first if the key or its name equals the text. `tables` are the tables to search. They are some of these:
    accounts, users, overrides, memberships, blocks and allows (`Access`), tables of used keys. The project's function
    in the setting KEY_SEARCH also searches.
    """
    failed = False
    found: dict[str, KnownKey] = {}
    searches = [(get_table(), search) for get_table, search in _SEARCHES]
    for table, search in (*searches, *((used.table, _unnamed(used.keys)) for used in used_keys())):
        if table in tables:
            for searched in dict.fromkeys((text, spelled(text))):  # keys have the text as it is spelled
                _add(found, search(searched))
    if conf.KEY_SEARCH is not None:
        try:
            results = islice(conf.KEY_SEARCH(text), MAX_KEYS + 1)
            _add(found, (KnownKey(canonical_key(str(key)), str(name)) for key, name in results))
        except Exception:
            _search_logger.exception("RATELIMITS['KEY_SEARCH'] failed for a text of %s characters", len(text))
            failed = True
    keys = sorted(found.values(), key=lambda known_key: closeness(known_key, text))
    return SearchResult(keys[:MAX_KEYS], len(keys) > MAX_KEYS, failed)


def closeness(known_key: KnownKey, text: str) -> tuple[bool, str]:
    """Return the value by which found keys are sorted. A key comes first if the key or its name equals the text."""
    key, name = known_key.key.casefold(), known_key.name.casefold()
    # False comes before True. `partition` removes the kind of the key.
    return text.casefold() not in (key, key.partition(":")[2], name), known_key.key


def known_accounts(text: str, tables: Container[type[Model]]) -> list[KnownKey]:
    """Return the keys of the accounts whose identifier or name contains a text, at most `MAX_KEYS`.

    `tables` are the tables to search: accounts, tables of used keys, or both.
    """
    found: dict[str, KnownKey] = {}
    searches: list[tuple[Any, Any]] = [(Account, _accounts)]
    searches += ((used.table, _unnamed(used.accounts, "account:")) for used in used_keys())
    for table, search in searches:
        if table in tables:
            for searched in dict.fromkeys((text, spelled(text))):
                _add(found, search(searched))
    return list(found.values())[:MAX_KEYS]


def keys_of_account(account: str) -> list[str]:
    """Return the keys that an account has used in the last days, at most `MAX_KEYS` + 1.

    One key more than `MAX_KEYS` tells the caller that the list is not complete.
    """
    return sorted({key for used in used_keys() for key in used.keys_of(account, MAX_KEYS + 1)})


def accounts_of_key(key: str, most: int = MAX_KEYS) -> list[str]:
    """Return accounts that have used a key in the last days, at most `most`; "" stands for no account."""
    return sorted({account for used in used_keys() for account in used.accounts_of(key, most)})


def _add(found: dict[str, KnownKey], keys: Iterable[KnownKey]) -> None:
    """Add new keys, and add missing names to keys that were found before. Ignore texts that are not keys."""
    for known_key in keys:
        with suppress(ValidationError):
            validate_key(known_key.key)
            first = found.setdefault(known_key.key, known_key)
            found[known_key.key] = KnownKey(known_key.key, first.name or known_key.name)


def all_tables() -> set[type[Model]]:
    """Return all tables that can be searched."""
    return {*(get_table() for get_table, _search in _SEARCHES), *(used.table for used in used_keys())}


def _unnamed(search: Callable[[str], Iterable[str]], kind: str = "") -> Callable[[str], Iterator[KnownKey]]:
    """Return a search for keys without names. `kind` is what each found text lacks to be a key."""
    return lambda text: (KnownKey(f"{kind}{found}") for found in search(text))


def _accounts(text: str) -> Iterator[KnownKey]:
    accounts = Account.objects.using(conf.DATABASE)
    columns = "identifier", "name"
    # Search separately for the account with exactly this identifier: perhaps too many other accounts contain the text.
    equal = accounts.filter(identifier=text)
    containing = accounts.filter(Q(identifier__icontains=text) | Q(name__icontains=text)).order_by("identifier")
    for rows in equal, containing:
        for identifier, name in rows.values_list(*columns)[: MAX_KEYS + 1]:
            yield KnownKey(f"account:{identifier}", name)


def _users(text: str) -> Iterator[KnownKey]:
    users: Any = get_user_model()
    names = list(dict.fromkeys([users.USERNAME_FIELD, users.get_email_field_name()]))
    fields = {field.name for field in users._meta.get_fields()}
    containing, equal = Q(), Q()
    for name in names:
        if name in fields:
            containing |= Q(**{f"{name}__icontains": text})
            equal |= Q(**{name: text})
    # Ignore a text that cannot be a primary key.
    with suppress(ValidationError, ValueError, TypeError, OverflowError):
        equal |= Q(pk=users._meta.pk.to_python(text))
    for rows in (users._default_manager.filter(equal), users._default_manager.filter(containing).order_by("pk")):
        for pk, name in rows.values_list("pk", users.USERNAME_FIELD)[: MAX_KEYS + 1]:
            yield KnownKey(canonical_key(f"user:{spelled(str(pk))}"), str(name))


def _overrides(text: str) -> Iterator[KnownKey]:
    rows = KeyOverride.objects.using(conf.DATABASE).filter(key__icontains=text).order_by("key")
    yield from map(KnownKey, rows.values_list("key", flat=True).distinct()[: MAX_KEYS + 1])


def _memberships(text: str) -> Iterator[KnownKey]:
    rows = PlanMembership.objects.using(conf.DATABASE).filter(key__icontains=text).order_by("key")
    yield from map(KnownKey, rows.values_list("key", flat=True).distinct()[: MAX_KEYS + 1])


def _targets(text: str) -> Iterator[KnownKey]:
    rows = Access.objects.using(conf.DATABASE).filter(target__icontains=text).order_by("target")
    yield from map(KnownKey, rows.values_list("target", flat=True).distinct()[: MAX_KEYS + 1])


#: Pairs of a function that returns a table, and the search in this table. The first item is a function because the
#: table of users is known only after Django has started.
_SEARCHES: tuple[tuple[Any, Any], ...] = (
    (lambda: Account, _accounts),
    (get_user_model, _users),
    (lambda: KeyOverride, _overrides),
    (lambda: PlanMembership, _memberships),
    (lambda: Access, _targets),
)


def no_owner_text(key: str) -> str:
    """Return a sentence that says that nobody has a key. Return "" if somebody has the key, or perhaps has it.

    The app knows all users and accounts. It knows an API key if the key was used in the last USED_DAYS
    days, if an override, a membership, a block or an allow names the key, or if KEY_SEARCH finds it. Without
    KEY_SEARCH, other API keys can exist. Any address can belong to somebody.
    """
    kind, _colon, name = key.partition(":")
    if kind == "user":
        if _was_used(key) or existing_users([name]):
            return ""
        text = _("No user has the primary key “%(name)s”. Search for the user by name, or by a part of the name.")
    elif kind == "account":
        if _has_used(name) or _account_exists(name):
            return ""
        text = _("No account has the identifier “%(name)s”. Search for a part of the account's identifier or name.")
    elif kind == "api_key" and conf.KEY_SEARCH is not None:
        if _was_used(key) or _is_named_in_a_row(key) or _name_by_key_search(key) is not None:
            return ""
        text = _(
            "No API key “%(name)s” is known: it was not used in the last days, and no search finds it. Search for the"
            " name of the key, or for its account."
        )
    else:
        return ""
    return text % {"name": name}


def no_effect_text(target: str) -> str:
    """Return a warning if nobody has the key of a block or allow. Return "" if somebody has it, or perhaps has it."""
    problem, effect = no_owner_text(target), _("Until somebody has this key, the block or allow has no effect.")
    return f"{problem} {effect}" if problem else ""


def searched_name(key: str) -> str:
    """Return the name that the project's function KEY_SEARCH gives to a key; "" if it gives none."""
    return _name_by_key_search(key) or ""


def _name_by_key_search(key: str) -> str | None:
    """Return the name that KEY_SEARCH gives to a key; None if KEY_SEARCH does not find the key."""
    if conf.KEY_SEARCH is None:
        return None
    # Search for the whole key first, then for the key without its kind, then also without its model.
    for text in dict.fromkeys((key, key.partition(":")[2], key.rpartition(":")[2])):
        try:
            found: Iterable[tuple[object, object]] = islice(conf.KEY_SEARCH(text), MAX_KEYS + 1)
            for known_key, name in found:
                if canonical_key(str(known_key)) == key:
                    return str(name)
        except Exception:
            _name_logger.exception("RATELIMITS['KEY_SEARCH'] failed for a text of %s characters", len(text))
            return None
    return None


def _was_used(key: str) -> bool:
    return bool(accounts_of_key(ledger_name(key), 1))


def _has_used(account: str) -> bool:
    return any(True for used in used_keys() for _key in used.keys_of(ledger_name(account), 1))


def _account_exists(name: str) -> bool:
    has_row = Account.objects.using(conf.DATABASE).filter(identifier=name).exists()
    return has_row or bool(accounts_without_rows([name]))


def _is_named_in_a_row(key: str) -> bool:
    # `Access` is the table of blocks and allows.
    named = ((KeyOverride, "key"), (PlanMembership, "key"), (Access, "target"))
    return any(model._default_manager.using(conf.DATABASE).filter(**{column: key}).exists() for model, column in named)
