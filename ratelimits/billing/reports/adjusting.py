"""Find and approve adjustments that are not on a report yet.

An adjustment is a quantity that staff add to a period, or subtract from it, by hand. If the setting ADJUSTMENT_APPROVAL
is set, a new adjustment counts only after another person has approved it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.db.models import QuerySet

from ratelimits import moments
from ratelimits.billing.models import Adjustment
from ratelimits.conf.setting_rules import MAX_COST
from ratelimits.usage.periods import SECOND


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


def adjust(
    using: str, *, customer: int, account: str, start: int, meter: str, units: int, reason: str, author: Any
) -> None:
    """Add units to a billing period of a customer, or subtract them, by as many adjustments as their size needs.

    `start` is the start of the period, in µs since 1970 UTC. A reason that is too long is cut.
    """
    for quantity in _parts(units):
        Adjustment(
            account=account,
            customer_id=customer,
            period_start=moments.moment(start),
            meter=meter,
            quantity=quantity,
            reason=reason[: Adjustment._meta.get_field("reason").max_length],
            author=author,
        ).save(using=using)


def _parts(units: int) -> list[int]:
    """Return numbers whose sum is `units`. An adjustment can only be of MAX_COST units."""
    whole, rest = divmod(abs(units), MAX_COST)
    sign = 1 if units > 0 else -1
    return [sign * part for part in (*[MAX_COST] * whole, rest) if part]


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
