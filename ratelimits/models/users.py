"""What happens to rows that name a user when that user is deleted, also where users are in another database.

Django looks for such rows in the database of the user, where the app's tables may not exist.
"""

from __future__ import annotations

from typing import Any

from django.db import models, router

from ratelimits.conf import conf


def protect(collector: Any, field: Any, sub_objs: Any, using: str) -> None:
    """Refuse to delete a user whom a row names; for `on_delete`. Raises ProtectedError."""
    rows = _rows(field, sub_objs, using)
    if rows:
        models.PROTECT(collector, field, rows, using)


def set_null(collector: Any, field: Any, sub_objs: Any, using: str) -> None:
    """Leave rows without a user when theirs is deleted; for `on_delete`."""
    models.SET_NULL(collector, field, _rows(field, sub_objs, using), using)


# Django then hands over the rows as a query that it has not run.
protect.lazy_sub_objs = set_null.lazy_sub_objs = True  # type: ignore[attr-defined]


def _rows(field: Any, rows: Any, using: str) -> Any:
    """Return the query for the rows in the database that they are kept in."""
    if using != router.db_for_write(field.remote_field.model):
        return rows  # a copy of a user, beside a copy of the rows
    # The admin asks for the users in the same query, and no query joins two databases.
    return rows.using(conf.DATABASE).select_related(None)
