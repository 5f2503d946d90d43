"""Test that the app's tables follow its migrations, forwards and backwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fresh import Project
from tests.support.servers import TestServers

_UPGRADED = """
from django.core.management import call_command
from django.db import connection
from django.db.migrations.executor import MigrationExecutor

from ratelimits.models import Rule


def tables():
    return {name for name in connection.introspection.table_names() if name.startswith("ratelimits_")}


state = MigrationExecutor(connection).migrate([("ratelimits", "0001_initial")])
plan = state.apps.get_model("ratelimits", "Plan").objects.create(name="Pro", slug="pro")
numbers = {"algorithm": "token_bucket", "capacity": 10, "rate": 5, "period": 1}
state.apps.get_model("ratelimits", "Rule").objects.create(name="burst", plan=plan, **numbers)
assert len(tables()) > 15

# The tables are not those of this code, so their rows are left alone.
call_command("migrate", "ratelimits", "0001", verbosity=0)
with connection.cursor() as cursor:
    cursor.execute("SELECT version FROM ratelimits_rule")
    assert cursor.fetchall() == [(0,)]
    cursor.execute("SELECT COUNT(*) FROM ratelimits_historicalrule")
    assert cursor.fetchall() == [(0,)]

call_command("migrate", verbosity=0)
call_command("makemigrations", check_changes=True, dry_run=True)
rule = Rule.objects.get()
assert (rule.name, rule.plan.slug, rule.capacity, rule.version, rule.lasting) == ("burst", "pro", 10, 1, None)
assert Rule.history.get().version == 1

# On the way back too.
call_command("migrate", "ratelimits", "0001", verbosity=0)
with connection.cursor() as cursor:
    cursor.execute("SELECT version FROM ratelimits_rule UNION ALL SELECT version FROM ratelimits_historicalrule")
    assert cursor.fetchall() == [(1,), (1,)]

# Without bills, no report has usage any more.
from ratelimits.models import Customer
from ratelimits.usage.models import PeriodUsage

where = {"customer": Customer.objects.create(), "account": "acme", "period": 0, "period_end": 900, "meter": "requests"}
PeriodUsage.objects.create(**where, rule=0, shard=0, position=7, covered=7)
call_command("migrate", "ratelimits_billing", "zero", verbosity=0)
assert PeriodUsage.objects.get().covered is None
assert {name for name in tables() if name.startswith("ratelimits_billing")} == set()
assert {name for name in tables() if name.startswith("ratelimits_usage")} != set()
call_command("migrate", "ratelimits_billing", verbosity=0)

# The apps above go with an app.
call_command("migrate", "ratelimits", "zero", verbosity=0)
assert tables() == set()
"""


@pytest.fixture
def project(tmp_path: Path, servers: TestServers) -> Project:
    made = Project(tmp_path, servers)
    made.create_database("default")
    made.add_earlier_version()
    return made


def test_rows_of_an_earlier_version_are_adopted_once_the_tables_are_those_of_today(project: Project) -> None:
    project.python(_UPGRADED)
