"""Find and approve adjustments that are not on a report yet.

An adjustment is a quantity that staff add to a period, or subtract from it, by hand. If the setting ADJUSTMENT_APPROVAL
is set, a new adjustment counts only after another person has approved it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.db.models import QuerySet

from ratelimits import moments
from ratelimits.conf.setting_rules import MAX_COST
from ratelimits.models import Adjustment
from ratelimits.reports.periods import SECOND


def start_of(adjustment: Adjustment) -> int:
    """Return the start of an adjustment's period, in µs since 1970 UTC."""
    return int(adjustment.period_start.timestamp()) * SECOND


def unreported(using: str, **filters: Any) -> QuerySet[Adjustment]:
    """Return the adjustments that are not on a report yet, in the order of a report's lines.

    They match `filters`. Adjustments that wait for approval or were refused are left out.
    """
    rows = Adjustment.objects.using(using).filter(report=None, approval__in=Adjustment.REPORTABLE, **filters)
    return rows.order_by("created_at", "reference")


def check_sizes(adjustments: Iterable[Adjustment]) -> None:
    """Raise ValueError if an adjustment is larger than the admin form allows.

    The sum of larger quantities can be too large for a column of the database.
    """
    for adjustment in adjustments:
        if abs(adjustment.quantity) > MAX_COST:
            raise ValueError(
                f"adjustment {adjustment.reference} has {adjustment.quantity:,} units, but at most {MAX_COST:,} are"
                " allowed"
            )


class NotDecidedError(ValueError):
    """Raised if a person cannot approve or refuse an adjustment; the message says why."""


def approve(adjustment: Adjustment, by: Any) -> None:
    """Approve a waiting adjustment, so that it counts. `by` is the user who decides.

    Raise NotDecidedError if the user is the adjustment's author, or if the adjustment does not wait for approval.
    """
    _decide(adjustment, by, Adjustment.Approval.APPROVED)


def refuse(adjustment: Adjustment, by: Any) -> None:
    """Refuse a waiting adjustment, so that it never counts. `by` is the user who decides.

    Raise NotDecidedError if the user is the adjustment's author, or if the adjustment does not wait for approval.
    """
    _decide(adjustment, by, Adjustment.Approval.REFUSED)


def _decide(adjustment: Adjustment, by: Any, verdict: str) -> None:
    if adjustment.author_id == by.pk:
        raise NotDecidedError(f"{adjustment} is your own: another person must approve or refuse it")
    waiting = Adjustment.objects.using(adjustment._state.db).filter(pk=adjustment.pk, approval="waiting")
    # If two people decide at the same time, this one statement lets only one of them succeed.
    if not waiting.exclude(author=by.pk).update(approval=verdict, decided_by=by.pk, decided_at=moments.now()):
        raise NotDecidedError(f"{adjustment} does not wait for approval")
    adjustment.refresh_from_db()
