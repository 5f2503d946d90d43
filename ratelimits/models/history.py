"""The history of models: `simple_history` records single writes, and `record` adds the records of bulk writes.

`simple_history` cannot record bulk writes, because Django sends no signals for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

from django.conf import settings
from django.db import models
from simple_history.manager import HistoryManager
from simple_history.models import HistoricalRecords

from ratelimits import moments
from ratelimits.models import users
from ratelimits.moments.columns import UTCDateTimeField
from ratelimits.salts import SALT_BYTES, new_salt

#: Length of the history's column for change reasons, in characters.
MAX_REASON = 100
_reason: ContextVar[str | None] = ContextVar("ratelimits_change_reason", default=None)


@contextmanager
def because(reason: str | None) -> Iterator[None]:
    """Record this reason for all changes in the block that have no reason yet. None or "" means no reason."""
    token = _reason.set((reason or "").strip()[:MAX_REASON] or None)
    try:
        yield
    finally:
        _reason.reset(token)


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
    """The history of a model. It is in the database of the model's rows; the users may be in another database."""

    def __init__(self) -> None:
        super().__init__(use_base_model_db=True, history_manager=_Managers)

    def create_history_model(self, model: Any, inherited: Any) -> Any:
        """Return the class of the history's records. Its `__module__` names the module in which it can be found.

        `manage.py shell` and `pickle` import the class from this module. For models that are not in `models.py`,
        `simple_history` would name the app's package, where the class cannot be found.
        """
        history_model = super().create_history_model(model, inherited)
        if not inherited:
            history_model.__module__ = self.module
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
        extra = {"history_user": user, "history_date": moment, "history_salt": salt}
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
        history.using(using).bulk_create(
            history.model(
                history_date=getattr(row, "_history_date", now),
                history_user=_user(history.model, row),
                history_change_reason=getattr(row, "_change_reason", None) or reason or _reason.get(),
                history_type=kind,
                **{field.attname: getattr(row, field.attname) for field in fields},
            )
            for row in rows
            if type(row) is model
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
