"""From when until when a row holds: overrides and memberships."""

from __future__ import annotations

from typing import Any, TypeVar

from django.core.exceptions import ValidationError
from django.db.models import Model, Q, QuerySet
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

M = TypeVar("M", bound=Model)

ENDS_BEFORE_IT_STARTS = _("This ends before it starts: choose a moment after the start, or leave it empty.")


def validate_period(valid_from: Any, valid_until: Any) -> None:
    """ValidationError unless a validity period ends after it starts."""
    if valid_from is not None and valid_until is not None and valid_until <= valid_from:
        raise ValidationError({"valid_until": ENDS_BEFORE_IT_STARTS})


def overlapping(row: Any, others: QuerySet[M]) -> M | None:
    """Return the first of `others` that holds at some moment, from now on, at which `row` holds too.

    What has ended is in nobody's way. The answer stays true while an edit is open (`versions.editing`).
    """
    now = timezone.now()
    start = max(row.valid_from or now, now)
    if row.valid_until is not None and row.valid_until <= start:
        return None
    others = others.exclude(pk=row.pk).filter(Q(valid_until=None) | Q(valid_until__gt=start))
    if row.valid_until is not None:
        others = others.filter(Q(valid_from=None) | Q(valid_from__lt=row.valid_until))
    return others.order_by("pk").first()
