"""Rows that were written past the app (by raw SQL, or by the historical models of a data migration): found by what the
history does not say, and made an edit like others.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from django.apps.registry import Apps
from django.db import models
from django.db.models import Exists, F, OuterRef, Q, Subquery
from django.db.models.lookups import IsNull
from django.utils import timezone

from ratelimits.conf import conf
from ratelimits.models.accounts import Account, Plan, PlanInclusion, PlanMembership
from ratelimits.models.history import record
from ratelimits.models.overrides import KeyOverride
from ratelimits.models.prices import PlanPrice
from ratelimits.models.rules import Rule
from ratelimits.models.versions import Edit, Versioned, editing

#: The reasons that records have which were made for rows that had been written past the app.
ADOPTED = frozenset({"ratelimits_reload", "migrate", "loaddata"})
#: In an order in which none refers to a later one.
MODELS: tuple[type[Versioned], ...] = (Plan, PlanInclusion, PlanPrice, Rule, Account, PlanMembership, KeyOverride)


class Unrecorded(NamedTuple):
    """Rows of a model beside the newest record of each (None: never recorded), and records of rows that are gone."""

    rows: list[tuple[Versioned, Any]]
    gone: list[Any]


def unrecorded(model: type[Versioned], using: str) -> Unrecorded:
    """Return what the history of a model does not say."""
    records: models.QuerySet[Any] = model.history.using(using).order_by()  # type: ignore[attr-defined]
    newest = records.filter(id=OuterRef("pk")).order_by("-version", "-history_id").values("history_id")[:1]
    alike = Q(history_id=OuterRef("newest"))
    for field in model._meta.concrete_fields:
        if field.name in ("version", "since"):
            continue
        same = Q(**{field.attname: OuterRef(field.attname)})
        if field.null:
            same |= Q(**{f"{field.attname}__isnull": True}) & Q(IsNull(OuterRef(field.attname), True))
        alike &= same
    rows = model._base_manager.using(using).annotate(newest=Subquery(newest))
    rows = rows.filter(Q(version=0) | ~Exists(records.filter(alike).exclude(history_type="-"))).order_by("pk")
    kept = records.in_bulk({row.newest for row in rows} - {None}, field_name="history_id") if rows else {}
    last = records.filter(id=OuterRef("id")).order_by("-version", "-history_id").values("history_id")[:1]
    gone = records.filter(~Exists(model._base_manager.using(using).filter(pk=OuterRef("id"))))
    gone = gone.exclude(history_type="-").annotate(last=Subquery(last)).filter(history_id=F("last")).order_by("id")
    return Unrecorded([(row, kept.get(row.newest)) for row in rows], list(gone))


def never_recorded(model: type[Versioned], using: str) -> models.QuerySet[Any]:
    """Return the rows of a model of which the history has no record at all."""
    records: models.QuerySet[Any] = model.history.using(using)  # type: ignore[attr-defined]
    return models.QuerySet(model, using=using).filter(~Exists(records.filter(id=OuterRef("pk"))))


def adopt(edit: Edit, reason: str) -> list[str]:
    """Stamp and record what the history does not say, as part of an edit; return a line for each row."""
    return [line for model in MODELS for line in _adopt(model, edit, reason)]


def _adopt(model: type[Versioned], edit: Edit, reason: str) -> list[str]:
    said = []
    found = unrecorded(model, edit.using)
    for row, before in found.rows:
        if before is not None and any(getattr(row, name) != getattr(before, name) for name in row.about):
            before.instance.tombstone(edit).save(using=edit.using)
        row.stamp(edit)
        written = {name: getattr(row, name) for name in ("version", "since", *row.derived_fields)}
        model._base_manager.using(edit.using).filter(pk=row.pk).update(**written)
        made = before is None or before.history_type == "-"
        record([row], "+" if made else "~", edit.using, reason)
        said.append(f"changed: {model._meta.verbose_name} {row.pk}: {row}")
    for before in found.gone:
        said.append(f"deleted: {model._meta.verbose_name} {before.id}")
        row = before.instance
        row.tombstone(edit).save(using=edit.using)
        row.stamp(edit)
        row._history_date = timezone.now()
        record([row], "-", edit.using, reason)
    return said


def adopt_after_migrate(using: str, apps: Apps | None = None, plan: Collection[Any] = (), **kwargs: Any) -> None:
    """Bring into force what data migrations wrote: their historical models know no version.

    Only after migrations, not after a flush, and only where the tables are those of this code.
    """
    if using != conf.DATABASE or not plan or apps is None or not all(_current(model, apps) for model in MODELS):
        return
    if any(rows or gone for rows, gone in (unrecorded(model, using) for model in MODELS)):
        with editing(using) as edit:
            adopt(edit, "migrate")


def _current(model: type[Versioned], apps: Apps) -> bool:
    try:
        migrated = apps.get_model(model._meta.label)
    except LookupError:
        return False
    return {field.column for field in migrated._meta.concrete_fields} == {
        field.column for field in model._meta.concrete_fields
    }
