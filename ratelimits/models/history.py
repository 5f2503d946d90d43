"""The history of a model, and its records that are not made by a single row's save() or delete()."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.conf import settings
from django.db import models
from django.utils import timezone
from simple_history.models import HistoricalRecords

from ratelimits.models import users


class History(HistoricalRecords):  # type: ignore[misc]
    """The history of a model: records beside its rows, in their database, made by users of this or another one."""

    def __init__(self) -> None:
        super().__init__(use_base_model_db=True)

    def get_extra_fields(self, model: Any, fields: Any) -> dict[str, Any]:
        user = models.ForeignKey(
            settings.AUTH_USER_MODEL, users.set_null, null=True, related_name="+", db_constraint=False
        )
        return {**super().get_extra_fields(model, fields), "history_user": user}


def record(rows: Sequence[models.Model], kind: str, using: str, reason: str | None = None) -> None:
    """Add one record for each row, of kind "+" (made), "~" (changed) or "-" (deleted), beside it in its database.

    `reason` is the change reason of rows that bring none (`_change_reason`). simple_history's own bulk method would
    write to whichever database a router names.
    """
    for model in {type(row) for row in rows}:
        history: Any = getattr(model, "history", None)
        if history is None:
            continue
        now, fields = timezone.now(), history.model.tracked_fields
        history.using(using).bulk_create(
            history.model(
                history_date=getattr(row, "_history_date", now),
                history_user=_who(history.model, row),
                history_change_reason=getattr(row, "_change_reason", None) or reason,
                history_type=kind,
                **{field.attname: getattr(row, field.attname) for field in fields},
            )
            for row in rows
            if type(row) is model
        )


def _who(history: Any, row: models.Model) -> Any:
    return row._history_user if hasattr(row, "_history_user") else history.get_default_history_user(row)
