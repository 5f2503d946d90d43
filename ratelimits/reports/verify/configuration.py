"""Verifying the configuration that bills: each row beside its history, and its version."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from django.db.models import F, Max, OuterRef, Q, Subquery

from ratelimits.models import ConfigVersion
from ratelimits.models.raw.adoption import MODELS, never_recorded, unrecorded
from ratelimits.models.versions import Versioned


def verify_configuration(using: str, checked: Counter[str]) -> Iterator[str]:
    """Say which rows are not what their history says of them; `checked` is given the number of rows.

    Rows that have no history, since they were written past the app, are none of these: see `count_without_history`.
    """
    version = ConfigVersion.read(using)[0]
    for model in MODELS:
        count = model._base_manager.using(using).count()
        records: Any = model.history.using(using)  # type: ignore[attr-defined]
        newest = records.aggregate(newest=Max("version"))["newest"]
        if not count and newest is None:
            continue
        checked["rows of the configuration"] += count
        yield from _verify_rows(model, using)
        # Read again: there may have been an edit since.
        if newest > version and newest > ConfigVersion.read(using)[0]:
            yield (
                f"the configuration is at version {version}, and the history of {model._meta.verbose_name_plural} has"
                f" an edit of version {newest}: processes do not learn of edits up to that one"
            )


def _verify_rows(model: type[Versioned], using: str) -> Iterator[str]:
    kind = model._meta.verbose_name
    found = unrecorded(model, using)
    for row, before in found.rows:
        if before is not None:
            yield (
                f"{kind} {row.pk} is not what its history says: it was written past the app"
                " (ratelimits_reload makes that an edit)"
            )
    for record in found.deleted:
        yield f"{kind} {record.id} is gone, and its history does not say so (ratelimits_reload makes that an edit)"
    for row in _dated_back(model, using):
        yield f"{kind} {row.pk} says that it holds since before its newest edit"


def _dated_back(model: type[Versioned], using: str) -> Any:
    records: Any = model.history.using(using)  # type: ignore[attr-defined]
    newest = records.filter(id=OuterRef("pk")).order_by("-version", "-history_id")
    rows = model._base_manager.using(using).annotate(
        recorded=Subquery(newest.values("version")[:1]), recorded_since=Subquery(newest.values("since")[:1])
    )
    return rows.filter(Q(version__lt=F("recorded")) | Q(since__lt=F("recorded_since"))).order_by("pk")


def count_without_history(using: str) -> int:
    """Return how many rows of the configuration have no history."""
    return sum(never_recorded(model, using).count() for model in MODELS)
