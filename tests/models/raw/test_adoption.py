"""Test rows that a data migration writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fresh import Project
from tests.support.servers import TestServers

_MIGRATION = """\
from django.db import migrations


def forwards(apps, schema_editor):
    {body}


class Migration(migrations.Migration):
    dependencies = [{dependencies}]
    operations = [migrations.RunPython(forwards)]
"""
_FIRST = """\
Rule = apps.get_model("ratelimits", "Rule")
    Rule.objects.create(name="a", algorithm="token_bucket", capacity=10, rate=5, period=1)
    Rule.objects.create(name="b", algorithm="token_bucket", capacity=10, rate=5, period=1)
    apps.get_model("ratelimits", "KeyOverride").objects.create(key="user:1", rule="a", capacity=3)"""
_SECOND = """\
Rule = apps.get_model("ratelimits", "Rule")
    Rule.objects.filter(name="a").update(capacity=20)
    Rule.objects.filter(name="b").delete()
    apps.get_model("ratelimits", "KeyOverride").objects.update(key="user:2")"""
_COMMANDS = """
from django.core.management import call_command

from ratelimits.models import *
from ratelimits.models.versions import ConfigVersion, Tombstone
from ratelimits.models.keys import key_shard


def show():
    rule, override = Rule.objects.get(name="a"), KeyOverride.objects.get()
    records = Rule.history.order_by("name", "version").values_list("name", "version", "history_type", "capacity")
    print(ConfigVersion.read("default")[0], rule.version, override.key, override.shard == key_shard(override.key),
          list(records), list(Tombstone.objects.order_by("kind").values_list("kind", "key", "rule")))


# What it writes before the app's last migration is found after that one.
call_command("migrate", "shop", "0001", verbosity=0)
call_command("migrate", "ratelimits", verbosity=0)
show()
call_command("migrate", verbosity=0)
show()
call_command("migrate", verbosity=0)
call_command("ratelimits_reload")
show()
"""


@pytest.fixture
def project(tmp_path: Path, servers: TestServers) -> Project:
    made = Project(tmp_path, servers)
    made.create_database("default")
    made.add_earlier_version()
    made.write("shop/migrations/__init__.py", "")
    for name, body, dependency in (
        ("0001_rules", _FIRST, '("ratelimits", "0001_initial")'),
        ("0002_rules", _SECOND, '("shop", "0001_rules")'),
    ):
        made.write(f"shop/migrations/{name}.py", _MIGRATION.format(body=body, dependencies=dependency))
    return made


def test_what_a_data_migration_writes_is_an_edit(project: Project) -> None:
    first, second, reloaded, third = project.python(_COMMANDS).splitlines()
    assert first == "1 1 user:1 True [('a', 1, '+', 10), ('b', 1, '+', 10)] []"
    assert second == (
        "2 2 user:2 True [('a', 1, '+', 10), ('a', 2, '~', 20), ('b', 1, '+', 10), ('b', 2, '-', 10)]"
        " [('keyoverride', 'user:1', 'a'), ('rule', '', 'b')]"
    )
    assert "Version 3 is in force." in reloaded
    assert third == second.replace("2 2 user", "3 2 user", 1)
