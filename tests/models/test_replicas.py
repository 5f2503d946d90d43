from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.fresh import Project
from tests.support.servers import TestServers

_ROUTER = """\
class Replica:
    def db_for_read(self, model, **hints):
        return "replica"

    def db_for_write(self, model, **hints):
        return "default"

    def allow_relation(self, one, other, **hints):
        return True
"""
#: A script that makes the tables in the process that edits.
_TABLES = """
from django.core.management import call_command

call_command("migrate", run_syncdb=True, verbosity=0)
"""
_EDITS = """
from django.db.models.functions import Length
from ratelimits.billing.models import *
from ratelimits.models import *
from ratelimits.usage.models import *
from ratelimits.models.versions import ConfigVersion, Tombstone

numbers = {"algorithm": "token_bucket", "capacity": 10, "rate": 5, "period": 1}
plan = Plan.objects.create(name="Pro", slug="pro")
Rule.objects.create(name="a", **numbers)
Rule.objects.bulk_create([Rule(name=name, **numbers) for name in "bcde"])
assert Rule.objects.update(capacity=20) == 5
assert Rule.objects.filter(name="b").update(mode="shadow") == 1
rows = list(Rule.objects.all())
for row in rows:
    row.period = 2
assert Rule.objects.bulk_update(rows, ["period"]) == 5
Rule.objects.filter(name="c").delete()
Rule.objects.get(name="d").delete()
read = Plan.objects.get()
assert read._state.db == "replica"
read.name = "Professional"
read.save()
Rule.objects.update_or_create(name="a", plan=None, defaults={"capacity": 30})
Rule.objects.get_or_create(name="f", plan=read, defaults=numbers)
PlanInclusion.objects.create(plan=read, quantity=5)
read.inclusions.update(quantity=6)
read.inclusions.all().delete()
Account.objects.create(identifier="7", plan=read)
read.accounts.clear()
Plan.objects.get().delete()
assert ConfigVersion.read("default")[0] == 17, ConfigVersion.read("default")
assert sorted(Rule.objects.values_list("name", "capacity")) == [("a", 30), ("b", 20), ("e", 20)]
assert Rule.as_of(rows[0].pk, 2).capacity == 10
assert Rule.history.count() == 21, list(Rule.history.values_list("name", "history_type", "version"))
assert Tombstone.objects.count() == 5, list(Tombstone.objects.values())
"""


@pytest.fixture
def project(tmp_path: Path, servers: TestServers) -> Project:
    """Make a project whose router reads from a replica that refuses every write: the same database, read-only."""
    made = Project(tmp_path, servers)
    made.create_database("default")
    default: dict[str, Any] = made.settings["DATABASES"]["default"]
    if servers.database_kind == "sqlite":
        replica = {**default, "NAME": f"file:{default['NAME']}?mode=ro", "OPTIONS": {"uri": True}}
    else:
        readonly = {**default.get("OPTIONS", {}), "options": "-c default_transaction_read_only=on"}
        replica = {**default, "OPTIONS": readonly}
    made.settings |= {
        "MIGRATION_MODULES": dict.fromkeys(
            ("auth", "contenttypes", "ratelimits", "ratelimits_usage", "ratelimits_billing")
        ),
        "DATABASES": {"default": default, "replica": replica},
        "DATABASE_ROUTERS": ["shop.routers.Replica"],
    }
    made.write("shop/routers.py", _ROUTER)
    return made


def test_every_edit_is_written_where_the_router_writes_and_not_where_it_reads(project: Project) -> None:
    project.python(_TABLES + _EDITS)


def test_an_async_edit_too(project: Project) -> None:
    project.python(
        _TABLES
        + """
import asyncio
from ratelimits.models import Rule
from ratelimits.models.versions import ConfigVersion

async def edit():
    row = Rule(name="a", algorithm="token_bucket", capacity=10, rate=5, period=1)
    await Rule.objects.abulk_create([row])
    assert await Rule.objects.aupdate(capacity=20) == 1
    await Rule.objects.all().adelete()

asyncio.run(edit())
assert ConfigVersion.read("default")[0] == 3
"""
    )


def test_rules_as_code_are_loaded_and_adopted_there(project: Project) -> None:
    project.write(
        "rules.json",
        '{"plans": {"pro": {"name": "Pro"}}, "rules": [{"name": "a", "algorithm": "token_bucket", "capacity": 1,'
        ' "rate": 1, "period": 1}]}',
    )
    said = project.python(
        _TABLES
        + """
call_command("ratelimits_rules", "load", "rules.json")
call_command("ratelimits_reload")
"""
    )
    assert "added plan pro" in said
    assert "Version 2 is in force" in said
