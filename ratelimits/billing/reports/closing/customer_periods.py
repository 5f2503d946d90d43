"""Find the billing periods of one customer that have usage, adjustments or a report."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property

from django.utils.translation import gettext as _

from ratelimits.algorithms.billing_periods import Period
from ratelimits.billing.models import Adjustment
from ratelimits.billing.reports.adjusting import start_of
from ratelimits.billing.reports.closing.closing_data import ClosingData
from ratelimits.models.accounts.named import NamedCustomer
from ratelimits.moments import when
from ratelimits.usage.periods import SECOND


class MissingPeriodError(ValueError):
    """Raised if a frozen period is missing: raw SQL has deleted or changed its row."""


class CustomerPeriods:
    """The billing periods of a customer. `bins` are bins with usage (s since 1970 UTC) that are perhaps not tallied."""

    def __init__(self, data: ClosingData, customer: NamedCustomer, bins: Collection[int] = ()) -> None:
        self._data, self._customer, self._bins = data, customer, bins
        self._timeline = data.timeline(customer)
        reports = (report for report in data.reports(customer) if report.version == 1)
        #: The periods with a report, by their starts (µs).
        self._closed = {
            report.period_start: Period(report.period_start, report.period_end, report.timezone, report.label)
            for report in reports
        }

    @cached_property
    def periods(self) -> list[Period]:
        """Return the billing periods with usage, adjustments or a report, sorted by their starts.

        Raise MissingPeriodError if usage was tallied in a period that is not frozen.
        """
        frozen = {period.start: period for period in self._timeline.frozen} | self._closed
        starts = {usage.period * SECOND for usage in self._data.usage(self._customer)}
        if missing := starts - frozen.keys():
            text = _(
                "its usage belongs to the billing period from %(start)s, which is not in the table of billing periods:"
                " restore this table from a backup"
            )
            raise MissingPeriodError(text % {"start": when(min(missing))})
        moments = [bin_ * SECOND for bin_ in self._bins]
        moments += [start_of(adjustment) for adjustment in self._data.adjustments(self._customer)]
        named = {period.start: period for period in map(self.at, moments)}
        found = named | {start: frozen[start] for start in starts} | self._closed
        return sorted(found.values())

    def is_closed(self, period: Period) -> bool:
        """Return whether a period has a report."""
        return period.start in self._closed

    def open(self) -> list[Period]:
        """Return the billing periods without a report."""
        return [period for period in self.periods if not self.is_closed(period)]

    def at(self, moment: int) -> Period:
        """Return the customer's billing period at a moment (µs since 1970 UTC), even if it has no usage."""
        period = self._timeline.at(moment)
        return self._closed.get(period.start, period)

    def next(self) -> Period:
        """Return the period after the last one."""
        return self._timeline.at(self.periods[-1].end)

    def adjustments(self, period: Period) -> list[Adjustment]:
        """Return the adjustments of a billing period that are not on a report yet."""
        adjustments = self._data.adjustments(self._customer)
        return [adjustment for adjustment in adjustments if self.at(start_of(adjustment)).start == period.start]

    def oldest_open_start(self) -> int:
        """Return the start (µs) of the oldest period with usage that no report covers; 0 if there is none."""
        usage = self._data.usage(self._customer)
        return min((row.period * SECOND for row in usage if row.covered is None), default=0)
