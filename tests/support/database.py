"""Empty the database after a test.

After a test with `transaction=True`, all tables are emptied. Django would then make the content types and permissions
of every app again, which takes ten times as long. They are the same for every test, so they are kept here. Sequences
are not reset. Empty tables are skipped. A connection to PostgreSQL is kept, because a new one starts a process.
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
from django.core.management.base import CommandParser
from django.core.management.commands import flush
from django.db import DatabaseError, connections
from django.db.models.signals import post_migrate
from django.test import TransactionTestCase

_KEPT = {ContentType._meta.db_table, Permission._meta.db_table}
_PERMISSIONS = "django.contrib.auth.management.create_permissions"


class Flush(flush.Command):
    """Empty all tables except those of content types and permissions, and send the same signal as Django."""

    def __init__(self) -> None:
        super().__init__()
        # Django asks for it after each test. To make it takes as long as the rest.
        self._parser = super().create_parser("", "flush")

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        return self._parser

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
            # Django would send TRUNCATE to PostgreSQL: this makes new files and takes a hundred times as long.
            one = connection.vendor == "postgresql"
            connection.ops.execute_sql_flush(["; ".join(statements)] if one else statements)
        app = apps.get_app_config("ratelimits")
        about = {"app_config": app, "verbosity": 0, "interactive": False, "using": using, "plan": [], "apps": apps}
        with _nothing_made_again():
            post_migrate.send(sender=app, **about)


@contextmanager
def _nothing_made_again() -> Iterator[None]:
    """Keep Django from making content types and permissions: they still exist."""
    post_migrate.disconnect(create_contenttypes)
    post_migrate.disconnect(dispatch_uid=_PERMISSIONS)
    try:
        yield
    finally:
        post_migrate.connect(create_permissions, dispatch_uid=_PERMISSIONS)
        post_migrate.connect(create_contenttypes)


def keep_connections() -> None:
    """Let Django keep its connections to PostgreSQL after a test, with their sessions reset."""
    TransactionTestCase._should_reload_connections = _made_new  # type: ignore[attr-defined]


def _made_new(case: TransactionTestCase) -> bool:
    for connection in connections.all(initialized_only=True):
        if connection.vendor != "postgresql" or connection.connection is None or connection.in_atomic_block:
            connection.close()
            continue
        try:
            # Reset what the session has changed: settings, role, locks, temporary tables, prepared statements.
            with connection.cursor() as cursor:
                cursor.execute("DISCARD ALL")
            connection.init_connection_state()
        except DatabaseError:
            connection.close()
    return False
