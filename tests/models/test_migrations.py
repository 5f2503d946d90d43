"""Test that a database made by earlier migrations gets the same tables as a new one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fresh import Project
from tests.support.servers import TestServers

_SCHEMA = r"""
import re
from pprint import pprint

from django.core.management import call_command
from django.db import connection, connections
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder

SQUASHED = {"app": "ratelimits", "name": "0001_squashed_0020_gaps_of_reports_alone"}
POSTGRES = {
    "columns": "SELECT table_name, column_name, data_type, character_maximum_length, numeric_precision, numeric_scale,"
    " is_nullable, column_default, is_identity, collation_name FROM information_schema.columns",
    "constraints": "SELECT conrelid::regclass::text AS table_name, conname, pg_get_constraintdef(oid)"
    " FROM pg_constraint",
    "indexes": "SELECT tablename AS table_name, indexname, indexdef FROM pg_indexes",
    "sequences": "SELECT sequencename AS table_name, data_type::text, cycle FROM pg_sequences",
}
SQLITE = {"all": "SELECT tbl_name AS table_name, type, name, sql FROM sqlite_master"}


def schema(connection):
    "Say all that the database knows of the app's tables, but for the order of columns."
    found = set()
    with connection.cursor() as cursor:
        for kind, query in (SQLITE if connection.vendor == "sqlite" else POSTGRES).items():
            cursor.execute(f"SELECT * FROM ({query}) AS answer WHERE table_name LIKE 'ratelimits_%%'")
            for *row, last in cursor.fetchall():
                if connection.vendor == "sqlite" and row[1] == "table":
                    found |= {(*row, part) for part in parts(last)}
                else:
                    found.add((kind, *row, last))
    return found


def parts(sql):
    "Split the columns and constraints of a CREATE TABLE at the commas that stand in no brackets."
    body = sql[sql.index("(") + 1 : sql.rindex(")")]
    depth, start = 0, 0
    for place, sign in enumerate(body):
        depth += (sign == "(") - (sign == ")")
        if sign == "," and depth == 0:
            yield body[start:place].strip()
            start = place + 1
    yield body[start:].strip()


def same_as_new():
    "Whether the default database has the tables of the database `new`, which is made by what is in the folder now."
    made, new = schema(connection), schema(connections["new"])
    pprint({"only here": made - new, "only in a new one": new - made})
    return made == new and len(made) > 300
"""
_UPGRADED = """
# The migrations of an earlier version of the app: those that the squashed one replaces, without the squashed one.
executor = MigrationExecutor(connection)
executor.loader = MigrationLoader(connection, replace_migrations=False)
state = executor.migrate([("ratelimits", "0009_allotments")])
apps = state.apps
plan = apps.get_model("ratelimits", "Plan").objects.create(name="Pro", slug="pro")
numbers = {"algorithm": "token_bucket", "capacity": 10, "rate": 5, "period": 1}
apps.get_model("ratelimits", "Rule").objects.create(name="burst", plan=plan, **numbers)

# On the way back too, the tables are not those of this code, and their rows are left alone.
call_command("migrate", "ratelimits", "0008", verbosity=0)
with connection.cursor() as cursor:
    cursor.execute("SELECT version FROM ratelimits_rule UNION ALL SELECT version FROM ratelimits_historicalrule")
    assert cursor.fetchall() == [(0,)]

call_command("migrate", verbosity=0, database="new")
assert not same_as_new()
call_command("migrate", verbosity=0)
assert same_as_new()
call_command("makemigrations", check_changes=True, dry_run=True)

from ratelimits.models import Rule

rule = Rule.objects.get()
assert (rule.name, rule.plan.slug, rule.capacity, rule.version) == ("burst", "pro", 10, 1)

# All migrations that it replaces were applied one by one, and it is not recorded yet.
recorded = MigrationRecorder(connection).migration_qs.filter(app="ratelimits")
assert recorded.filter(**SQUASHED).delete()[0] == 1 and recorded.count() >= 20
call_command("migrate", verbosity=0)
assert recorded.filter(**SQUASHED).exists() and same_as_new()
executor = MigrationExecutor(connection)
assert executor.migration_plan(executor.loader.graph.leaf_nodes()) == []

call_command("migrate", "ratelimits", "zero", verbosity=0)
assert schema(connection) == set()
"""


@pytest.fixture
def project(tmp_path: Path, servers: TestServers) -> Project:
    made = Project(tmp_path, servers)
    made.settings["DATABASES"]["new"] = made.database("new")
    for name in ("default", "new"):
        made.create_database(name)
    return made


def test_a_database_of_an_earlier_version_ends_at_the_same_tables(project: Project) -> None:
    project.python(_SCHEMA + _UPGRADED)
