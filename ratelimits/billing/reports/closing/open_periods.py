"""Find billing periods that have ended but have no report, with the reason; close one of them by force."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from time import time_ns
from typing import Any

from django.utils import translation
from django.utils.translation import gettext_lazy

from ratelimits.algorithms.billing_periods import Period, month_of
from ratelimits.billing.models import Report
from ratelimits.billing.reports.adjusting import unreported
from ratelimits.billing.reports.closing.close import ended, in_account_order, locked, mark_as_reported, shards_of
from ratelimits.billing.reports.closing.closing_data import ClosingData
from ratelimits.billing.reports.closing.customer import Closing, TooLargeError
from ratelimits.billing.reports.closing.customer_periods import MissingPeriodError
from ratelimits.billing.reports.closing.labelled import with_open_periods
from ratelimits.billing.reports.gaps import forced_event
from ratelimits.conf import conf
from ratelimits.engine.keys import ANONYMOUS
from ratelimits.models.accounts.named import named_now, of_tokens
from ratelimits.usage.models import DurabilityGap, GapKind, PeriodUsage, ShardState
from ratelimits.usage.periods import SECOND, iso, utc_month_start


class NotForcedError(ValueError):
    """Raised if a period cannot be closed even by force; the message says why."""


@dataclass(frozen=True, slots=True)
class OpenPeriod:
    """A period without a report. `start` is the start of the period, in µs since 1970 UTC.

    account      the text that the report will have
    token        the token of the customer
    period       the period with its end; None if its row is no longer in the table of billing periods
    over         whether the period ended at least GRACE_SECONDS ago, by this machine's clock; also true if `period` is
                 None
    awaited      whether people can expect a report: the period is over, or its month is over in UTC
    why          the reason why the period is open, as a sentence
    complete     whether the period can be closed now
    units        billable units so far, by meter; they include adjustments
    quarantined  the customer's shards that have a quarantined batch
    """

    account: str
    token: str
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
        """Return the name of the period for people; its start if the end is not known."""
        return iso(self.start) if self.period is None else self.period.name


#: A period ends at most this time (µs) after the end of its month in UTC: in the westernmost time zone.
_WESTERNMOST = 12 * 3600 * SECOND
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
    """Yield the periods without a report that have ended, or whose month is over in UTC, sorted by account.

    `now` is in µs since 1970 UTC; the default is the time of this machine. With `account`, yield only the periods of
    the customer whom this text names now. With `running`, also yield periods that have not ended. With `month`, such as
    "2026-11", yield the open periods of this month alone, also those that have not ended.

    Use `awaited` if only awaited periods are needed (see `OpenPeriod`). Then this is faster, because most customers
    without such a period are not read. But other periods can still be among the results.
    """
    using = conf.DATABASE
    now = time_ns() // 1000 if now is None else now
    customer = None if account is None else named_now(using, [account])[account]
    filters: dict[str, Any] = {} if customer is None else {"customer": customer.pk}
    if month is not None:
        for open_period in _of_customers(using, with_open_periods(using, month, customer), now):
            if open_period.period is None or open_period.period.label == month:
                yield open_period
        return
    # `covered` is empty while no final report contains the usage.
    usage = PeriodUsage.objects.using(using).filter(covered=None, **filters)
    if not running:
        grace = conf.GRACE_SECONDS * SECOND if awaited else 0
        until = max(now - grace, utc_month_start(now) + _WESTERNMOST)
        usage = usage.filter(ended(until))
    queries = (usage, unreported(using, **filters))  # usage and adjustments that are on no report
    pks = {pk for rows in queries for pk in rows.order_by().values_list("customer", flat=True).distinct()}
    yield from _of_customers(using, pks, now, running=running)


def _of_customers(using: str, pks: Collection[int], now: int, *, running: bool = True) -> Iterator[OpenPeriod]:
    """Yield the open periods of these customers. With `running`, also those that have not ended."""
    # Nothing is locked here, so customers of different shards are read together.
    for chunk in in_account_order(using, pks):
        shards = shards_of(using, chunk)
        states = ShardState.objects.using(using).in_bulk({shard for group in shards.values() for shard in group})
        data = ClosingData(using, chunk, states)
        for customer in chunk:
            closing = Closing(data, customer, shards[customer.token], now)
            yield from _of_customer(data, closing, now, running=running)


def running_count(account: str | None = None) -> int:
    """Return how many periods have usage but no report. If `open_periods` yields none, all of these still run.

    The periods are only counted, not read, because each customer can have such a period.
    """
    usage = PeriodUsage.objects.using(conf.DATABASE).filter(covered=None).order_by()
    if account is not None:
        usage = usage.filter(customer=named_now(conf.DATABASE, [account])[account].pk)
    return usage.values("customer", "period").distinct().count()


def _of_customer(data: ClosingData, closing: Closing, now: int, *, running: bool) -> Iterator[OpenPeriod]:
    try:
        # A period of a past month can still run, because its time zone is in the west.
        this_month = month_of(now, "UTC")
        periods = [
            period for period in closing.periods.open() if running or period.end <= now or period.label < this_month
        ]
    except MissingPeriodError as error:
        start = closing.periods.oldest_open_start()
        yield _open_period(closing, start=start, period=None, over=True, why=str(error), units={})
        return
    for period in periods:
        yield _described(closing, period, now, _units(data, closing, period))


def _open_period(closing: Closing, **values: Any) -> OpenPeriod:
    return OpenPeriod(account=closing.customer.account, token=closing.customer.token, **values)


def _units(data: ClosingData, closing: Closing, period: Period) -> dict[str, int]:
    """Return the billable units of a period so far, by meter. They include adjustments."""
    units: Counter[str] = Counter()
    for row in data.usage(closing.customer):
        if row.period * SECOND == period.start:
            units[row.meter] += row.admitted_units - row.refunded_units
    for adjustment in closing.periods.adjustments(period):
        units[adjustment.meter] += adjustment.quantity
    return dict(sorted(units.items()))


def _described(closing: Closing, period: Period, now: int, units: dict[str, int]) -> OpenPeriod:
    over = now >= period.end + conf.GRACE_SECONDS * SECOND
    why = closing.obstacle(period)
    return _open_period(
        closing,
        start=period.start,
        period=period,
        over=over,
        why=why or str(_COMPLETE),
        units=units,
        quarantined=closing.quarantined,
        complete=not why,
        awaited=over or period.label < month_of(now, "UTC"),
    )


def force(token: str, start: int, by: str, reason: str, now: int | None = None) -> Report:
    """Close a period with the usage that the ledger has, and declare on its report that usage may be missing.

    `token` is the token of the customer. `start` is in µs since 1970 UTC; `by` names the person. Usage that arrives
    afterwards is treated as late usage. Raise NotForcedError if the period has not ended, if it has a report, if it has
    nothing to report, if the reason is empty, or if a price or an adjustment is not valid.
    """
    using = conf.DATABASE
    now = time_ns() // 1000 if now is None else now
    if not reason.strip():
        raise NotForcedError("give a reason: it is stored in the declared gap")
    pk = of_tokens(using, [token])[token].pk
    if pk is None:
        raise NotForcedError(f"there is no customer {token!r}")
    with locked(using, [pk]) as (data, shards):
        (customer,) = data.customers
        closing = Closing(data, customer, shards[token], now)
        period = _forcible(closing, start, now)
        with translation.override("en"):  # Reports print the gap, so its text must not be in the person's language.
            why = closing.obstacle(period) or str(_COMPLETE)
        DurabilityGap.objects.using(using).create(
            event=forced_event(token, start),
            kind=GapKind.FORCED,
            account=customer.account or ANONYMOUS,
            since=period.start,
            until=period.end - 1,
            detail=f"{by}: {reason} ({why})",
        )
        # Read the data again, so that the report contains the new gap.
        data = ClosingData(using, data.customers, data.states)
        report = Closing(data, customer, shards[token], now).close_by_force(period)
        mark_as_reported(data, [report])
    return report


def _forcible(closing: Closing, start: int, now: int) -> Period:
    """Return the open period that starts at `start`. Raise NotForcedError if it cannot be closed even by force."""
    try:
        period = next((period for period in closing.periods.open() if period.start == start), None)
        if period is not None:
            closing.check(period)
    except TooLargeError as error:
        raise NotForcedError(str(error)) from error
    except ValueError as error:
        raise NotForcedError(f"{error}: correct it first") from error
    if period is None:
        raise NotForcedError(
            f"{closing.customer.account or 'anonymous'} has no open period that starts at {iso(start)}"
        )
    if now < period.end:
        raise NotForcedError(
            f"the period {period.name} ends at {period.local_end()} in {period.timezone}: it cannot be billed before"
        )
    return period
