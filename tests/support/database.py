"""Empty the database after a test.

A test with `transaction=True` has every table emptied after it. Django then makes the content types and permissions of
every app again, at ten times the cost of emptying. They are the same for every test, so they stay. Sequences go on.
Tables that are empty already are left alone. A connection to PostgreSQL is kept, because a new one starts a process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.apps import apps
from django.contrib.auth.management import create_permissions
from django.contrib.auth.models import Permission
from django.contrib.contenttypes.management import create_contenttypes
from django.contrib.contenttypes.models import ContentType
from django.core.management.commands import flush
from django.db import DatabaseError, connections
from django.db.models.signals import post_migrate
from django.test import TransactionTestCase

_KEPT = {ContentType._meta.db_table, Permission._meta.db_table}
_PERMISSIONS = "django.contrib.auth.management.create_permissions"


class Flush(flush.Command):
    """Empty all tables but those of content types and permissions, and tell the app of it as Django does."""

    def handle(self, **options: Any) -> None:
        using: str = options["database"]
        connection = connections[using]
        quoted = connection.ops.quote_name
        existing = connection.introspection.django_table_names(only_existing=True, include_views=False)
        tables = sorted(set(existing) - _KEPT)
        with connection.cursor() as cursor:
            cursor.execute("SELECT " + ", ".join(f"EXISTS (SELECT 1 FROM {quoted(table)})" for table in tables))
            filled = [table for table, is_filled in zip(tables, cursor.fetchone(), strict=True) if is_filled]
        if filled:
            statements = [f"DELETE FROM {quoted(table)}" for table in filled]
            # PostgreSQL's TRUNCATE, which Django sends, makes the files of each table anew: a hundred times the cost.
            one = connection.vendor == "postgresql"
            connection.ops.execute_sql_flush(["; ".join(statements)] if one else statements)
        app = apps.get_app_config("ratelimits")
        about = {"app_config": app, "verbosity": 0, "interactive": False, "using": using, "plan": [], "apps": apps}
        with _nothing_made_again():
            post_migrate.send(sender=app, **about)


@contextmanager
def _nothing_made_again() -> Iterator[None]:
    """Let Django not look for content types and permissions to make: they were kept."""
    post_migrate.disconnect(create_contenttypes)
    post_migrate.disconnect(dispatch_uid=_PERMISSIONS)
    try:
        yield
    finally:
        post_migrate.connect(create_permissions, dispatch_uid=_PERMISSIONS)
        post_migrate.connect(create_contenttypes)


def keep_connections() -> None:
    """Let Django keep its connections to PostgreSQL after a test, each as it was when it was new."""
    TransactionTestCase._should_reload_connections = _made_new  # type: ignore[attr-defined]


def _made_new(case: TransactionTestCase) -> bool:
    for connection in connections.all(initialized_only=True):
        if connection.vendor != "postgresql" or connection.connection is None or connection.in_atomic_block:
            connection.close()
            continue
        try:
            # What a session has changed for itself: settings, role, locks, temporary tables, prepared statements.
            with connection.cursor() as cursor:
                cursor.execute("DISCARD ALL")
            connection.init_connection_state()
        except DatabaseError:
            connection.close()
    return False
