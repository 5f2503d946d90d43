"""The clock of a database: the one clock that all workers share."""

from __future__ import annotations

from datetime import UTC, datetime

from django.db import connections

#: By the kind of the database: a query for the seconds since 1970 UTC. (In SQLite, the clock is that of this machine.)
_QUERIES = {
    "postgresql": "SELECT EXTRACT(EPOCH FROM clock_timestamp())",
    "sqlite": "SELECT CAST(strftime('%s', 'now') AS REAL) + strftime('%f', 'now') - strftime('%S', 'now')",
}


def now_of(using: str) -> datetime:
    """Return the present moment by the clock of a database, in UTC, also within a transaction."""
    with connections[using].cursor() as cursor:
        cursor.execute(_QUERIES[connections[using].vendor])
        (seconds,) = cursor.fetchone()
    return datetime.fromtimestamp(float(seconds), UTC)
