"""Digests of rows and of records of edits. Manifests list them, and an erasure notes which digest stands for which."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from django.db.models import Model, QuerySet

from ratelimits.models.customers import salts_of
from ratelimits.usage.models import DurabilityGap, ProcessTotal, erased
from ratelimits.usage.models.sums import ExactSum

#: How many rows are read at once.
_CHUNK = 2000
#: Columns that are left out of the digest of a row: a person may acknowledge a gap at any time.
_LEFT_OUT: dict[type[Model], frozenset[str]] = {
    DurabilityGap: frozenset({"acknowledged_at", "acknowledged_by", "reason"})
}


def row_columns(model: type[Model]) -> list[str]:
    """Return the columns from which the digest of a model's row is made."""
    left_out = _LEFT_OUT.get(model, frozenset())
    return [field.attname for field in model._meta.concrete_fields if field.attname not in left_out]


def rows_of(rows: Any, name: str, columns: list[str]) -> dict[str, str]:
    """Return a digest of these columns of each row, by the row's value in the column `name`."""
    values_of_rows = rows.order_by("pk").values_list(name, *columns).iterator(_CHUNK)
    digests = {str(row_name): digest_of(values) for row_name, *values in values_of_rows}
    return dict(zip(digests, erased.first_digests(rows.db, list(digests.values())), strict=True))


def digest_of(values: Any) -> str:
    """Return the digest of a row's values. The digest is the same in each kind of database."""
    return hashlib.sha256(json.dumps(values, default=_text, sort_keys=True).encode()).hexdigest()


def _text(value: Any) -> str:
    if isinstance(value, Decimal):
        return f"{value.normalize():f}"  # Databases return different numbers of trailing zeros.
    return value.astimezone(UTC).isoformat() if isinstance(value, datetime) else str(value)


def sums_of_totals(rows: QuerySet[ProcessTotal]) -> QuerySet[Any, Any]:
    """Return the columns of process totals and their sums over all processes."""
    columns = ("kind", "bin", "account", "key", "meter")
    return rows.values_list(*columns).order_by("kind", "bin").annotate(ExactSum("requests"), ExactSum("units"))


def names_of_processes(rows: QuerySet[ProcessTotal]) -> QuerySet[Any, Any]:
    """Return the columns of process totals with the names of the processes, without their counts."""
    return rows.order_by("kind", "bin").values_list("kind", "bin", "account", "key", "meter", "process")


def digests_of_totals(using: str, rows: Sequence[Any]) -> list[str]:
    """Return the digests of process totals: of these values and the salt of the account's text, the third value."""
    salts = salts_of(using, {row[2] for row in rows})
    return [digest_of([salts.get(row[2], ""), *row]) for row in rows]


def record_columns(model: Any) -> list[str]:
    """Return the columns of a model's history from which digests of its records are made."""
    return sorted(field.attname for field in model.history.model._meta.concrete_fields)


def record_digest(values: Sequence[Any]) -> str:
    """Return the digest of a record. Times are cut to milliseconds: fixtures (`dumpdata`) have no more digits."""
    return digest_of([_in_milliseconds(value) for value in values])


def _in_milliseconds(value: Any) -> Any:
    return value.replace(microsecond=value.microsecond // 1000 * 1000) if isinstance(value, datetime) else value
