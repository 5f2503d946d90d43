"""Adopt rows that were written without the app's models: by raw SQL, or by the historical models of a data migration.

To adopt a row is to give it a version and a history record, as an edit does. Rows that differ from their newest history
record are adopted.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from django.apps.registry import Apps
from django.db import models
from django.db.models import Exists, F, OuterRef, Q, Subquery
from django.db.models.lookups import IsNull

from ratelimits import moments
from ratelimits.conf import conf
from ratelimits.models.history import record
from ratelimits.models.versioned import Versioned, versioned_models
from ratelimits.models.versions import Edit, editing
from ratelimits.progress import Progress

#: The change reasons in the history records of adopted rows.
ADOPTION_REASONS = frozenset({"ratelimits_reload", "migrate", "loaddata"})


class HistoryDifference(NamedTuple):
    """Rows of a model that differ from the history."""

    #: The rows that still exist, each with its newest history record (None if there is no record).
    rows: list[tuple[Versioned, Any]]
    #: The newest history record of each row that was deleted without a record of the deletion.
    deleted: list[Any]


def difference_from_history(model: type[Versioned], using: str) -> HistoryDifference:
    """Return the rows of a model that differ from its history."""
    records: models.QuerySet[Any] = model.history.using(using).order_by()

    def newest_record_of(row_id: str) -> Subquery:
        """Return a subquery for the newest record of the row whose id the outer query has in the column `row_id`."""
        records_of_row = records.filter(id=OuterRef(row_id)).order_by("-version", "-history_id")
        return Subquery(records_of_row.values("history_id")[:1])

    # A record equals a row if it is the newest record of the row and has the same values.
    equals_row = Q(history_id=OuterRef("newest"))
    for field in model._meta.concrete_fields:
        if field.name in ("version", "since"):
            continue
        equal_value = Q(**{field.attname: OuterRef(field.attname)})
        if field.null:
            equal_value |= Q(**{f"{field.attname}__isnull": True}) & Q(IsNull(OuterRef(field.attname), True))
        equals_row &= equal_value
    rows = model._base_manager.using(using).annotate(newest=newest_record_of("pk"))
    equal_records = records.filter(equals_row).exclude(history_type="-")
    # A row with version 0 was written without the app's models.
    rows = rows.filter(Q(version=0) | ~Exists(equal_records)).order_by("pk")
    newest_records = records.in_bulk({row.newest for row in rows} - {None}, field_name="history_id") if rows else {}
    without_row = records.filter(~Exists(model._base_manager.using(using).filter(pk=OuterRef("id"))))
    deleted = (
        without_row.exclude(history_type="-")
        .annotate(newest=newest_record_of("id"))
        .filter(history_id=F("newest"))
        .order_by("id")
    )
    return HistoryDifference([(row, newest_records.get(row.newest)) for row in rows], list(deleted))


def with_newest_record(model: type[Versioned], using: str) -> Any:
    """Return the rows of a model. Each row has two more columns, `recorded` and `recorded_since`.

    The two columns have the `version` and the `since` of the row's newest history record.
    """
    records: models.QuerySet[Any] = model.history.using(using)
    newest = records.filter(id=OuterRef("pk")).order_by("-version", "-history_id")
    return models.QuerySet(model, using=using).annotate(
        recorded=Subquery(newest.values("version")[:1]), recorded_since=Subquery(newest.values("since")[:1])
    )


def never_recorded(model: type[Versioned], using: str) -> models.QuerySet[Any]:
    """Return the rows of a model that have no history record."""
    records: models.QuerySet[Any] = model.history.using(using)
    return models.QuerySet(model, using=using).filter(~Exists(records.filter(id=OuterRef("pk"))))


def adopt(
    edit: Edit, reason: str, progress: Progress | None = None, *, of: Collection[type[Versioned]] | None = None
) -> list[str]:
    """Adopt, as part of an edit, all rows that differ from the history. Return one line of text for each of them.

    For each model, `progress` shows how many of these rows are done. `of` has the models; by default, all.
    """
    chosen = versioned_models() if of is None else of
    return [line for model in chosen for line in _adopt(model, edit, reason, progress or Progress())]


def _adopt(model: type[Versioned], edit: Edit, reason: str, progress: Progress) -> list[str]:
    lines = []
    difference = difference_from_history(model, edit.using)
    names = str(model._meta.verbose_name_plural)
    for row, before in progress.counted(names, difference.rows, len(difference.rows)):
        if before is not None and any(getattr(row, name) != getattr(before, name) for name in row.tombstone_fields):
            before.instance.tombstone(edit).save(using=edit.using)
        row.stamp(edit)
        values = {name: getattr(row, name) for name in ("version", "since", *row.derived_fields)}
        model._base_manager.using(edit.using).filter(pk=row.pk).update(**values)
        added = before is None or before.history_type == "-"
        record([row], "+" if added else "~", edit.using, reason)
        lines.append(f"changed: {model._meta.verbose_name} {row.pk}: {row}")
    for before in progress.counted(f"deleted {names}", difference.deleted, len(difference.deleted)):
        lines.append(f"deleted: {model._meta.verbose_name} {before.id}")
        row = before.instance
        row.tombstone(edit).save(using=edit.using)
        row.stamp(edit)
        row._history_date = moments.now()
        record([row], "-", edit.using, reason)
    return lines


def adopt_after_migrate(using: str, apps: Apps | None = None, plan: Collection[Any] = (), **kwargs: Any) -> None:
    """Adopt rows that data migrations wrote. Historical models write no version, so these rows have no effect yet.

    Do nothing after a flush, or if the migrated tables do not have the columns of the present models. Perhaps an app
    above, such as `ratelimits.billing`, is not migrated yet: then it has no rows.
    """
    if using != conf.DATABASE or not plan or apps is None:  # After a flush, `plan` is empty.
        return
    models_ = [model for model in versioned_models() if _is_migrated(model, apps)]
    if not all(_has_present_columns(model, apps) for model in models_):
        return
    if any(rows or deleted for rows, deleted in (difference_from_history(model, using) for model in models_)):
        with editing(using) as edit:
            adopt(edit, "migrate", of=models_)


def _is_migrated(model: type[Versioned], apps: Apps) -> bool:
    try:
        apps.get_model(model._meta.label)
    except LookupError:
        return False
    return True


def _has_present_columns(model: type[Versioned], apps: Apps) -> bool:
    migrated = apps.get_model(model._meta.label)
    return {field.column for field in migrated._meta.concrete_fields} == {
        field.column for field in model._meta.concrete_fields
    }
