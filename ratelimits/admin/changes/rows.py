"""Read changes of several tables from their histories, newest first, with a fixed number of queries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from heapq import merge
from typing import Any, NamedTuple

from django.apps import apps
from django.db.models import Exists, Model, OuterRef, Q, Subquery
from django.utils.translation import gettext as _

from ratelimits.algorithms.wording import number
from ratelimits.conf import conf
from ratelimits.models import Plan
from ratelimits.models.versions import Versioned

#: Columns that are not shown: they follow from other columns, or from the edit.
_HIDDEN = {"id", "version", "since", "shard"}


class Difference(NamedTuple):
    """One field of a change: its name, and its values as texts ("–" for none)."""

    field: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class ChangedRow:
    """One row that an edit added, changed or deleted.

    record    the record of the change in the row's history
    before    the previous record of the row, or None
    instance  the row with the values of the record
    newest    whether this is the row's last change
    """

    record: Any
    before: Any
    instance: Any
    newest: bool
    differences: tuple[Difference, ...]

    @property
    def kind(self) -> str:
        """Return "+" for an added row, "~" for a changed one, "-" for a deleted one."""
        return str(self.record.history_type)

    @property
    def did(self) -> str:
        """Return a word for the kind of change."""
        return {"+": _("added"), "~": _("changed"), "-": _("deleted")}.get(self.kind, self.kind)

    @property
    def model(self) -> type[Model]:
        """Return the table of the row."""
        model: type[Model] = self.record.instance_type
        return model


def audited_models() -> list[type[Versioned]]:
    """Return the tables whose changes are recorded."""
    models = apps.get_app_config("ratelimits").get_models()
    return [model for model in models if issubclass(model, Versioned) and hasattr(model, "history")]


def changed_rows(
    models: Iterable[type[Versioned]], until: datetime | None, skip: int, count: int, chosen: Q | None = None
) -> list[ChangedRow]:
    """Return at most `count` changes of these tables, newest first, without the first `skip`.

    Changes after `until` are left out; None stands for now. `chosen` is a condition for the records. One edit may
    change many rows at the same moment, so the start of a page needs both `until` and `skip`.
    """
    records = merge(
        *(_records(model, until, skip + count, chosen) for model in models),
        key=lambda record: (record.history_date, record.history_id),
        reverse=True,
    )
    page = list(records)[skip : skip + count]
    before = _records_before(page)
    plans = _plan_names([*page, *before.values()])
    rows = []
    for record in page:
        previous = before.get((type(record), record.previous_id)) if record.history_type != "+" else None
        differences = tuple(_differences(record, previous, plans))
        rows.append(ChangedRow(record, previous, _instance(record, plans), not record.is_followed, differences))
    return rows


def _records(model: type[Versioned], until: datetime | None, count: int, chosen: Q | None) -> Sequence[Any]:
    history: Any = model.history  # type: ignore[attr-defined]
    same_row = history.model._base_manager.filter(id=OuterRef("id"))
    records = history.using(conf.DATABASE)
    if until is not None:
        records = records.filter(history_date__lte=until)
    if chosen is not None:
        records = records.filter(chosen)
    older = same_row.filter(history_id__lt=OuterRef("history_id")).order_by("-history_id").values("history_id")[:1]
    newer = Exists(same_row.filter(history_id__gt=OuterRef("history_id")))
    records = records.annotate(previous_id=Subquery(older), is_followed=newer)
    # The users may be in another database, so they are read with a separate query.
    return list(records.prefetch_related("history_user").order_by("-history_date", "-history_id")[:count])


def _records_before(records: Sequence[Any]) -> dict[tuple[type[Any], int], Any]:
    before: dict[tuple[type[Any], int], Any] = {}
    for history in {type(record) for record in records}:
        wanted = [record.previous_id for record in records if type(record) is history and record.previous_id]
        found = history._base_manager.using(conf.DATABASE).in_bulk(wanted)
        before |= {(history, pk): record for pk, record in found.items()}
    return before


def _plan_names(records: Iterable[Any]) -> dict[int, str]:
    wanted = {record.plan_id for record in records if getattr(record, "plan_id", None) is not None}
    history: Any = Plan.history
    rows = history.using(conf.DATABASE).filter(id__in=wanted).order_by("history_id").values_list("id", "name")
    return dict(rows) if wanted else {}


def _instance(record: Any, plans: dict[int, str]) -> Any:
    """Return the row of a record. Its plan is not read from the database, so it has only a name."""
    instance = record.instance
    if getattr(instance, "plan_id", None) is not None:
        instance.plan = Plan(pk=instance.plan_id, name=plans.get(instance.plan_id, f"#{instance.plan_id}"))
    return instance


def _differences(record: Any, before: Any, plans: dict[int, str]) -> Iterator[Difference]:
    """Yield the fields that differ. For a row that was added or deleted, yield the fields that are not empty."""
    old, new = {"+": (None, record), "-": (record, None)}.get(record.history_type, (before, record))
    for field in record.tracked_fields:
        if field.name in _HIDDEN:
            continue
        values = [None if one is None else getattr(one, field.attname) for one in (old, new)]
        if values[0] != values[1] and not all(value is None or value is False or value == "" for value in values):
            yield Difference(str(field.verbose_name), *(_shown(value, field, plans) for value in values))


def _shown(value: Any, field: Any, plans: dict[int, str]) -> str:
    if value is None or value == "":
        return "–"
    if field.name == "plan":
        return plans.get(value, f"#{value}")
    if isinstance(value, bool):
        return _("yes") if value else _("no")
    if isinstance(value, Decimal | int) and not field.choices:
        return number(value)
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M:%S} UTC"
    return str(dict(field.flatchoices).get(value, value))
