"""Test that the app works in projects that lack what it does not need: each project runs in its own process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import dj_database_url
import pytest

from tests.support import forked
from tests.support.fresh import Project
from tests.support.own_apps import OWN
from tests.support.servers import TestServers
from tests.without.site import HIDE, WITHOUT

ROOT = Path(__file__).resolve().parents[2]


def use(folder: Path, servers: TestServers, name: str) -> str:
    """Use the project without `name`; return all output of its process."""
    database: dict[str, Any] = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(folder / "site.sqlite3")}
    if servers.database_kind == "postgres":
        import psycopg

        url = servers.url_of_database("postgres")
        database = {**dj_database_url.parse(url), "NAME": "without_" + "".join(filter(str.isalpha, name))}
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{database["NAME"]}"')
    (folder / "sitecustomize.py").write_text(HIDE.format(packages=WITHOUT[name].packages))
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("DJANGO", "PYTEST"))}
    done = forked.run(
        [sys.executable, "-W", "error", "-m", "tests.without.site", name, json.dumps(database), servers.redis.url],
        cwd=folder,
        env={**kept, "PYTHONPATH": f"{folder}:{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    return str(done.stdout)


@pytest.mark.parametrize("name", WITHOUT)
def test_a_project_without_it_works(tmp_path: Path, servers: TestServers, name: str) -> None:
    printed = use(tmp_path, servers, name).splitlines()
    missing = WITHOUT[name].apps
    assert [line for line in printed if line.startswith("System check")] == [
        "System check identified no issues (0 silenced).",
    ] * 2
    assert "files 200 200 429" in printed
    assert ("api 200 200 429" in printed) == ("rest_framework" not in missing)
    assert "free 200 <h1>/free/</h1> 404" in printed
    assert any(line.startswith("few (enforce), counted for ip:192.0.2.5: 0 of 2") for line in printed)
    apps = [app for app in OWN if app not in missing]
    assert f"tables of {' '.join(sorted(app.replace('.', '_') for app in apps))}" in printed
    assert f"commands of {' '.join(sorted(apps))}" in printed
    assert any(line.startswith("Drained 1 batch") for line in printed) == ("ratelimits.usage" in apps)
    assert ("No errors were found." in printed) == ("ratelimits.billing" in apps)
    assert ("admin 200 200 200 True" in printed) == ("admin" not in missing)


CONTRIB = [f"django.contrib.{name}" for name in ("admin", "auth", "contenttypes", "messages", "sessions")]


@pytest.mark.parametrize(
    ("apps", "error"),
    [
        ([], "(ratelimits.E015) The project has no users, but the app's tables name the users who change them: AUTH_"),
        (CONTRIB, "(ratelimits.E013) INSTALLED_APPS has django.contrib.admin but not simple_history, so the admin"),
    ],
)
def test_an_app_that_is_required_is_named_in_one_sentence(
    tmp_path: Path, servers: TestServers, apps: list[str], error: str
) -> None:
    project = Project(tmp_path, servers)
    project.create_database("default")
    project.settings |= {
        "INSTALLED_APPS": [*apps, *OWN],
        "REST_FRAMEWORK": {},
        "ROOT_URLCONF": "no_views",
    }
    project.write("no_views.py", "urlpatterns = []\n")
    for command in ("check", "migrate"):
        printed = project.manage(command, fails=True)
        assert error in printed
        assert "Traceback" not in printed


def test_settings_and_rules_that_need_an_app_above_are_named(tmp_path: Path, servers: TestServers) -> None:
    project = Project(tmp_path, servers)
    project.create_database("default")
    project.settings["INSTALLED_APPS"] = [
        *(
            "django.contrib.auth",
            "django.contrib.contenttypes",
            "rest_framework",
            "simple_history",
            "ratelimits",
            "shop",
        ),
    ]
    project.settings["RATELIMITS"] |= {"PUSH": {}, "SEAL_INTERVAL": 30, "GRACE_SECONDS": 60}
    project.manage("migrate")
    project.python(
        "from ratelimits.models import Rule\n"
        "numbers = {'algorithm': 'calendar_window', 'capacity': 2, 'calendar_unit': 'month'}\n"
        "Rule.objects.create(name='monthly', bills=True, **numbers)\n"
        "Rule.objects.create(name='daily', **{**numbers, 'calendar_unit': 'day'})\n"
    )
    printed = " ".join(project.manage("check", "--database", "default").split())
    assert "(ratelimits.W060) These settings of RATELIMITS do nothing in this project: SEAL_INTERVAL." in printed
    assert "(ratelimits.W060) These settings of RATELIMITS do nothing in this project: GRACE_SECONDS, PUSH." in printed
    assert "Add 'ratelimits.billing' to INSTALLED_APPS, or remove them." in printed
    assert "but nothing counts usage: rule 1 (monthly" in printed
    assert "daily" not in printed
    for module, app in (("usage", "usage"), ("billing", "usage")):
        project.write("importing.py", f"import django\n\ndjango.setup()\nimport ratelimits.{module}.models\n")
        missing = project.run("importing.py", fails=True)
        assert f"add 'ratelimits.{app}' to INSTALLED_APPS" in missing
