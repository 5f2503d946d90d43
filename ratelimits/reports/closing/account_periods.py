"""Find the billing periods of one account from its usage, its adjustments and its reports."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property

from django.db.models import Max

from ratelimits.models import Adjustment, Line
from ratelimits.reports.adjusting import start_of
from ratelimits.reports.billing_periods import BillingPeriod, billing_periods, reported_periods
from ratelimits.reports.closing.closing_data import ClosingData
from ratelimits.reports.periods import SECOND, Period, period_at, period_from
from ratelimits.reports.terms import Terms

#: Minimum length of a complete billing month (µs). February has 28 days, and a change of the clocks can shorten it.
SHORTEST_MONTH = 27 * 86_400 * SECOND


class AccountPeriods:
    """The billing periods of an account.

    `counted` are the starts (µs) of more counted periods with usage. Their usage can be missing in `data`.

    Some methods need the account's time zone. If this zone no longer exists, these methods raise ValueError. But if
    `lenient` is true, all of them except `next` use UTC.
    """

    def __init__(
        self, data: ClosingData, account: str, counted: Collection[int] = (), *, lenient: bool = False
    ) -> None:
        self._data, self._account, self._counted, self._lenient = data, account, counted, lenient

    @cached_property
    def billing_periods(self) -> list[BillingPeriod]:
        """Return the billing periods with usage, adjustments or a report, sorted by their starts."""
        # The end of each counted period, by its start. Both are in µs.
        used: dict[int, int] = {}
        for usage in self._data.usage(self._account):
            start = usage.period * SECOND
            end = self._end(start) if usage.period_end is None else usage.period_end * SECOND
            used[start] = max(end, used.get(start, 0))
        used |= {start: self._end(start) for start in self._counted if start not in used}
        reported = reported_periods(self._data.reports(self._account), used)
        spans = [*used.items(), *((period.start, period.end) for period in reported)]
        # A period that has only adjustments is added too.
        for start in map(start_of, self._data.adjustments(self._account)):
            if not any(first <= start < end for first, end in spans):
                used[start] = self._end(start)
        return billing_periods(used, reported, self._last_used)

    def open(self) -> list[BillingPeriod]:
        """Return the billing periods without a report."""
        return [period for period in self.billing_periods if not period.closed]

    def open_by_member(self) -> dict[int, tuple[BillingPeriod, Period]]:
        """Return the billing periods without a report, by the starts (µs) of their counted periods.

        Each value is a pair: a billing period, and the `Period` that the method `period` makes from it.
        """
        by_member: dict[int, tuple[BillingPeriod, Period]] = {}
        for billing_period in self.open():
            period = self.period(billing_period)
            by_member |= dict.fromkeys(billing_period.members, (billing_period, period))
        return by_member

    def period(self, billing_period: BillingPeriod) -> Period:
        """Return a billing period as a `Period`, which has a time zone.

        Perhaps the account's time zone was edited. So take the account's old or new time zone: the one in which a
        billing month starts when the last counted period starts. If there is none, take the time zone that the account
        had at the end of the billing period.
        """
        return Period(
            billing_period.start,
            billing_period.end,
            self._terms(max(billing_period.members), billing_period.end - 1).timezone,
        )

    def label(self, billing_period: BillingPeriod) -> str:
        """Return the month of a billing period, like "2026-11": the stored month if the period has a report."""
        reports = self._data.reports(self._account)
        labels = (report.label for report in reports if report.period_start == billing_period.start)
        return next(labels, None) or self.period(billing_period).label

    def next(self) -> Period:
        """Return the period after the last one, by the account's current time zone and anchor day."""
        last = max(period.end for period in self.billing_periods)
        return self._data.terms(self._account, None).period(last)

    def adjustments(self, billing_period: BillingPeriod) -> list[Adjustment]:
        """Return the adjustments of a billing period that are not on a report yet."""
        adjustments = self._data.adjustments(self._account)
        return [adjustment for adjustment in adjustments if _belongs_to(start_of(adjustment), billing_period)]

    def of_adjustment(self, start: int) -> BillingPeriod | None:
        """Return the billing period to which an adjustment belongs; None if it is not found.

        `start` is the start (µs) of the period that the adjustment names. This period can be a counted period.
        """
        return next((period for period in self.billing_periods if _belongs_to(start, period)), None)

    def label_of_adjustment(self, start: int) -> str:
        """Return the month, like "2026-11", of the period of an adjustment, even if this period has nothing else.

        `start` is the start (µs) of the period that the adjustment names.
        """
        billing_period = self.of_adjustment(start)
        if billing_period is not None:
            return self.label(billing_period)
        try:
            return self._data.terms(self._account, None).period(start).label
        except ValueError:  # The account's time zone no longer exists.
            return period_at("UTC", None, start).label

    def oldest_open_start(self) -> int:
        """Return the start (µs) of the oldest counted period with usage that no report covers; 0 if there is none."""
        usage = self._data.usage(self._account)
        return min((row.period * SECOND for row in usage if row.covered is None), default=0)

    def _end(self, start: int) -> int:
        """Return the end (µs) of a counted period whose end is not stored. It is computed from the account's terms."""
        terms = self._terms(start, None)
        return period_from(terms.timezone, terms.anchor, start, self._data.terms(self._account, None).kept).end

    def _terms(self, start: int, fallback_at: int | None) -> Terms:
        """Return terms of the account by which a billing month starts at `start`.

        Try the terms at `start`, then the terms near the end of the month, then the current terms. If none of these
        terms fits, return the account's terms at the moment `fallback_at`; None means now.
        """
        candidates = [self._data.terms(self._account, at) for at in (start, start + SHORTEST_MONTH, None)]
        matching = (terms for terms in candidates if period_at(terms.timezone, terms.anchor, start).start == start)
        try:
            return next(matching, None) or self._data.terms(self._account, fallback_at)
        except ValueError:
            if self._lenient:
                return Terms()  # calendar months in UTC
            raise

    def _last_used(self, starts: Collection[int]) -> dict[int, int]:
        """Map the start of each of these counted periods to the newest bin with usage of the period.

        Starts are in µs, and bins are in seconds.
        """
        lines = Line.objects.using(self._data.using).filter(account=self._account)
        lines = lines.filter(period__in=[start // SECOND for start in starts])
        bins = lines.values_list("period").order_by().annotate(Max("bin"))
        return {period * SECOND: newest for period, newest in bins}


def _belongs_to(start: int, billing_period: BillingPeriod) -> bool:
    return start in billing_period.members or billing_period.start <= start < billing_period.end
