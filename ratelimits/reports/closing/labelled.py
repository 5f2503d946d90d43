"""Find the open billing periods of a month: they have usage or adjustments that are on no report.

A billing period belongs to the month of its last moment, in its own time zone (`Period.label`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import reduce
from operator import or_
from typing import Any

from django.db.models import F, Q

from ratelimits.algorithms.billing_periods import Period
from ratelimits.models import Adjustment, Line, PeriodUsage, ShardState
from ratelimits.models.ledger import moment
from ratelimits.reports.adjusting import start_of, unreported
from ratelimits.reports.closing.account_periods import AccountPeriods, MissingPeriodError
from ratelimits.reports.closing.closing_data import ClosingData
from ratelimits.reports.periods import SECOND, span_of, within

#: Maximum number of accounts whose data are read together.
_MAX_ACCOUNTS = 250


def untallied_bins(using: str, start: int, end: int, account: str | None = None) -> dict[str, set[int]]:
    """Return the bins (s since 1970 UTC) with usage that is not in the totals yet, by account.

    Only bins from `start` to `end` (µs since 1970 UTC) are returned.
    """
    states = ShardState.objects.using(using).filter(position__gt=F("tallied")).values_list("shard", "tallied")
    untallied = [Q(batch__shard=shard, batch__position__gt=tallied) for shard, tallied in states]
    bins: dict[str, set[int]] = {}
    if untallied:
        lines = Line.objects.using(using).filter(reduce(or_, untallied), within(start, end), **_of(account))
        for name, bin_ in lines.order_by().values_list("account", "bin").distinct():
            bins.setdefault(name, set()).add(bin_)
    return bins


def _of(account: str | None) -> dict[str, Any]:
    return {} if account is None else {"account": account}


def with_open_periods(using: str, month: str, account: str | None = None) -> list[str]:
    """Return the accounts with usage or adjustments that are on no report, perhaps of a month, sorted.

    Leave out accounts whose usage is not in the totals yet.
    """
    start, end = span_of(month)
    within_span = {"period__gte": start // SECOND, "period__lt": end // SECOND}
    usage = PeriodUsage.objects.using(using).filter(covered=None, **within_span, **_of(account))
    adjusted = unreported(using, period_start__gte=moment(start), period_start__lt=moment(end), **_of(account))
    return sorted({name for rows in (usage, adjusted) for name in rows.order_by().values_list("account", flat=True)})


def open_in(using: str, month: str, account: str | None = None) -> Iterator[tuple[str, Period]]:
    """Yield the account and the period of each open billing period of a month like "2026-11", sorted by account.

    Leave out accounts whose periods are not in the table of billing periods: `open_periods` names them.
    """
    for name, periods in _periods_of(using, with_open_periods(using, month, account)):
        with suppress(MissingPeriodError):
            yield from ((name, period) for period in periods.open() if period.label == month)


def adjustments_of(using: str, month: str) -> list[int]:
    """Return the primary keys of the adjustments of a month like "2026-11".

    An adjustment on a report belongs to the month of the report. Any other adjustment belongs to the month of its
    billing period, even if it was refused.
    """
    start, end = span_of(month)
    rows = Adjustment.objects.using(using)
    reported = set(rows.filter(report__label=month).values_list("pk", flat=True))
    without_report = rows.filter(report=None, period_start__gte=moment(start), period_start__lt=moment(end))
    by_account: dict[str, list[Adjustment]] = {}
    for adjustment in without_report.order_by("account"):
        by_account.setdefault(adjustment.account, []).append(adjustment)
    for name, periods in _periods_of(using, by_account):
        reported |= {row.pk for row in by_account[name] if periods.at(start_of(row)).label == month}
    return sorted(reported)


def _periods_of(using: str, names: Iterable[str]) -> Iterator[tuple[str, AccountPeriods]]:
    """Yield the billing periods of each account. The data of many accounts are read together."""
    in_order = sorted(names)
    for first in range(0, len(in_order), _MAX_ACCOUNTS):
        chunk = in_order[first : first + _MAX_ACCOUNTS]
        # The last argument has the locked shards. There are none, because nothing is written here.
        data = ClosingData(using, chunk, {})
        yield from ((name, AccountPeriods(data, name)) for name in chunk)
