"""Sentences that say how many permits a key has left under a rule."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from django.core.exceptions import ValidationError
from django.utils.translation import gettext as _

from ratelimits.admin.operate.chosen_key import ChosenKey
from ratelimits.admin.operate.offered import OfferedRule
from ratelimits.quota.standings import UNAVAILABLE
from ratelimits.status.keys import keys_of_account
from ratelimits.status.operating import NO_ACCOUNT, NothingDoneError, counted_under

#: If a rule counts each key of an account, the permits of at most this number of keys are read.
MAX_KEYS = 5


def permits_left(chosen: ChosenKey, rule: OfferedRule, name_of: Callable[[str], str], extra: int = 0) -> list[str]:
    """Return a sentence for each key that the rule counts, for at most `MAX_KEYS` keys.

    `name_of` returns the name of a key; "" if it has no name. If `extra` is not 0, the sentences also say how many
    permits will be left after a grant of `extra` permits. If Redis or the database does not answer, a single sentence
    says this.
    """
    keys = [chosen.key] if rule.counts_key_itself else used_keys(chosen)
    account = chosen.identity.account_id or NO_ACCOUNT
    sentences = []
    try:
        for key in keys[:MAX_KEYS]:
            # Leave out keys that the rule does not count, and texts of the ledger that are not keys.
            with suppress(NothingDoneError, ValidationError):
                for applied, counted_key, standing in counted_under(key, rule.name, account):
                    capacity, _span = applied.algorithm.quota
                    sentences.append(_sentence(_named(counted_key, name_of), standing.remaining, capacity, extra))
    except UNAVAILABLE as error:
        return [
            _("It is not known how many permits are left, because Redis or the database does not answer: %s") % error
        ]
    return sentences


def used_keys(chosen: ChosenKey) -> list[str]:
    """Return the keys that the chosen account has used lately; an empty list if the chosen key is not an account."""
    return keys_of_account(chosen.identity.account_id) if chosen.key == chosen.identity.account else []


def _named(key: str, name_of: Callable[[str], str]) -> str:
    name = name_of(key)
    return f"{key} ({name})" if name else key


def _sentence(key: str, left: int, capacity: int, extra: int) -> str:
    values = {
        "key": key,
        "left": f"{left:,}",
        "capacity": f"{capacity:,}",
        "left_after": f"{left + extra:,}",
        "capacity_after": f"{capacity + extra:,}",
    }
    if extra:
        text = _(
            "%(key)s has %(left)s of %(capacity)s left now, and %(left_after)s of %(capacity_after)s with the grant."
        )
    else:
        text = _("%(key)s has %(left)s of %(capacity)s left now.")
    return text % values
