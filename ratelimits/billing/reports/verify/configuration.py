"""Verify the configuration: compare each row with its history, and the configuration's version with the histories."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from django.db.models import F, Max, Q

from ratelimits.models import ConfigVersion
from ratelimits.models.raw.adoption import difference_from_history, never_recorded, with_newest_record
from ratelimits.models.versioned import Versioned, versioned_models


def verify_configuration(using: str, checked: Counter[str]) -> Iterator[str]:
    """Yield an error for each row that differs from its history. Count the rows in `checked`.

    Also yield an error for each model with an edit that is newer than the configuration's version. A row without
    history is not an error: raw SQL writes such rows. `count_without_history` counts them.
    """
    version = ConfigVersion.read(using)[0]
    for model in versioned_models():
        count = model._base_manager.using(using).count()
        records: Any = model.history.using(using)
        newest = records.aggregate(newest=Max("version"))["newest"]
        if not count and newest is None:
            continue
        checked["rows of the configuration"] += count
        yield from _verify_rows(model, using)
        # Read the version again, because perhaps there was an edit after it was read.
        if newest is not None and newest > version and newest > ConfigVersion.read(using)[0]:
            yield (
                f"the configuration has version {version}, but the history of {model._meta.verbose_name_plural} has"
                f" an edit of version {newest}: processes notice no edit until the version is above {newest}"
            )


def _verify_rows(model: type[Versioned], using: str) -> Iterator[str]:
    kind = model._meta.verbose_name
    difference = difference_from_history(model, using)
    for row, before in difference.rows:
        if before is not None:  # None: the row has no history, which is no error
            yield (
                f"{kind} {row.pk} differs from its history: it was written without the app"
                " (ratelimits_reload records this change as an edit)"
            )
    for record in difference.deleted:
        yield (
            f"{kind} {record.id} was deleted, but its history does not say so (ratelimits_reload records the deletion)"
        )
    for row in _backdated(model, using):
        yield f"{kind} {row.pk} has a `version` or `since` below that of its newest edit"


def _backdated(model: type[Versioned], using: str) -> Any:
    """Return the rows whose `version` or `since` is below that in the newest record of their history."""
    rows = with_newest_record(model, using)
    return rows.filter(Q(version__lt=F("recorded")) | Q(since__lt=F("recorded_since"))).order_by("pk")


def count_without_history(using: str) -> int:
    """Return how many rows of the configuration have no history."""
    return sum(never_recorded(model, using).count() for model in versioned_models())
