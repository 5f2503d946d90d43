"""Compute again the allowances of a finalised report, by which its lines have included units and overage."""

from __future__ import annotations

from ratelimits.billing.models import Report, ReportLine
from ratelimits.billing.reports.build import Allowance, allowance_with_reported_units
from ratelimits.usage.models.sums import ExactSum
from ratelimits.usage.periods import SECOND


class ReportAllowances:
    """The allowances with which a report begins, for each billing period with usage on the report.

    They say how many of the included units the lines of earlier reports have used.

    A line can contain late usage of an earlier billing period. Such a line uses the allowance of that billing period.
    But if `one_for_all` is true, all lines use the allowance of the report's period. An earlier version of this app
    made such reports.
    """

    def __init__(self, using: str, report: Report, *, one_for_all: bool = False) -> None:
        self._using, self._report = using, report
        starts = {report.period_start, *(int(period) * SECOND for period in report.since)}
        # Nearly all reports contain only usage of their own period. Then no other report is needed.
        is_simple = len(starts) == 1 and report.version == 1
        rows = Report.objects.using(using).filter(customer__token=report.customer_id, pk__lte=report.pk)
        self._reports = [report] if is_simple else list(rows.order_by("pk"))
        #: The end (µs) of each billing period with usage on the report, by its start, if this period has a report.
        self.ends = {other.period_start: other.period_end for other in self._reports if other.period_start in starts}
        #: The allowances by the start (µs) of the billing period.
        self.allowances = {start: self._before_report(start) for start in self.ends}
        if one_for_all:
            allowance = self.allowances[report.period_start] = self._of_report_period()
            self.allowances = dict.fromkeys(starts, allowance)

    def _before_report(self, start: int) -> Allowance:
        """Return the allowance that earlier reports have left of a billing period."""
        report = self._report
        if start == report.period_start and report.version == 1:
            return Allowance(report.included)
        versions = (other for other in self._reports if other.period_start == start)
        newest = report if start == report.period_start else max(versions, key=lambda other: other.version)
        return allowance_with_reported_units(self._using, report.customer_id, start, newest.included, report.pk)

    def _of_report_period(self) -> Allowance:
        """Return the allowance of the report's period after all lines of earlier versions.

        The units of all these lines count as used, also the units of late usage of other periods.
        """
        report = self._report
        lines = ReportLine.objects.using(self._using).filter(
            report__customer__token=report.customer_id,
            report__period_start=report.period_start,
            report__version__lt=report.version,
        )
        sums = list(
            lines.values_list("meter").order_by().annotate(ExactSum("included_quantity"), ExactSum("overage_quantity"))
        )
        used = {meter: included for meter, included, _overage in sums}
        return Allowance(report.included, used, {meter: overage for meter, _included, overage in sums})
