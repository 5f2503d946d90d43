"""`on_delete` handlers for rows that name a user, who may be in another database than the app's tables.

Django's own handlers look for such rows in the database of the user, where the app's tables may not exist.
"""

from __future__ import annotations

from typing import Any

from django.db import models, router

from ratelimits.conf import conf


def protect(collector: Any, field: Any, sub_objs: Any, using: str) -> None:
    """Raise ProtectedError if a row names the user who is being deleted; for `on_delete`."""
    rows = _rows(field, sub_objs, using)
    if rows:
        models.PROTECT(collector, field, rows, using)


def set_null(collector: Any, field: Any, sub_objs: Any, using: str) -> None:
    """Set the column to null in rows that name the user who is being deleted; for `on_delete`."""
    models.SET_NULL(collector, field, _rows(field, sub_objs, using), using)


# With this flag Django passes the rows as a query that it has not run.
protect.lazy_sub_objs = set_null.lazy_sub_objs = True  # type: ignore[attr-defined]


def _rows(field: Any, rows: Any, using: str) -> Any:
    """Return the query for the rows, to be run in the database of the app's tables."""
    if using != router.db_for_write(field.remote_field.model):
        return rows  # a copy of the user in another database; the rows that name the copy are there too
    # The admin asks for the users in the same query, and no query joins two databases.
    return rows.using(conf.DATABASE).select_related(None)
