"""The span of time in which an override, a plan membership, a block or an allow is in force."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any, TypeVar

from django.core.exceptions import ValidationError
from django.db.models import Model, Q, QuerySet
from django.utils.translation import gettext_lazy as _

from ratelimits import moments

M = TypeVar("M", bound=Model)

END_NOT_AFTER_START = _("The end is not after the start: choose a later end, or leave the end empty.")


def validate_period(valid_from: Any, valid_until: Any) -> None:
    """Raise ValidationError if a row ends at or before its start."""
    if valid_from is not None and valid_until is not None and valid_until <= valid_from:
        raise ValidationError({"valid_until": END_NOT_AFTER_START})


def overlapping(row: Any, others: QuerySet[M]) -> M | None:
    """Return the first row of `others` that is in force at the same time as `row`, now or later.

    Return None if there is no such row. Call this within `versions.editing`: then no other editor can add
    a row meanwhile.
    """
    now = moments.now()
    start = max(row.valid_from or now, now)
    if row.valid_until is not None and row.valid_until <= start:
        return None
    others = others.exclude(pk=row.pk).filter(Q(valid_until=None) | Q(valid_until__gt=start))
    if row.valid_until is not None:
        others = others.filter(Q(valid_from=None) | Q(valid_from__lt=row.valid_until))
    return others.order_by("pk").first()


def overlaps(rows: Iterable[M], now: datetime) -> Iterator[tuple[M, M]]:
    """Yield pairs of rows that are in force at the same time, now or later.

    All rows must be about the same key, and overrides also about the same rule. The function does for many rows in
    memory what `overlapping` does for one row with queries. If a row overlaps several rows that start earlier, it is
    yielded with only one of them.
    """
    not_ended: list[Any] = [row for row in rows if _ends_after(row, now)]
    #: Of the rows that were looked at, the row that ends last.
    last_to_end: Any = None

    def start(row: Any) -> datetime:
        return max(row.valid_from or now, now)

    for row in sorted(not_ended, key=start):
        if last_to_end is not None and _ends_after(last_to_end, start(row)):
            yield last_to_end, row
        if last_to_end is None or (last_to_end.valid_until is not None and _ends_after(row, last_to_end.valid_until)):
            last_to_end = row


def _ends_after(row: Any, moment: datetime) -> bool:
    return row.valid_until is None or row.valid_until > moment
