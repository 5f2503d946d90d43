"""The allowances that divided the lines of a finalised report into included units and overage, computed again."""

from __future__ import annotations

from django.db.models import Max, Sum

from ratelimits.models import PeriodUsage, Report, ReportLine
from ratelimits.reports.billing_periods import billing_starts
from ratelimits.reports.build import Allowance, remaining
from ratelimits.reports.periods import SECOND


class Rated:
    """The billing periods that a report's usage belongs to, and the allowances that they had before the report.

    `billing_starts` has the start (µs) of the billing period for the start of each counted period. If `by_own` is
    false, the allowance of the report's period is used for all lines, also for late usage of other periods.
    """

    def __init__(self, using: str, report: Report, *, by_own: bool = True) -> None:
        self._using, self._report = using, report
        rows = Report.objects.using(using).filter(account=report.account, pk__lte=report.pk)
        # Nearly all reports contain only usage that was counted under their own period.
        plain = set(report.since) <= {str(report.period_start // SECOND)} and report.version == 1
        self._reports = [report] if plain else list(rows.order_by("pk"))
        all_starts = billing_starts(self._reports, {} if plain else self._ends())
        self.billing_starts = {start: all_starts[start] for start in (int(period) * SECOND for period in report.since)}
        starts = {report.period_start, *self.billing_starts.values()}
        self.allowances = {billing_start: self._left(billing_start, all_starts) for billing_start in starts}
        if not by_own:
            own = self.allowances[report.period_start] = self._of_lines()
            self.allowances = dict.fromkeys(starts, own)

    def _ends(self) -> dict[int, int]:
        rows = PeriodUsage.objects.using(self._using).filter(account=self._report.account).order_by()
        ends = rows.values_list("period").annotate(Max("period_end"))
        return {period * SECOND: end * SECOND for period, end in ends if end is not None}

    def _left(self, billing_start: int, all_starts: dict[int, int]) -> Allowance:
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
        periods = {billing_start, *(start for start, own in all_starts.items() if own == billing_start)}
        return remaining(self._using, report.account, periods, newest.included, report.pk)

    def _of_lines(self) -> Allowance:
        """Return the allowance of the report's period after all lines of earlier versions.

        Late usage of other periods on these lines counts too.
        """
        report = self._report
        lines = ReportLine.objects.using(self._using).filter(
            report__account=report.account, report__period_start=report.period_start, report__version__lt=report.version
        )
        sums = list(lines.values_list("meter").order_by().annotate(Sum("included_quantity"), Sum("overage_quantity")))
        included = {name: used for name, used, _over in sums}
        return Allowance(report.included, included, {name: over for name, _used, over in sums})
