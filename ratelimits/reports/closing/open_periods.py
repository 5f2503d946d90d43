"""Find billing periods that have ended but have no report, with the reason; close one of them by force."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from time import time_ns
from typing import Any

from django.db import transaction
from django.db.models import Exists, OuterRef, Q
from django.utils import translation
from django.utils.translation import gettext, gettext_lazy

from ratelimits.conf import conf
from ratelimits.engine.keys import ANONYMOUS
from ratelimits.models import DurabilityGap, GapKind, PeriodUsage, Report, ShardState
from ratelimits.reports.adjusting import unreported
from ratelimits.reports.billing_periods import BillingPeriod
from ratelimits.reports.closing.account import Closing, TooLargeError
from ratelimits.reports.closing.account_periods import SHORTEST_MONTH
from ratelimits.reports.closing.close import ended, mark_as_reported, shards_of, shards_to_lock
from ratelimits.reports.closing.closing_data import ClosingData
from ratelimits.reports.closing.labelled import open_in
from ratelimits.reports.periods import SECOND, Period, iso, month_of, utc_month_start


class NotForcedError(ValueError):
    """Raised if a period cannot be closed even by force; the message says why."""


@dataclass(frozen=True, slots=True)
class OpenPeriod:
    """A period without a report. `start` is the start of the period, in µs since 1970 UTC.

    period       the period with its end; None if the account's time zone cannot be read
    over         whether the period ended at least GRACE_SECONDS ago, by this machine's clock; also true if `period` is
                 None
    awaited      whether people can expect a report: the period is over, or its month is over in UTC
    why          the reason why the period is open, as a sentence
    complete     whether the period can be closed now
    units        billable units so far, by meter; they include adjustments
    quarantined  the account's shards that have a quarantined batch
    """

    account: str
    start: int
    period: Period | None
    over: bool
    why: str
    units: dict[str, int]
    quarantined: Sequence[int] = ()
    complete: bool = False
    awaited: bool = True

    @property
    def name(self) -> str:
        """Return the name of the period for people; its start if the account's time zone cannot be read."""
        return iso(self.start) if self.period is None else self.period.name


#: A period ends at most this time (µs) after the end of its month in UTC: in the westernmost time zone.
_WESTERNMOST = 12 * 3600 * SECOND
#: Maximum number of accounts whose data are read together. The page of the admin has at most 200 periods, so one
#: read is usually enough for this page.
_MAX_ACCOUNTS = 250
#: The reason why a period is open although its report could be written now.
_COMPLETE = gettext_lazy("its usage is complete: the next ratelimits_finalise closes it")


def open_periods(
    now: int | None = None,
    *,
    account: str | None = None,
    running: bool = False,
    awaited: bool = False,
    month: str | None = None,
) -> Iterator[OpenPeriod]:
    """Yield the periods that have perhaps ended and have no report, sorted by account.

    `now` is in µs since 1970 UTC; the default is the time of this machine. With `account`, yield only the periods of
    this account. With `running`, also yield periods that have not ended. With `month`, such as "2026-11", yield the
    open periods of this month alone, also those that have not ended.

    Use `awaited` if only awaited periods are needed (see `OpenPeriod`). Then this is faster, because most accounts
    without such a period are not read. But other periods can still be among the results.
    """
    using = conf.DATABASE
    now = time_ns() // 1000 if now is None else now
    filters: dict[str, Any] = {} if account is None else {"account": account}
    if month is not None:
        for open_period in _of_accounts(using, sorted({name for name, _period in open_in(using, month, account)}), now):
            if open_period.period is not None and open_period.period.label == month:
                yield open_period
        return
    # `covered` is empty while no final report contains the usage.
    usage = PeriodUsage.objects.using(using).filter(covered=None, **filters)
    if not running:
        until = max(now - conf.GRACE_SECONDS * SECOND, utc_month_start(now) + _WESTERNMOST) if awaited else now
        # A row of `usage` has the end of its counted period, but a report can make the billing period end earlier. So
        # also take periods that started at least SHORTEST_MONTH ago. With `awaited`, take only the shortened ones.
        may_have_ended = Q(period__lte=(until - SHORTEST_MONTH) // SECOND)
        if awaited:
            may_have_ended &= _shortened(using)
        usage = usage.filter(ended(until) | may_have_ended)
    queries = (usage, unreported(using, **filters))  # usage and adjustments that are on no report
    names = sorted({name for rows in queries for name in rows.order_by().values_list("account", flat=True).distinct()})
    yield from _of_accounts(using, names, now, running=running)


def _of_accounts(using: str, names: list[str], now: int, *, running: bool = True) -> Iterator[OpenPeriod]:
    """Yield the open periods of these accounts. With `running`, also those that have not ended."""
    # Nothing is locked here, so accounts of different shards are read together.
    for first in range(0, len(names), _MAX_ACCOUNTS):
        chunk = names[first : first + _MAX_ACCOUNTS]
        shards = shards_of(using, chunk)
        states = ShardState.objects.using(using).in_bulk({shard for group in shards.values() for shard in group})
        data = ClosingData(using, chunk, states)
        for name in chunk:
            closing = Closing(data, name, shards[name], now)
            yield from _of_account(data, closing, now, running=running)


def running_count(account: str | None = None) -> int:
    """Return how many periods have usage but no report. If `open_periods` yields none, all of these still run.

    The periods are only counted, not read, because each account can have such a period.
    """
    filters: dict[str, Any] = {} if account is None else {"account": account}
    usage = PeriodUsage.objects.using(conf.DATABASE).filter(covered=None, **filters).order_by()
    return usage.values("account", "period").distinct().count()


def _shortened(using: str) -> Q:
    """Return the condition for usage of a shortened period: a period with a report starts within this period."""
    reports = Report.objects.using(using).filter(
        account=OuterRef("account"),
        period_start__gt=OuterRef("period") * SECOND,
        period_start__lt=OuterRef("period_end") * SECOND,
    )
    return Q(Exists(reports))


def _of_account(data: ClosingData, closing: Closing, now: int, *, running: bool) -> Iterator[OpenPeriod]:
    periods = closing.periods
    try:
        # Also take periods that began at least a shortest month ago: usage that arrives later can still make the end of
        # an open period earlier.
        billing_periods = [
            period for period in periods.open() if running or period.end <= now or period.start <= now - SHORTEST_MONTH
        ]
    except ValueError as error:
        yield OpenPeriod(
            account=closing.account,
            start=periods.oldest_open_start(),
            period=None,
            over=True,
            why=gettext("%(error)s: correct the account") % {"error": error},
            units={},
        )
        return
    for billing_period in billing_periods:
        yield _described(closing, billing_period, now, _units(data, closing, billing_period))


def _units(data: ClosingData, closing: Closing, billing_period: BillingPeriod) -> dict[str, int]:
    """Return the billable units of a period so far, by meter. They include adjustments."""
    units: Counter[str] = Counter()
    for row in data.usage(closing.account):
        # `members` are the starts of counted periods, in µs. `row.period` is in s.
        if row.period * SECOND in billing_period.members:
            units[row.meter] += row.admitted_units - row.refunded_units
    for adjustment in closing.periods.adjustments(billing_period):
        units[adjustment.meter] += adjustment.quantity
    return dict(sorted(units.items()))


def _described(closing: Closing, billing_period: BillingPeriod, now: int, units: dict[str, int]) -> OpenPeriod:
    try:
        period = closing.periods.period(billing_period)
    except ValueError as error:
        return OpenPeriod(
            account=closing.account,
            start=billing_period.start,
            period=None,
            over=True,
            why=gettext("%(error)s: correct the account") % {"error": error},
            units=units,
        )
    over = now >= period.end + conf.GRACE_SECONDS * SECOND
    awaited = over or period.label < month_of(now, "UTC")
    why = closing.obstacle(period)
    return OpenPeriod(
        account=closing.account,
        start=billing_period.start,
        period=period,
        over=over,
        why=why or str(_COMPLETE),
        units=units,
        quarantined=closing.quarantined,
        complete=not why,
        awaited=awaited,
    )


def force(account: str, start: int, by: str, reason: str, now: int | None = None) -> Report:
    """Close a period with the usage that the ledger has, and declare on its report that usage may be missing.

    `start` is in µs since 1970 UTC; `by` names the person. Usage that arrives afterwards is treated as late usage.
    Raise NotForcedError if the period has not ended, if it has a report, if it has nothing to report, if the reason is
    empty, or if a price, an adjustment or the account's time zone is not valid.
    """
    using = conf.DATABASE
    now = time_ns() // 1000 if now is None else now
    if not reason.strip():
        raise NotForcedError("give a reason: it is stored in the declared gap")
    shards = shards_of(using, [account])
    to_lock = shards_to_lock(using, shards)
    with transaction.atomic(using=using, durable=True):
        locked = [ShardState.lock(using, shard) for shard in to_lock]
        states = {state.shard: state for state in locked if state is not None}
        closing = Closing(ClosingData(using, [account], states), account, shards[account], now)
        billing_period, period = _forcible(closing, start, now)
        with translation.override("en"):  # Reports print the gap, so its text must not be in the person's language.
            why = closing.obstacle(period) or str(_COMPLETE)
        DurabilityGap.objects.using(using).create(
            event=f"{GapKind.FORCED}:{sha256(f'{account}:{start}'.encode()).hexdigest()}",
            kind=GapKind.FORCED,
            account=account or ANONYMOUS,
            since=period.start,
            until=period.end - 1,
            detail=f"{by}: {reason} ({why})",
        )
        # Read the data again, so that the report contains the new gap.
        closing = Closing(ClosingData(using, [account], states), account, shards[account], now)
        report = closing.close_by_force(billing_period)
        mark_as_reported(using, [report])
    return report


def _forcible(closing: Closing, start: int, now: int) -> tuple[BillingPeriod, Period]:
    """Return the open period that starts at `start`, as a BillingPeriod and as a Period.

    Raise NotForcedError if it cannot be closed even by force.
    """
    try:
        billing_period = next((period for period in closing.periods.open() if period.start == start), None)
        period = None if billing_period is None else closing.periods.period(billing_period)
        if period is not None:
            closing.check(period)
    except TooLargeError as error:
        raise NotForcedError(str(error)) from error
    except ValueError as error:
        raise NotForcedError(f"{error}: correct it first") from error
    if billing_period is None or period is None:
        raise NotForcedError(f"{closing.account or 'anonymous'} has no open period that starts at {iso(start)}")
    if now < period.end:
        raise NotForcedError(
            f"the period {period.name} ends at {period.local_end()} in {period.timezone}: it cannot be billed before"
        )
    return billing_period, period
