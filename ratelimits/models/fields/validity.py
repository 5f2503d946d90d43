"""The period in which an override or a membership is in force."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any, TypeVar

from django.core.exceptions import ValidationError
from django.db.models import Model, Q, QuerySet
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

M = TypeVar("M", bound=Model)

ENDS_BEFORE_IT_STARTS = _("This ends before it starts: choose a moment after the start, or leave it empty.")


def validate_period(valid_from: Any, valid_until: Any) -> None:
    """Raise ValidationError unless a validity period ends after it starts."""
    if valid_from is not None and valid_until is not None and valid_until <= valid_from:
        raise ValidationError({"valid_until": ENDS_BEFORE_IT_STARTS})


def overlapping(row: Any, others: QuerySet[M]) -> M | None:
    """Return the first of `others` that is in force at the same time as `row`, now or later; None if there is none.

    Rows that have ended are ignored. Call this within `versions.editing`: then no other editor can add a row meanwhile.
    """
    now = timezone.now()
    start = max(row.valid_from or now, now)
    if row.valid_until is not None and row.valid_until <= start:
        return None
    others = others.exclude(pk=row.pk).filter(Q(valid_until=None) | Q(valid_until__gt=start))
    if row.valid_until is not None:
        others = others.filter(Q(valid_from=None) | Q(valid_from__lt=row.valid_until))
    return others.order_by("pk").first()


def overlaps(rows: Iterable[M], now: datetime) -> Iterator[tuple[M, M]]:
    """Yield pairs of rows that will be in force, now or later, at the same time: none if no two of them will.

    It is what `overlapping` says of each row, for rows in memory. Not every pair is yielded, but each row that overlaps
    one that starts earlier is.
    """
    lasting: list[Any] = [row for row in rows if _ends_after(row, now)]
    longest: Any = None
    for row in sorted(lasting, key=lambda row: max(row.valid_from or now, now)):
        if longest is not None and _ends_after(longest, max(row.valid_from or now, now)):
            yield longest, row
        if longest is None or (longest.valid_until is not None and _ends_after(row, longest.valid_until)):
            longest = row


def _ends_after(row: Any, moment: datetime) -> bool:
    return row.valid_until is None or row.valid_until > moment
