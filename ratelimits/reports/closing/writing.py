"""Write finalised reports: short reports are written together, and a long one is written while its lines are made."""

from __future__ import annotations

from collections.abc import Sequence

from ratelimits.models import Adjustment, Report, ReportLine
from ratelimits.reports.build import CHUNK
from ratelimits.usage import crash


class ReportWriter:
    """Collects reports, and writes them in the order in which they were finalised.

    Call `flush` before reading reports or their lines from the database.
    """

    def __init__(self, using: str) -> None:
        self._using = using
        self._reports: list[Report] = []
        self._lines: list[ReportLine] = []
        self._adjusted: list[tuple[Report, Sequence[Adjustment]]] = []

    def add(self, report: Report, lines: list[ReportLine], adjustments: Sequence[Adjustment]) -> None:
        """Add a complete report. It is written by `flush`, or when the added reports have enough lines."""
        self._reports.append(report)
        self._lines += lines
        self._adjusted.append((report, adjustments))
        if len(self._lines) >= CHUNK:
            self.flush()

    def begin(self, report: Report) -> None:
        """Write a report without its lines. Call `lines` and `end` afterwards."""
        self.flush()
        report.save(using=self._using, force_insert=True)

    def lines(self, lines: list[ReportLine]) -> None:
        """Write some lines of the report for which `begin` was called."""
        ReportLine.objects.using(self._using).bulk_create(lines)

    def end(self, report: Report, adjustments: Sequence[Adjustment]) -> None:
        """Write the columns of a report that are known only after its lines were written."""
        report.save(using=self._using, update_fields=["line_count", "digest", "signature", "amounts"])
        self._link_adjustments([(report, adjustments)])

    def flush(self) -> None:
        """Write all reports that were added but not written yet."""
        if not self._reports:
            return
        Report.objects.using(self._using).bulk_create(self._reports)
        crash.reached("close:report-written")  # does nothing; tests end the process at these steps
        self.lines(self._lines)
        self._link_adjustments(self._adjusted)
        self._reports, self._lines, self._adjusted = [], [], []

    def _link_adjustments(self, adjusted: Sequence[tuple[Report, Sequence[Adjustment]]]) -> None:
        """Store on each adjustment which report contains it."""
        crash.reached("close:lines-written")
        for report, adjustments in adjusted:
            if adjustments:
                pks = [adjustment.pk for adjustment in adjustments]
                Adjustment.objects.using(self._using).filter(pk__in=pks).update(report=report)
                crash.reached("close:adjustments-marked")
