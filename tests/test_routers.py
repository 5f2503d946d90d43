"""Test which databases can have the app's tables: in projects of their own, with the databases themselves."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dj_database_url
import pytest
from django.db import connections

from ratelimits.checks.settings import check_database
from ratelimits.routers import refused
from tests.support.eventually import until
from tests.support.fresh import Project
from tests.support.own_apps import OWN
from tests.support.servers import TestServers
from tests.support.snippets import snippet

APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "rest_framework",
    "simple_history",
    *OWN,
    "shop",
]
ROUTERS = ["ratelimits.routers.RatelimitsRouter"]
#: A backend of Django that is SQLite, but says that it is another kind of database.
OTHER_KIND = """
from django.db.backends.sqlite3 import base


class DatabaseWrapper(base.DatabaseWrapper):
    vendor = "{vendor}"
"""
SENTENCE = "The database 'default' is {name}, but the tables of ratelimits can only be in PostgreSQL or SQLite."
TABLES = """
from django.db import connection

print("tables:", sorted(name for name in connection.introspection.table_names() if name.startswith("ratelimits")))
"""
LIMITED = """
from django.contrib.auth.models import User
from django.core.management import call_command
from django.test import Client

from ratelimits.models import Rule

rule = Rule(name="few", key_kind="ip", algorithm="fixed_window", capacity=2, period=3600)
rule._history_user = User.objects.create(username="ann")
rule.save()
print("by", Rule.history.get().history_user.username)
client = Client(headers={"host": "localhost"})
print("answers", *(client.get("/hello/").status_code for _ in range(3)))
for command in ("seal", "drain", "verify"):
    call_command(f"ratelimits_{command}")
"""


def is_refused(project: Project, name: str) -> None:
    """Look that `check` and `migrate` refuse the database in one sentence, and that no table of the app was made."""
    sentence = SENTENCE.format(name=name)
    for command in (["check"], ["migrate"], ["migrate", "--skip-checks"]):
        printed = project.manage(*command, fails=True)
        assert sentence in printed
        assert "Traceback" not in printed
    assert "tables: []" in project.python(TABLES)


def works(project: Project) -> None:
    """Look that the app works with its tables in the database `limits`, and the users in the database `default`."""
    project.settings["DATABASES"]["limits"] = {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": str(project.directory / "limits.sqlite3"),
    }
    project.settings |= {"DATABASE_ROUTERS": ROUTERS, "ALLOWED_HOSTS": ["localhost"]}
    project.settings["RATELIMITS"] |= {"DATABASE": "limits", "FENCE": "none"}
    check = "check", "--database", "default", "--database", "limits"
    assert "(ratelimits.W055) The app's tables cannot be read" in project.manage(*check)
    project.manage("migrate")
    project.manage("migrate", "--database", "limits")
    assert "no issues" in project.manage(*check)
    printed = project.python(TABLES + LIMITED)
    for line in ("tables: []", "by ann", "answers 200 200 429", "No errors were found."):
        assert line in printed.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize(("vendor", "name"), [("mysql", "MySQL or MariaDB"), ("surreal", "'surreal'")])
def test_another_kind_of_database_is_refused_before_the_first_table(
    tmp_path: Path, servers: TestServers, vendor: str, name: str
) -> None:
    project = Project(tmp_path, servers)
    project.write("other_kind/__init__.py", "")
    project.write("other_kind/base.py", OTHER_KIND.format(vendor=vendor))
    database = {"ENGINE": "other_kind", "NAME": str(tmp_path / "other.sqlite3")}
    project.settings |= {"INSTALLED_APPS": APPS, "DATABASES": {"default": database}}
    is_refused(project, name)
    works(project)


def test_the_names_of_other_kinds_are_those_that_people_know(monkeypatch: pytest.MonkeyPatch) -> None:
    for vendor, name in (("oracle", "Oracle"), ("microsoft", "Microsoft SQL Server")):
        monkeypatch.setattr(connections["default"], "vendor", vendor)
        problem = refused("default")
        assert problem is not None
        assert problem.reason == SENTENCE.format(name=name)
        assert [error.id for error in check_database(None)] == ["ratelimits.E014"]


@pytest.fixture
def mariadb(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Return the settings of a database of a real MariaDB."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    data, socket = tmp_path / "data", tmp_path / "socket"
    user = ["--user=root"] if os.getuid() == 0 else []
    installer = [shutil.which("mariadb-install-db", path=path) or "", "--no-defaults", *user, f"--datadir={data}"]
    subprocess.run([*installer, "--auth-root-authentication-method=normal"], check=True, capture_output=True)
    server = [shutil.which("mariadbd", path=path) or "", "--no-defaults", *user, f"--datadir={data}"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [*server, "--skip-networking", f"--socket={socket}", f"--pid-file={tmp_path / 'pid'}"], stderr=log
        )
    try:
        until(socket.exists, "MariaDB starts")
        create = ["mariadb", "--no-defaults", f"--socket={socket}", "--user=root", "-e", "CREATE DATABASE site"]
        subprocess.run(create, check=True)
        yield {"ENGINE": "django.db.backends.mysql", "NAME": "site", "USER": "root", "HOST": str(socket)}
    finally:
        process.terminate()
        process.wait()


@pytest.mark.system
def test_mariadb_is_refused_and_may_have_all_other_tables(
    tmp_path: Path, servers: TestServers, mariadb: dict[str, Any]
) -> None:
    project = Project(tmp_path, servers)
    project.write("shop/__init__.py", "import pymysql\n\npymysql.install_as_MySQLdb()\n")
    project.settings |= {"INSTALLED_APPS": ["shop", *APPS[:-1]], "DATABASES": {"default": mariadb}}
    is_refused(project, "MySQL or MariaDB")
    works(project)


SHOP = """
from django.db import models
from django_tenants.models import DomainMixin, TenantMixin


class Tenant(TenantMixin):
    auto_create_schema = True


class Domain(DomainMixin):
    pass
"""
ORDERS = """
from django.db import models


class Order(models.Model):
    pass
"""
TENANTS = """
from django.core.management import call_command
from django.db import connection
from django.test import Client

from ratelimits.usage.models import Line
from ratelimits.models import Rule
from shop.models import Domain, Tenant

for name in ("public", "acme", "bolt"):
    Domain.objects.create(domain=f"{name}.localhost", tenant=Tenant.objects.create(schema_name=name), is_primary=True)
Rule.objects.create(name="few", key_kind="account", algorithm="fixed_window", capacity=2, period=3600)
client = Client()
for name in ("acme", "bolt"):
    print(name, *(client.get("/hello/", headers={"host": f"{name}.localhost"}).status_code for _ in range(3)))
connection.set_schema_to_public()
for command in ("seal", "drain", "verify"):
    call_command(f"ratelimits_{command}")
print("accounts", *sorted(set(Line.objects.values_list("account", flat=True))))
with connection.cursor() as cursor:
    cursor.execute("SELECT DISTINCT table_schema FROM information_schema.tables WHERE table_name LIKE 'ratelimits%'")
    print("tables in", cursor.fetchall())
"""


@pytest.fixture
def tenants(tmp_path: Path, servers: TestServers) -> Iterator[Project]:
    """Return a project with the settings of the page on installing, and a PostgreSQL of its own."""
    own = TestServers(servers.redis_kind, "postgres")
    try:
        project = Project(tmp_path, own)
        project.write("shop/models.py", SHOP)
        project.write("shop/callers.py", "def tenant_of(request):\n    return request.tenant.schema_name\n")
        project.write("orders/__init__.py", "")
        project.write("orders/models.py", ORDERS)
        settings: dict[str, Any] = {"MIDDLEWARE": ["ratelimits.middleware.QuotaMiddleware"], "RATELIMITS": {}}
        exec(snippet("TENANT_APPS").text, settings)
        project.settings["RATELIMITS"] |= {"FENCE": "none", **settings["RATELIMITS"]}
        project.settings |= {name: settings[name] for name in settings if name.isupper() and name != "RATELIMITS"}
        database = {**dj_database_url.parse(own.url_of_database("postgres")), "ENGINE": settings["ENGINE"]}
        project.settings |= {"DATABASES": {"default": database}, "ALLOWED_HOSTS": [".localhost"]}
        yield project
    finally:
        own.stop()


@pytest.mark.system
def test_the_tenants_of_django_tenants_share_the_tables(tenants: Project) -> None:
    """.ci/requirements.txt installs django-tenants."""
    tenants.manage("makemigrations", "shop", "orders")
    assert "no issues" in tenants.manage("check")
    tenants.manage("migrate_schemas", "--shared")
    printed = tenants.python(TENANTS).splitlines()
    assert {"acme 200 200 429", "bolt 200 200 429", "accounts acme bolt", "tables in [('public',)]"} <= set(printed)
    assert "No errors were found." in printed
    tenants.manage("migrate_schemas")  # also of the tenants


@pytest.mark.system
def test_tables_for_each_tenant_are_refused(tenants: Project) -> None:
    tenants.settings["TENANT_APPS"] = [*tenants.settings["TENANT_APPS"], "ratelimits"]
    for command in (["check"], ["migrate_schemas"], ["migrate_schemas", "--skip-checks"]):
        printed = tenants.manage(*command, fails=True)
        assert "The settings give each tenant its own tables of ratelimits, but" in printed
        assert "E005" not in printed
