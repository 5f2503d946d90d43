"""Rows that a data migration writes."""

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
_SHOW = """
from ratelimits.models import *
from ratelimits.models.versions import ConfigVersion, Tombstone
from ratelimits.models.keys import key_shard
rule, override = Rule.objects.get(name="a"), KeyOverride.objects.get()
records = Rule.history.order_by("name", "version").values_list("name", "version", "history_type", "capacity")
print(ConfigVersion.read("default")[0], rule.version, override.key, override.shard == key_shard(override.key),
      list(records), list(Tombstone.objects.order_by("kind").values_list("kind", "key", "rule")))
"""


@pytest.fixture
def project(tmp_path: Path, servers: TestServers) -> Project:
    made = Project(tmp_path, servers)
    made.create_database("default")
    made.write("shop/migrations/__init__.py", "")
    made.write(
        "shop/migrations/0001_rules.py",
        _MIGRATION.format(body=_FIRST, dependencies='("ratelimits", "0009_allotments")'),
    )
    return made


def test_what_a_data_migration_writes_is_an_edit(project: Project) -> None:
    project.manage("migrate", "--verbosity=0")
    assert project.python(_SHOW) == "1 1 user:1 True [('a', 1, '+', 10), ('b', 1, '+', 10)] []\n"

    project.write(
        "shop/migrations/0002_rules.py", _MIGRATION.format(body=_SECOND, dependencies='("shop", "0001_rules")')
    )
    project.manage("migrate", "--verbosity=0")
    shown = (
        "2 2 user:2 True [('a', 1, '+', 10), ('a', 2, '~', 20), ('b', 1, '+', 10), ('b', 2, '-', 10)]"
        " [('keyoverride', 'user:1', 'a'), ('rule', '', 'b')]\n"
    )
    assert project.python(_SHOW) == shown

    project.manage("migrate", "--verbosity=0")
    assert "Version 3 is in force." in project.manage("ratelimits_reload")
    assert project.python(_SHOW) == shown.replace("2 2 user", "3 2 user", 1)
