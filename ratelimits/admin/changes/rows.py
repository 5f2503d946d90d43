"""Read the changes of several tables from the tables' histories, newest first.

The number of queries does not depend on the number of changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from heapq import merge
from typing import Any, NamedTuple

from django.db.models import Exists, Model, OuterRef, Q, Subquery
from django.utils.translation import gettext as _

from ratelimits.algorithms.base import number
from ratelimits.conf import conf
from ratelimits.models import Plan
from ratelimits.models.history import MOVED, is_erasure
from ratelimits.models.versioned import Versioned

#: Columns that are not shown. Their values result from other columns, or from the edit itself.
_HIDDEN = {"id", "version", "since", "counts_since", "shard"}


class Difference(NamedTuple):
    """A changed field: its name, and its values before and after the change as texts ("–" for no value)."""

    field: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class ChangedRow:
    """A row that an edit added, changed or deleted.

    record       the record of the change in the row's history
    before       the previous record of the same row; None for an added row, or if there is no previous record
    instance     the row, with the values of `record`
    is_newest    whether this is the last change of the row
    is_reversal  whether the change reverses the change before it, as an undo does
    """

    record: Any
    before: Any
    instance: Any
    is_newest: bool
    is_reversal: bool
    differences: tuple[Difference, ...]

    @property
    def kind(self) -> str:
        """Return "+" for an added row, "~" for a changed row, "-" for a deleted row."""
        return str(self.record.history_type)

    @property
    def did(self) -> str:
        """Return the kind of change in words."""
        if self.is_reversal:
            return _("added again") if self.kind == "+" else _("changed back")
        return {"+": _("added"), "~": _("changed"), "-": _("deleted")}.get(self.kind, self.kind)

    @property
    def obstacle(self) -> str:
        """Return why the change cannot be undone by itself; "" if it can."""
        reason = self.record.history_change_reason
        if reason == MOVED:
            # Undone by itself, the change would give what is one customer's to the other one.
            return _("This came with a move of an account text: move the text back.")
        if is_erasure(reason):
            return _("This came with the erasure of a customer, which cannot be undone.")
        return ""

    @property
    def model(self) -> type[Model]:
        """Return the table of the row."""
        model: type[Model] = self.record.instance_type
        return model


def changed_rows(
    models: Iterable[type[Versioned]], until: datetime | None, skip: int, count: int, chosen: Q | None = None
) -> list[ChangedRow]:
    """Return at most `count` changes of these tables, newest first.

    Changes after the moment `until` are left out. If `until` is None, no change is left out for this reason. Of the
    remaining changes, the first `skip` are left out too. A moment alone cannot say where a page starts, because one
    edit may change many rows at the same moment. `chosen` is a further condition for the records.
    """
    records = merge(
        *(_records(model, until, skip + count, chosen) for model in models),
        key=lambda record: (record.history_date, record.history_id),
        reverse=True,
    )
    page = list(records)[skip : skip + count]
    previous_records = _previous_records(page)
    plans = _plan_names([*page, *previous_records.values()])
    rows = []
    for record in page:
        before = previous_records.get((type(record), record.previous_id))
        two_before = previous_records.get((type(record), record.second_previous_id))
        is_reversal = _is_reversal(record, before, two_before)
        if record.history_type == "+":
            # A record before an addition is the deletion of an earlier row with the same primary key.
            before = None
        differences = tuple(_differences(record, before, plans))
        instance = _instance(record, plans)
        rows.append(ChangedRow(record, before, instance, not record.is_followed, is_reversal, differences))
    return rows


def _is_reversal(record: Any, before: Any, two_before: Any) -> bool:
    """Return whether a change adds a deleted row again with its former values, or reverses the edit before it.

    `before` is the record before this change, and `two_before` is the record before `before`. Each can be None.
    """
    if before is None:
        return False
    if record.history_type == "+":
        return _values(record) == _values(before)
    are_edits = record.history_type == before.history_type == "~"
    return are_edits and two_before is not None and _values(record) == _values(two_before) != _values(before)


def _values(record: Any) -> list[Any]:
    """Return the values of a record that people edit."""
    return [getattr(record, field.attname) for field in record.tracked_fields if field.name not in _HIDDEN]


def _records(model: type[Versioned], until: datetime | None, count: int, chosen: Q | None) -> Sequence[Any]:
    """Return at most `count` records of the history of a table, newest first.

    Each record has the ids of the two records before it in the history of its row (`previous_id`,
    `second_previous_id`), and `is_followed`: whether the row has a later record.
    """
    history: Any = model.history
    same_row = history.model._base_manager.filter(id=OuterRef("id"))
    records = history.using(conf.DATABASE)
    if until is not None:
        records = records.filter(history_date__lte=until)
    if chosen is not None:
        records = records.filter(chosen)
    older = same_row.filter(history_id__lt=OuterRef("history_id")).order_by("-history_id").values("history_id")
    newer = Exists(same_row.filter(history_id__gt=OuterRef("history_id")))
    records = records.annotate(
        previous_id=Subquery(older[:1]), second_previous_id=Subquery(older[1:2]), is_followed=newer
    )
    # A separate query reads the users, because users may be in another database.
    return list(records.prefetch_related("history_user").order_by("-history_date", "-history_id")[:count])


def _previous_records(records: Sequence[Any]) -> dict[tuple[type[Any], int], Any]:
    """Return the two records before each of these records, in the history of its row.

    The result is a dict of records by (model of the history, id of the record).
    """
    previous_records: dict[tuple[type[Any], int], Any] = {}
    for history in {type(record) for record in records}:
        of_table = [record for record in records if type(record) is history]
        ids = {pk for record in of_table for pk in (record.previous_id, record.second_previous_id) if pk}
        by_id = history._base_manager.using(conf.DATABASE).in_bulk(ids)
        previous_records |= {(history, pk): record for pk, record in by_id.items()}
    return previous_records


def _plan_names(records: Iterable[Any]) -> dict[int, str]:
    """Return the newest names of the records' plans, by primary key. Deleted plans are included."""
    ids = {record.plan_id for record in records if getattr(record, "plan_id", None) is not None}
    history: Any = Plan.history
    rows = history.using(conf.DATABASE).filter(id__in=ids).order_by("history_id").values_list("id", "name")
    # For a plan with several names, the dict gets the last name.
    return dict(rows) if ids else {}


def _instance(record: Any, plans: dict[int, str]) -> Any:
    """Return the row of a record. Its plan has only a primary key and a name: its other columns are not read."""
    instance = record.instance
    if getattr(instance, "plan_id", None) is not None:
        instance.plan = Plan(pk=instance.plan_id, name=plans.get(instance.plan_id, f"#{instance.plan_id}"))
    return instance


def _differences(record: Any, before: Any, plans: dict[int, str]) -> Iterator[Difference]:
    """Yield the fields with different values. For an added or deleted row, yield all fields that are not empty.

    For a changed row, yield nothing if there is no record before the change: the old values are not known.

    None, False and "" all count as empty, so a change from one of them to another is no difference.
    """
    if record.history_type == "~" and before is None:
        return
    # Before an addition and after a deletion, the row has no values. The record of a deletion has the last values.
    old, new = {"+": (None, record), "-": (record, None)}.get(record.history_type, (before, record))
    for field in record.tracked_fields:
        if field.name in _HIDDEN:
            continue
        values = [None if state is None else getattr(state, field.attname) for state in (old, new)]
        if values[0] != values[1] and not all(value is None or value is False or value == "" for value in values):
            yield Difference(str(field.verbose_name), *(_text_of(value, field, plans) for value in values))


def _text_of(value: Any, field: Any, plans: dict[int, str]) -> str:
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
