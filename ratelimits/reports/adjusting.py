"""Adjustments that no report has yet: those that count, and those that wait for another person's approval."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from django.db.models import QuerySet
from django.utils import timezone

from ratelimits.algorithms.parsing import MAX_PERMITS
from ratelimits.models import Adjustment, Report
from ratelimits.models.ledger import moment
from ratelimits.reports.periods import SECOND


def start_of(adjustment: Adjustment) -> int:
    """Return the µs since 1970 UTC at which the period of an adjustment starts."""
    return int(adjustment.period_start.timestamp()) * SECOND


def unreported(using: str, **about: Any) -> QuerySet[Adjustment]:
    """Return the adjustments that count and that a closing puts on reports, in the order in which it does."""
    rows = Adjustment.objects.using(using).filter(report=None, approval__in=Adjustment.COUNTS, **about)
    return rows.order_by("created_at", "reference")


def check(adjustments: Iterable[Adjustment]) -> None:
    """Raise ValueError for an adjustment that the form would have refused for its size: sums of such are no numbers."""
    for each in adjustments:
        if abs(each.quantity) > MAX_PERMITS:
            raise ValueError(
                f"adjustment {each.reference} is of {each.quantity:,} units, and at most {MAX_PERMITS:,} can be"
                " adjusted"
            )


def of_open_periods(using: str, start: int, end: int, **about: Any) -> dict[tuple[str, int], list[Adjustment]]:
    """Return those of periods without a report that start between two moments (µs since 1970 UTC).

    By account and start of the period (s since 1970 UTC), in that order.
    """
    found: dict[tuple[str, int], list[Adjustment]] = defaultdict(list)
    for adjustment in unreported(using, **about, period_start__gte=moment(start), period_start__lt=moment(end)):
        found[adjustment.account, start_of(adjustment) // SECOND].append(adjustment)
    reports = Report.objects.using(using).filter(account__in={account for account, _start in found})
    closed = reports.filter(period_start__gte=start, period_start__lt=end).values_list("account", "period_start")
    for account, period_start in closed if found else ():
        found.pop((account, period_start // SECOND), None)
    return dict(sorted(found.items()))


class NotDecidedError(ValueError):
    """An adjustment is not for this person to approve or refuse; the message says why."""


def approve(adjustment: Adjustment, by: Any) -> None:
    """Let an adjustment that waits count; `by` is the user who says so. Raises NotDecidedError."""
    _decide(adjustment, by, Adjustment.Approval.APPROVED)


def refuse(adjustment: Adjustment, by: Any) -> None:
    """Let an adjustment that waits never count; `by` is the user who says so. Raises NotDecidedError."""
    _decide(adjustment, by, Adjustment.Approval.REFUSED)


def _decide(adjustment: Adjustment, by: Any, verdict: str) -> None:
    if adjustment.author_id == by.pk:
        raise NotDecidedError(f"{adjustment} is of your own: another person approves or refuses it")
    waits = Adjustment.objects.using(adjustment._state.db).filter(pk=adjustment.pk, approval="waiting")
    # By one statement: of two people who decide at once one comes first.
    if not waits.exclude(author=by.pk).update(approval=verdict, decided_by=by.pk, decided_at=timezone.now()):
        raise NotDecidedError(f"{adjustment} does not wait for approval")
    adjustment.refresh_from_db()
