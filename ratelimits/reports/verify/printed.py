"""Verifying what reports print and no ledger line says: adjustments that people made, and declared gaps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator

from django.db.models import Exists, OuterRef, Q

from ratelimits.algorithms.parsing import MAX_PERMITS
from ratelimits.models import Adjustment, DurabilityGap, GapKind, Report, ReportLine
from ratelimits.reports.adjusting import check, start_of, unreported
from ratelimits.reports.build import CHUNK, Allowance, adjustment_line
from ratelimits.reports.gaps import describe
from ratelimits.reports.periods import SECOND
from ratelimits.reports.rows import ADJUSTMENT
from ratelimits.reports.verify.lacking import verify_lacking

#: What an adjustment's line has of it. How much of it is included depends on the lines before.
_OF_ADJUSTMENT = (
    *("key", "meter", "charge_class", "corrects_line_id", "consumed_quantity", "refunded_quantity"),
    *("admitted_count", "denied_count", "usage_period", "rule_id", "charge_period_start", "charge_period_end"),
)


def verify_printed(using: str, *, checked: Counter[str] | None = None) -> Generator[str]:
    """Say which adjustments are not as their reports have them, and which gaps are printed or declared alone.

    `checked` is given the number of adjustments and of printed gaps.
    """
    checked = Counter() if checked is None else checked
    yield from _verify_adjustments(using, checked)
    yield from _verify_decisions(using)
    yield from _verify_sizes(using)
    yield from _verify_gaps(using, checked)
    yield from verify_lacking(using)


def _verify_adjustments(using: str, checked: Counter[str]) -> Iterator[str]:
    """Compare the adjustments of each report, which are as fixed as its lines are, with those lines."""
    adjustments = Adjustment.objects.using(using).filter(report=OuterRef("pk"))
    lines = ReportLine.objects.using(using).filter(report=OuterRef("pk"), charge_category=ADJUSTMENT)
    reports = Report.objects.using(using).filter(Exists(adjustments) | Exists(lines)).order_by("pk")
    for report in reports.iterator(CHUNK):
        left = list(report.lines.filter(charge_category=ADJUSTMENT).order_by("number"))
        for adjustment in report.adjustments.order_by("pk"):
            checked["adjustments"] += 1
            yield from _verify_adjustment(report, adjustment, left)
        for line in left:
            text = f"{line.consumed_quantity:+,} {line.meter}"
            yield f"report {report}: line {line.line_id} ({text}) has no adjustment"


def _verify_decisions(using: str) -> Iterator[str]:
    """Name the adjustments that were approved or refused by nobody, or at no time, and those decided before."""
    decided = Q(decided_by__isnull=False, decided_at__isnull=False)
    undecided = Q(decided_by=None, decided_at=None)
    verdicts = (Adjustment.Approval.APPROVED, Adjustment.Approval.REFUSED)
    right = Q(decided, approval__in=verdicts) | Q(
        undecided, approval__in=(Adjustment.Approval.UNASKED, Adjustment.Approval.WAITING)
    )
    for adjustment in Adjustment.objects.using(using).exclude(right).order_by("pk").iterator(CHUNK):
        yield (
            f"adjustment {adjustment.reference} ({adjustment}) is {adjustment.approval!r}, and who decided it when does"
            " not say so"
        )


def _verify_sizes(using: str) -> Iterator[str]:
    """Name the adjustments that wait and that no closing can put on a report, since they were written past the form."""
    for adjustment in unreported(using).filter(~Q(quantity__range=(-MAX_PERMITS, MAX_PERMITS))).iterator(CHUNK):
        try:
            check([adjustment])
        except ValueError as error:
            yield f"{error}: {adjustment.account or 'anonymous'} cannot be closed"


def _is_of_period(report: Report, start: int) -> bool:
    """Return whether a period that starts then (µs since 1970 UTC) is the report's, or is billed with it."""
    if start == report.period_start:
        return True
    reports = Report.objects.using(report._state.db).filter(account=report.account)
    versions = reports.filter(period_start=report.period_start).values_list("since", flat=True)
    return any(str(start // SECOND) in since for since in versions)


def _verify_adjustment(report: Report, adjustment: Adjustment, left: list[ReportLine]) -> Iterator[str]:
    """Compare an adjustment with its line, and take that from what is left of the lines."""
    if adjustment.account != report.account or not _is_of_period(report, start_of(adjustment)):
        yield f"adjustment {adjustment.reference} ({adjustment}) is of another account or period than {report}"
    again = adjustment_line(report, adjustment, Allowance({}))
    line = next((line for line in left if line.line_id == again.line_id), None)
    if line is None:
        yield f"adjustment {adjustment.reference} ({adjustment}) has no line on report {report}"
        return
    left.remove(line)
    for name in _OF_ADJUSTMENT:
        if getattr(line, name) != getattr(again, name):
            yield (
                f"report {report}: line {line.line_id} has {name} {getattr(line, name)},"
                f" adjustment {adjustment.reference} says {getattr(again, name)}"
            )


def _verify_gaps(using: str, checked: Counter[str]) -> Iterator[str]:
    """Look for each gap that a report prints among those declared."""
    declared, looked_up = _declared(using), False
    known: dict[str, bool] = {}
    reports = Report.objects.using(using).exclude(gaps="").order_by("account", "pk")
    for report in reports.iterator(CHUNK):
        for text in report.gaps.split("; "):
            if text.startswith("witness "):
                continue
            checked["printed gaps"] += 1
            if text not in known:
                known[text] = _told(text) in declared
                if not known[text] and not looked_up:
                    # The gap and the report may both be newer than what was read.
                    declared, looked_up = _declared(using), True
                    known[text] = _told(text) in declared
            if not known[text]:
                yield f"report {report} prints a durability gap that is declared no more: {text}"


def _declared(using: str) -> set[tuple[str, ...]]:
    return {_told(describe(gap)) for gap in DurabilityGap.objects.using(using).iterator(CHUNK)}


def _told(text: str) -> tuple[str, ...]:
    """Kind and span of a printed gap, and its fsync policy: what is known of it later may be added to the rest."""
    parts = text.split(" ")
    if parts[0] == GapKind.CLOCK:
        parts[1] = parts[1].partition("/")[0]  # it lasts until the clocks agree again
    return *parts[:2], *(each for each in parts[2:] if each.startswith("appendfsync="))
