"""The history of models: `simple_history` records single writes, and `record` adds the records of bulk writes.

`simple_history` cannot record bulk writes, because Django sends no signals for them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

from django.conf import settings
from django.db import models
from django.dispatch import receiver
from simple_history.manager import HistoryManager
from simple_history.models import HistoricalRecords
from simple_history.signals import pre_create_historical_record

from ratelimits import moments
from ratelimits.models import users
from ratelimits.moments.columns import UTCDateTimeField
from ratelimits.salts import SALT_BYTES, new_salt

#: Returns the values of the columns that only the history has, for each of some rows of one model in a database.
ValuesBeside = Callable[[Sequence[Any], str], list[Mapping[str, Any]]]

#: Length of the history's column for change reasons, in characters.
MAX_REASON = 100
#: The reason of each record that a move of an account text writes.
MOVED = "the account text was moved to another customer"
#: The reason of each record that an erasure writes. What a person wrote follows the colon.
_ERASED = re.compile(r"customer [a-z2-7]{16} was erased(: |\Z)")
_reason: ContextVar[str | None] = ContextVar("ratelimits_change_reason", default=None)


@contextmanager
def because(reason: str | None) -> Iterator[None]:
    """Record this reason for all changes in the block that have no reason yet. None or "" means no reason."""
    token = _reason.set((reason or "").strip()[:MAX_REASON] or None)
    try:
        yield
    finally:
        _reason.reset(token)


def erased_because(customer: object, why: str) -> str:
    """Return the reason of the records that an erasure of a customer writes. `why` is what a person wrote, or ""."""
    return f"customer {customer} was erased" + (f": {why}" if why else "")


def is_erasure(reason: str | None) -> bool:
    """Return whether the reason of a record says that the change came with an erasure. Such a change is not undone."""
    return _ERASED.match(reason or "") is not None


def _nothing_beside(rows: Sequence[Any], using: str) -> list[Mapping[str, Any]]:
    return [{} for _row in rows]


@cache
def _managers(queryset: Any) -> Any:
    return HistoryManager.from_queryset(queryset)


class _Managers(HistoryManager):  # type: ignore[misc]
    """The managers of histories. `simple_history` asks for a new class at each access, and here gets one class.

    To make a class takes 0.1 ms, and a check of the usage asks thousands of times.
    """

    @classmethod
    def from_queryset(cls, queryset_class: Any, _class_name: str | None = None) -> Any:
        return _managers(queryset_class)


class History(HistoricalRecords):  # type: ignore[misc]
    """The history of a model. It is in the database of the model's rows; the users may be in another database.

    `columns` are further columns, which only the history has, and `values_beside` returns their values.
    """

    def __init__(self, columns: Mapping[str, Any] | None = None, values_beside: ValuesBeside | None = None) -> None:
        super().__init__(use_base_model_db=True, history_manager=_Managers)
        self._columns, self._values_beside = columns or {}, values_beside or _nothing_beside

    def create_history_model(self, model: Any, inherited: Any) -> Any:
        """Return the class of the history's records. Its `__module__` names the module in which it can be found.

        `manage.py shell` and `pickle` import the class from this module. For models that are not in `models.py`,
        `simple_history` would name the app's package, where the class cannot be found.
        """
        history_model = super().create_history_model(model, inherited)
        if not inherited:
            history_model.__module__ = self.module
        history_model.values_beside = staticmethod(self._values_beside)
        return history_model

    def get_meta_options(self, model: Any) -> dict[str, Any]:
        # Nobody adds, changes or deletes records. SIMPLE_HISTORY_ENFORCE_HISTORY_MODEL_PERMISSIONS asks for "view".
        return {**super().get_meta_options(model), "default_permissions": ("view",)}

    def get_extra_fields(self, model: Any, fields: Any) -> dict[str, Any]:
        user = models.ForeignKey(
            settings.AUTH_USER_MODEL, users.set_null, null=True, related_name="+", db_constraint=False
        )
        moment = UTCDateTimeField(db_index=True)
        # The digest of a record in a manifest includes this salt. An erasure gives the record another one.
        salt = models.CharField(max_length=2 * SALT_BYTES, default=new_salt, editable=False)
        extra = {"history_user": user, "history_date": moment, "history_salt": salt, **self._columns}
        return {**super().get_extra_fields(model, fields), **extra}

    def create_historical_record(self, instance: Any, history_type: str, using: str | None = None) -> None:
        """Add a record. Its moment is now, or the row's `_history_date`."""
        if hasattr(instance, "_history_date"):
            super().create_historical_record(instance, history_type, using)
            return
        instance._history_date = moments.now()  # `simple_history` would ask Django, which may know only a local time
        try:
            super().create_historical_record(instance, history_type, using)
        finally:
            del instance._history_date

    def get_change_reason_for_object(self, instance: Any, history_type: str, using: str) -> str | None:
        return super().get_change_reason_for_object(instance, history_type, using) or _reason.get()


@receiver(pre_create_historical_record, dispatch_uid="ratelimits.fill_history")
def _fill_columns_beside(sender: Any, instance: Any, history_instance: Any, using: str, **kwargs: Any) -> None:
    """Fill the columns that only the history has, in the record of a single write."""
    values_beside = getattr(sender, "values_beside", None)  # other apps have histories without such columns
    for values in () if values_beside is None else values_beside([instance], using):
        for name, value in values.items():
            setattr(history_instance, name, value)


def record(rows: Sequence[models.Model], kind: str, using: str, reason: str | None = None) -> None:
    """Add one history record for each row, in the database `using`.

    `kind` is "+" (the row was added), "~" (changed) or "-" (deleted). `reason` is the change reason of rows without
    `_change_reason`. (The bulk method of `simple_history` cannot write to `using`: it asks a router for the database.)
    """
    for model in {type(row) for row in rows}:
        history: Any = getattr(model, "history", None)
        if history is None:
            continue
        now, fields = moments.now(), history.model.tracked_fields
        of_model: Any = [row for row in rows if type(row) is model]
        history.using(using).bulk_create(
            history.model(
                history_date=getattr(row, "_history_date", now),
                history_user=_user(history.model, row),
                history_change_reason=getattr(row, "_change_reason", None) or reason or _reason.get(),
                history_type=kind,
                **{field.attname: getattr(row, field.attname) for field in fields},
                **values,
            )
            for row, values in zip(of_model, history.model.values_beside(of_model, using), strict=True)
        )


def end_now(row: Any, reason: str) -> None:
    """End a row now, and record the reason in its history. Delete a row that has not started yet."""
    now = moments.now()
    row._change_reason = reason[:MAX_REASON]
    if row.valid_from is not None and row.valid_from >= now:
        row.delete()
        return
    row.valid_until = now
    row.save()


def _user(history: Any, row: models.Model) -> Any:
    return row._history_user if hasattr(row, "_history_user") else history.get_default_history_user(row)
