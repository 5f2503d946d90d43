"""Say whether anybody has a key, and find the name that the project's function KEY_SEARCH gives to a key."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from itertools import islice

from django.utils.translation import gettext as _

from ratelimits.conf import conf
from ratelimits.engine.keys import ledger_name
from ratelimits.models import Access, Account, KeyOverride, PlanMembership
from ratelimits.models.keys import canonical_key
from ratelimits.models.users import accounts_without_rows, existing_users
from ratelimits.status.known_keys import MAX_KEYS, recent_totals

logger = logging.getLogger(__name__)


def no_owner_text(key: str) -> str:
    """Return a sentence that says that nobody has a key. Return "" if somebody has the key, or perhaps has it.

    The app knows all users and accounts. It knows an API key if the key was used in the last days (USED_DAYS in
    known_keys.py), if an override, a membership, a block or an allow names the key, or if KEY_SEARCH finds it. Without
    KEY_SEARCH, other API keys can exist. Any address can belong to somebody.
    """
    kind, _colon, name = key.partition(":")
    if kind == "user":
        if _was_used(key=ledger_name(key)) or existing_users([name]):
            return ""
        text = _("No user has the primary key “%(name)s”. Search for the user by name, or by a part of the name.")
    elif kind == "account":
        if _was_used(account=ledger_name(name)) or _account_exists(name):
            return ""
        text = _("No account has the identifier “%(name)s”. Search for a part of the account's identifier or name.")
    elif kind == "api_key" and conf.KEY_SEARCH is not None:
        if _was_used(key=ledger_name(key)) or _is_named_in_a_row(key) or _name_by_key_search(key) is not None:
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
            logger.exception("RATELIMITS['KEY_SEARCH'] failed for a text of %s characters", len(text))
            return None
    return None


def _was_used(**column: str) -> bool:
    return bool(recent_totals().filter(**column).exists())


def _account_exists(name: str) -> bool:
    has_row = Account.objects.using(conf.DATABASE).filter(identifier=name).exists()
    return has_row or bool(accounts_without_rows([name]))


def _is_named_in_a_row(key: str) -> bool:
    # `Access` is the table of blocks and allows.
    named = ((KeyOverride, "key"), (PlanMembership, "key"), (Access, "target"))
    return any(model._default_manager.using(conf.DATABASE).filter(**{column: key}).exists() for model, column in named)
