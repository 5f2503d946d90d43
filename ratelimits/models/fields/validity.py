"""The period in which an override or a membership is in force."""

from __future__ import annotations

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
    """Return the first of `others` that will be in force, now or later, at the same time as `row`; None if none will.

    Rows that have ended are ignored. Within `versions.editing` no other editor can make the answer wrong.
    """
    now = timezone.now()
    start = max(row.valid_from or now, now)
    if row.valid_until is not None and row.valid_until <= start:
        return None
    others = others.exclude(pk=row.pk).filter(Q(valid_until=None) | Q(valid_until__gt=start))
    if row.valid_until is not None:
        others = others.filter(Q(valid_from=None) | Q(valid_from__lt=row.valid_until))
    return others.order_by("pk").first()
