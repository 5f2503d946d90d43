"""Sums of counters. A counter has 64 bits, but the sum of several counters can need more."""

from __future__ import annotations

from typing import Any

from django.db.models import Sum

#: The largest number that a column can store. A total that reaches it stays there.
MAX_TOTAL = 2**63 - 1


class ExactSum(Sum):
    """The exact sum of a column of whole numbers.

    SQLite's own SUM fails with "integer overflow" above 2^63 - 1. Here it adds the upper and the lower 32 bits of the
    numbers by themselves, and Python joins the two sums. PostgreSQL's SUM has no such limit.
    """

    def as_sqlite(self, compiler: Any, connection: Any, **extra: Any) -> Any:
        template = "CAST(SUM(%(expressions)s >> 32) AS TEXT) || ':' || SUM(%(expressions)s & 4294967295)"
        sql, params = self.as_sql(compiler, connection, **{"template": template, **extra})
        if params:
            raise ValueError("an exact sum is only of a column")
        return sql, params

    def get_db_converters(self, connection: Any) -> Any:
        return [_joined] if connection.vendor == "sqlite" else super().get_db_converters(connection)


def _joined(value: Any, _expression: Any, _connection: Any) -> int | None:
    if value is None:
        return None
    upper, _colon, lower = value.partition(":")
    return (int(upper) << 32) + int(lower)


def saturating_sum(vendor: str, column: str) -> str:
    """Return SQL for the sum of a column without negative numbers; above MAX_TOTAL, the sum is MAX_TOTAL."""
    if vendor == "postgresql":
        return f"LEAST(SUM({column}), {MAX_TOTAL})"
    upper, lower = f"SUM({column} >> 32)", f"SUM({column} & 4294967295)"
    is_too_large = f"{upper} + ({lower} >> 32) >= 2147483648"
    return f"CASE WHEN {is_too_large} THEN {MAX_TOTAL} ELSE ({upper} << 32) + {lower} END"


def saturating_add(table: str, column: str) -> str:
    """Return SQL that sets a column, in an upsert, to its value plus the new value, but to at most MAX_TOTAL.

    Without this, PostgreSQL refuses the whole statement, and SQLite stores a float.
    """
    old, new = f"{table}.{column}", f"excluded.{column}"
    return f"{column} = CASE WHEN {old} > {MAX_TOTAL} - {new} THEN {MAX_TOTAL} ELSE {old} + {new} END"


def is_overflow(error: Exception) -> bool:
    """Return whether a sum was too large for SQLite. On PostgreSQL this error is not an OperationalError."""
    return "integer overflow" in str(error)
