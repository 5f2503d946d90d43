"""Verify the adjustments and the declared gaps on reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator

from django.db.models import Exists, OuterRef, Q

from ratelimits.billing.models import Adjustment, Report, ReportLine
from ratelimits.billing.reports.adjusting import check_sizes, start_of, unreported
from ratelimits.billing.reports.build import CHUNK, Allowance, adjustment_line
from ratelimits.billing.reports.gaps import describe
from ratelimits.billing.reports.rows import ADJUSTMENT
from ratelimits.billing.reports.verify.missing import verify_missing
from ratelimits.conf.setting_rules import MAX_COST
from ratelimits.usage.models import DurabilityGap, GapKind

#: Columns of a line that depend only on its adjustment. (The included quantity also depends on earlier lines.)
_OF_ADJUSTMENT = (
    *("key", "meter", "charge_class", "corrects_line_id", "consumed_quantity", "refunded_quantity"),
    *("admitted_count", "denied_count", "usage_period", "rule_id", "charge_period_start", "charge_period_end"),
)


def verify_printed(using: str, *, checked: Counter[str] | None = None) -> Generator[str]:
    """Yield an error for each adjustment and each gap that differs between its own table and the reports.

    A declared gap must be on the reports whose periods it overlaps, and a gap on a report must be declared. `checked`
    counts the adjustments and the printed gaps.
    """
    checked = Counter() if checked is None else checked
    yield from _verify_adjustments(using, checked)
    yield from _verify_decisions(using)
    yield from _verify_sizes(using)
    yield from _verify_gaps(using, checked)
    yield from verify_missing(using)


def _verify_adjustments(using: str, checked: Counter[str]) -> Iterator[str]:
    """Compare the adjustments of each report with the report's adjustment lines."""
    adjustments = Adjustment.objects.using(using).filter(report=OuterRef("pk"))
    lines = ReportLine.objects.using(using).filter(report=OuterRef("pk"), charge_category=ADJUSTMENT)
    reports = Report.objects.using(using).filter(Exists(adjustments) | Exists(lines)).order_by("pk")
    for report in reports.iterator(CHUNK):
        unmatched = list(report.lines.filter(charge_category=ADJUSTMENT).order_by("number"))
        for adjustment in report.adjustments.select_related("customer").order_by("pk"):
            checked["adjustments"] += 1
            yield from _verify_adjustment(report, adjustment, unmatched)
        for line in unmatched:
            text = f"{line.consumed_quantity:+,} {line.meter}"
            yield f"report {report}: line {line.line_id} ({text}) has no adjustment"


def _verify_decisions(using: str) -> Iterator[str]:
    """Yield an error for each adjustment whose approval contradicts its columns `decided_by` and `decided_at`."""
    decided = Q(decided_by__isnull=False, decided_at__isnull=False)
    undecided = Q(decided_by=None, decided_at=None)
    decisions = (Adjustment.Approval.APPROVED, Adjustment.Approval.REFUSED)
    consistent = Q(decided, approval__in=decisions) | Q(
        undecided, approval__in=(Adjustment.Approval.UNASKED, Adjustment.Approval.WAITING)
    )
    for adjustment in Adjustment.objects.using(using).exclude(consistent).order_by("pk").iterator(CHUNK):
        yield (
            f"adjustment {adjustment.reference} ({adjustment}) is {adjustment.approval!r}, but its decided_by and"
            " decided_at contradict that"
        )


def _verify_sizes(using: str) -> Iterator[str]:
    """Yield an error for each adjustment that is too large for a report. The admin form refuses such adjustments."""
    for adjustment in unreported(using).filter(~Q(quantity__range=(-MAX_COST, MAX_COST))).iterator(CHUNK):
        try:
            check_sizes([adjustment])
        except ValueError as error:
            yield f"{error}: {adjustment.account or 'anonymous'} cannot be closed"


def _is_of_period(report: Report, start: int) -> bool:
    """Return whether the report's period contains the moment `start` (µs since 1970 UTC)."""
    return report.period_start <= start < report.period_end


def _verify_adjustment(report: Report, adjustment: Adjustment, unmatched: list[ReportLine]) -> Iterator[str]:
    """Compare an adjustment with its line, and remove this line from the list `unmatched`."""
    if adjustment.customer.token != report.customer_id or not _is_of_period(report, start_of(adjustment)):
        yield f"adjustment {adjustment.reference} ({adjustment}) has another customer or period than {report}"
    # The allowance changes only the included quantity and the overage, which are not compared here. So an empty
    # allowance is enough.
    expected = adjustment_line(report, adjustment, Allowance({}))
    line = next((line for line in unmatched if line.line_id == expected.line_id), None)
    if line is None:
        yield f"adjustment {adjustment.reference} ({adjustment}) has no line on report {report}"
        return
    unmatched.remove(line)
    for name in _OF_ADJUSTMENT:
        if getattr(line, name) != getattr(expected, name):
            yield (
                f"report {report}: line {line.line_id} has {name} {getattr(line, name)},"
                f" but adjustment {adjustment.reference} gives {getattr(expected, name)}"
            )


def _verify_gaps(using: str, checked: Counter[str]) -> Iterator[str]:
    """Yield an error for each gap that a report prints but that is not declared."""
    declared, read_again = _declared(using), False
    is_declared: dict[str, bool] = {}
    reports = Report.objects.using(using).exclude(gaps="").order_by("account", "pk")
    for report in reports.iterator(CHUNK):
        for text in report.gaps.split("; "):
            # This text is about process totals that do not fit the ledger, and not about a declared gap.
            if text.startswith("witness "):
                continue
            checked["printed gaps"] += 1
            if text not in is_declared:
                is_declared[text] = _lasting_parts(text) in declared
                if not is_declared[text] and not read_again:
                    # Read the gaps once more: this gap and this report may be newer than the first reading.
                    declared, read_again = _declared(using), True
                    is_declared[text] = _lasting_parts(text) in declared
            if not is_declared[text]:
                yield f"report {report} prints a durability gap that is no longer declared: {text}"


def _declared(using: str) -> set[tuple[str, ...]]:
    return {_lasting_parts(describe(gap)) for gap in DurabilityGap.objects.using(using).iterator(CHUNK)}


def _lasting_parts(text: str) -> tuple[str, ...]:
    """Return the parts of a gap's text that never change: its kind, its span of time and its fsync policy."""
    parts = text.split(" ")
    if parts[0] == GapKind.CLOCK:
        parts[1] = parts[1].partition("/")[0]  # Use only the start: the end changes until the clocks agree again.
    return *parts[:2], *(part for part in parts[2:] if part.startswith(("appendfsync=", "fence=")))
