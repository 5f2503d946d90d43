"""Empty the database after a test.

A test with `transaction=True` has every table emptied after it. Django then makes the content types and permissions of
every app again, at ten times the cost of emptying. They are the same for every test, so they stay. Sequences go on.
"""

from __future__ import annotations

from typing import Any

from django.apps import apps
from django.contrib.auth.models import Permission
from django.contrib.contenttypes.models import ContentType
from django.core.management.commands import flush
from django.db import connections
from django.db.models.signals import post_migrate

_KEPT = {ContentType._meta.db_table, Permission._meta.db_table}


class Flush(flush.Command):
    """Empty all tables but those of content types and permissions, and tell the app of it as Django does."""

    def handle(self, **options: Any) -> None:
        using: str = options["database"]
        connection = connections[using]
        tables = set(connection.introspection.django_table_names(only_existing=True, include_views=False)) - _KEPT
        statements = [f"DELETE FROM {connection.ops.quote_name(table)}" for table in sorted(tables)]
        # PostgreSQL's TRUNCATE, which Django sends, makes the files of each table anew, at a hundred times the cost.
        connection.ops.execute_sql_flush(["; ".join(statements)] if connection.vendor == "postgresql" else statements)
        app = apps.get_app_config("ratelimits")
        about = {"app_config": app, "verbosity": 0, "interactive": False, "using": using, "plan": [], "apps": apps}
        post_migrate.send(sender=app, **about)
