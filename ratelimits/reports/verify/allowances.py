"""Compute again the allowances of a finalised report, by which its lines have included units and overage."""

from __future__ import annotations

from django.db.models import Max

from ratelimits.models import PeriodUsage, Report, ReportLine
from ratelimits.models.ledger.sums import ExactSum
from ratelimits.reports.billing_periods import billing_starts
from ratelimits.reports.build import Allowance, allowance_with_reported_units
from ratelimits.reports.periods import SECOND


class ReportAllowances:
    """The allowances with which a report begins, for each billing period with usage on the report.

    They say how many of the included units the lines of earlier reports have used.

    A line can contain late usage of an earlier billing period. Such a line uses the allowance of that billing period.
    But if `one_for_all` is true, all lines use the allowance of the report's period. An earlier version of this app
    made such reports.
    """

    def __init__(self, using: str, report: Report, *, one_for_all: bool = False) -> None:
        self._using, self._report = using, report
        rows = Report.objects.using(using).filter(account=report.account, pk__lte=report.pk)
        # Nearly all reports contain only usage of their own period. Then no other report is needed.
        is_simple = set(report.since) <= {str(report.period_start // SECOND)} and report.version == 1
        self._reports = [report] if is_simple else list(rows.order_by("pk"))
        all_starts = billing_starts(self._reports, {} if is_simple else self._ends())
        #: By start (µs) of a counted period: the start (µs) of the billing period that contains it.
        self.billing_starts = {start: all_starts[start] for start in (int(period) * SECOND for period in report.since)}
        starts = {report.period_start, *self.billing_starts.values()}
        #: The allowances by the start (µs) of the billing period.
        self.allowances = {billing_start: self._before_report(billing_start, all_starts) for billing_start in starts}
        if one_for_all:
            allowance = self.allowances[report.period_start] = self._of_report_period()
            self.allowances = dict.fromkeys(starts, allowance)

    def _ends(self) -> dict[int, int]:
        """Return the end (µs) of each counted period of the account, by the start (µs) of this period."""
        rows = PeriodUsage.objects.using(self._using).filter(account=self._report.account).order_by()
        ends = rows.values_list("period").annotate(Max("period_end"))
        return {period * SECOND: end * SECOND for period, end in ends if end is not None}

    def _before_report(self, billing_start: int, all_starts: dict[int, int]) -> Allowance:
        """Return the allowance that earlier reports have left of a billing period."""
        report = self._report
        if billing_start == report.period_start:
            if report.version == 1:
                return Allowance(report.included)
            newest = report
        else:
            newest = max(
                (other for other in self._reports if other.period_start == billing_start),
                key=lambda other: other.version,
            )
        periods = {billing_start, *(counted for counted, start in all_starts.items() if start == billing_start)}
        return allowance_with_reported_units(self._using, report.account, periods, newest.included, report.pk)

    def _of_report_period(self) -> Allowance:
        """Return the allowance of the report's period after all lines of earlier versions.

        The units of all these lines count as used, also the units of late usage of other periods.
        """
        report = self._report
        lines = ReportLine.objects.using(self._using).filter(
            report__account=report.account, report__period_start=report.period_start, report__version__lt=report.version
        )
        sums = list(
            lines.values_list("meter").order_by().annotate(ExactSum("included_quantity"), ExactSum("overage_quantity"))
        )
        used = {meter: included for meter, included, _overage in sums}
        return Allowance(report.included, used, {meter: overage for meter, _included, overage in sums})
