"""Find the open billing periods of a month: they have usage or adjustments that are on no report.

A billing period belongs to the month of its last moment, in its own time zone (`Period.label`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from operator import or_
from typing import Any

from django.db.models import F, Q

from ratelimits.models import Adjustment, Line, PeriodUsage, ShardState
from ratelimits.models.ledger import moment
from ratelimits.reports.adjusting import start_of, unreported
from ratelimits.reports.closing.account_periods import AccountPeriods
from ratelimits.reports.closing.closing_data import ClosingData
from ratelimits.reports.periods import SECOND, Period, span_of

#: Maximum number of accounts whose data are read together.
_MAX_ACCOUNTS = 250


def uncovered_starts(using: str, start: int, end: int, account: str | None = None) -> list[int]:
    """Return the starts (s since 1970 UTC) of the counted periods whose usage is perhaps on no report yet.

    Only periods that start at `start` or later, and before `end` (both µs since 1970 UTC), are returned.
    """
    filters: dict[str, Any] = {"period__gte": start // SECOND, "period__lt": end // SECOND}
    if account is not None:
        filters["account"] = account
    usage = PeriodUsage.objects.using(using).filter(covered=None, **filters).order_by()
    starts = set(usage.values_list("period", flat=True).distinct())
    # The lines of batches that are not in the totals yet.
    states = ShardState.objects.using(using).filter(position__gt=F("tallied")).values_list("shard", "tallied")
    untallied = [Q(batch__shard=shard, batch__position__gt=tallied) for shard, tallied in states]
    if untallied:
        lines = Line.objects.using(using).filter(reduce(or_, untallied), **filters).order_by()
        starts |= set(lines.values_list("period", flat=True).distinct())
    return sorted(starts)


def open_in(using: str, month: str, account: str | None = None) -> Iterator[tuple[str, Period]]:
    """Yield the account and the period of each open billing period of a month like "2026-11", sorted by account."""
    start, end = span_of(month)
    filters: dict[str, Any] = {} if account is None else {"account": account}
    within = {"period__gte": start // SECOND, "period__lt": end // SECOND}
    usage = PeriodUsage.objects.using(using).filter(covered=None, **within, **filters)
    adjusted = unreported(using, period_start__gte=moment(start), period_start__lt=moment(end), **filters)
    names = {name for rows in (usage, adjusted) for name in rows.order_by().values_list("account", flat=True)}
    for name, periods in _periods_of(using, names):
        for billing_period in periods.open():
            period = periods.period(billing_period)
            if period.label == month:
                yield name, period


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
        label_of: Callable[[int], str] = periods.label_of_adjustment
        reported |= {row.pk for row in by_account[name] if label_of(start_of(row)) == month}
    return sorted(reported)


def _periods_of(using: str, names: Iterable[str]) -> Iterator[tuple[str, AccountPeriods]]:
    """Yield the billing periods of each account. The data of many accounts are read together."""
    in_order = sorted(names)
    for first in range(0, len(in_order), _MAX_ACCOUNTS):
        chunk = in_order[first : first + _MAX_ACCOUNTS]
        # The last argument has the locked shards. There are none, because nothing is written here.
        data = ClosingData(using, chunk, {})
        yield from ((name, AccountPeriods(data, name, lenient=True)) for name in chunk)
