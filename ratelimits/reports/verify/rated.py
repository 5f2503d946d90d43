"""By which billing periods' allowances the lines of a finalised report were rated, found again from the reports."""

from __future__ import annotations

from django.db.models import Max, Sum

from ratelimits.models import PeriodUsage, Report, ReportLine
from ratelimits.reports.build import Allowance, remaining
from ratelimits.reports.periods import SECOND
from ratelimits.reports.tiles import homes


class Rated:
    """The billing periods that a report's usage belongs to, and their allowances as they were left before the report.

    `homes` are the starts (µs) of these periods, by the starts of the periods that usage was counted under. Without
    `by_own` the report's own allowance is that of all its lines.
    """

    def __init__(self, using: str, report: Report, *, by_own: bool = True) -> None:
        self._using, self._report = using, report
        rows = Report.objects.using(using).filter(account=report.account, pk__lte=report.pk)
        # Nearly every report has nothing but the usage that was counted under its own period.
        plain = set(report.since) <= {str(report.period_start // SECOND)} and report.version == 1
        self._reports = [report] if plain else list(rows.order_by("pk"))
        found = homes(self._reports, {} if plain else self._ends())
        self.homes = {start: found[start] for start in (int(period) * SECOND for period in report.since)}
        starts = {report.period_start, *self.homes.values()}
        self.allowances = {home: self._left(home, found) for home in starts}
        if not by_own:
            own = self.allowances[report.period_start] = self._of_lines()
            self.allowances = dict.fromkeys(starts, own)

    def _ends(self) -> dict[int, int]:
        rows = PeriodUsage.objects.using(self._using).filter(account=self._report.account).order_by()
        ends = rows.values_list("period").annotate(Max("period_end"))
        return {period * SECOND: end * SECOND for period, end in ends if end is not None}

    def _left(self, home: int, found: dict[int, int]) -> Allowance:
        report = self._report
        if home == report.period_start:
            if report.version == 1:
                return Allowance(report.included)
            newest = report
        else:
            newest = max((each for each in self._reports if each.period_start == home), key=lambda each: each.version)
        periods = {home, *(start for start, its in found.items() if its == home)}
        return remaining(self._using, report.account, periods, newest.included, report.pk)

    def _of_lines(self) -> Allowance:
        """Return what the lines of the versions before leave of the report's allowance, late usage among them."""
        report = self._report
        lines = ReportLine.objects.using(self._using).filter(
            report__account=report.account, report__period_start=report.period_start, report__version__lt=report.version
        )
        sums = list(lines.values_list("meter").order_by().annotate(Sum("included_quantity"), Sum("overage_quantity")))
        included = {name: used for name, used, _over in sums}
        return Allowance(report.included, included, {name: over for name, _used, over in sums})
