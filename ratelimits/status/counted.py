"""What the count of usage adds to the pages of keys: the keys and accounts with usage in the last days."""

from __future__ import annotations

import time
from collections.abc import Iterator

from django.db.models import QuerySet

from ratelimits.conf import conf
from ratelimits.models import KeyTotal, Line
from ratelimits.models.status.totals import DAY, newest_days
from ratelimits.status.additions import Additions, UsedKeys
from ratelimits.status.keys import MAX_KEYS, USED_DAYS


def _recent_totals() -> QuerySet[KeyTotal]:
    """Return the totals of the last days. They are read by day, because a key has few of these totals."""
    days = newest_days(time.time(), USED_DAYS)
    return KeyTotal.objects.using(conf.DATABASE).filter(span=DAY, start__in=days).order_by()


def _keys(text: str) -> Iterator[str]:
    keys = _recent_totals().filter(key__icontains=text).values_list("key", flat=True)
    yield from keys.distinct()[: MAX_KEYS + 1]
    yield from (f"account:{account}" for account in _accounts(text))


def _accounts(text: str) -> Iterator[str]:
    accounts = _recent_totals().filter(account__icontains=text).values_list("account", flat=True)
    yield from accounts.distinct()[: MAX_KEYS + 1]


def _keys_of(account: str, most: int) -> Iterator[str]:
    yield from _recent_totals().filter(account=account).values_list("key", flat=True).distinct()[:most]


def _accounts_of(key: str, most: int) -> Iterator[str]:
    yield from _recent_totals().filter(key=key).values_list("account", flat=True).distinct()[:most]


ADDITIONS = Additions(
    used_keys=(
        UsedKeys(
            table=KeyTotal,
            shown_with=Line,
            keys=_keys,
            accounts=_accounts,
            keys_of=_keys_of,
            accounts_of=_accounts_of,
        ),
    ),
)
