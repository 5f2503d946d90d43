"""Write finalised reports: short reports are written together, and a long one is written while its lines are made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from ratelimits.billing.models import Adjustment, Report, ReportLine
from ratelimits.billing.reports import amounts, signing
from ratelimits.billing.reports.build import CHUNK
from ratelimits.billing.reports.rows import FINAL, USAGE, RowMaker
from ratelimits.usage import signatures
from ratelimits.usage.ledger import crash


class ReportWriter:
    """Collects reports, and writes them in the order in which they were finalised.

    Call `flush` before reading reports or their lines from the database.
    """

    def __init__(self, using: str) -> None:
        self._using = using
        self._reports: list[Report] = []
        self._lines: list[ReportLine] = []
        self._adjusted: list[tuple[Report, Sequence[Adjustment]]] = []

    def write(
        self, report: Report, lines: Iterable[ReportLine], adjustments: Sequence[Adjustment], earlier: list[Report]
    ) -> None:
        """Number a report's lines, complete its digest, signature and amounts, and write the report and its lines.

        A report with few lines is written later, with other reports (see `flush`).

        `earlier` has the customer's earlier reports, oldest first.
        """
        unread, totals = iter(lines), amounts.Totals(report, earlier)
        digest, make = signing.Digest(report), RowMaker(report, FINAL)
        number = 0
        chunk = list(islice(unread, CHUNK))
        # Most reports fit in one chunk. Such a report is written later, together with the reports of other accounts.
        fits_in_chunk = len(chunk) < CHUNK
        if not fits_in_chunk:
            self.flush()
            report.save(using=self._using, force_insert=True)
        while chunk:
            corrected = self._line_ids_on_reports({line.corrects_line_id for line in chunk} - {""})
            for line in chunk:
                number += 1
                line.number = number
                if line.corrects_line_id not in corrected and line.charge_category == USAGE:
                    line.corrects_line_id = ""
                digest.add(make.from_line(line))
                totals.add(line)
            if fits_in_chunk:
                break
            self._write_lines(chunk)
            chunk = list(islice(unread, CHUNK))
        report.line_count, report.digest = number, digest.hexdigest()
        report.signature, report.amounts = signatures.sign(report.digest), totals.amounts()
        if fits_in_chunk:
            self._add(report, chunk, adjustments)
        else:
            report.save(using=self._using, update_fields=["line_count", "digest", "signature", "amounts"])
            self._link_adjustments([(report, adjustments)])

    def _add(self, report: Report, lines: list[ReportLine], adjustments: Sequence[Adjustment]) -> None:
        """Add a complete report. It is written by `flush`, or when the added reports have enough lines."""
        self._reports.append(report)
        self._lines += lines
        self._adjusted.append((report, adjustments))
        if len(self._lines) >= CHUNK:
            self.flush()

    def _write_lines(self, lines: list[ReportLine]) -> None:
        ReportLine.objects.using(self._using).bulk_create(lines)

    def _line_ids_on_reports(self, line_ids: set[str]) -> set[str]:
        """Return those of the `line_ids` that are on reports.

        A line with late usage names the line that it corrects. But if the key, the meter and the rule of the late usage
        had no earlier usage, there is no line to correct.
        """
        if not line_ids:
            return set()
        self.flush()
        lines = ReportLine.objects.using(self._using).filter(line_id__in=line_ids)
        return set(lines.values_list("line_id", flat=True))

    def flush(self) -> None:
        """Write all reports that were added but not written yet."""
        if not self._reports:
            return
        Report.objects.using(self._using).bulk_create(self._reports)
        crash.reached("close:report-written")  # Does nothing, but tests end the process at this step.
        self._write_lines(self._lines)
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
