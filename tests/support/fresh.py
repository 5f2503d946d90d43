"""A new Django project in its own folder, whose commands run in their own processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import dj_database_url

from tests.support import forked
from tests.support.servers import TestServers

ROOT = Path(__file__).resolve().parents[2]

_SETTINGS = """\
import json
from pathlib import Path

BASE_DIR = Path(__file__).resolve().parent
SECRET_KEY = "a test's"
USE_TZ = True
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = ["django.contrib.auth", "django.contrib.contenttypes", "rest_framework", "simple_history",
                  "ratelimits", "ratelimits.usage", "ratelimits.billing", "shop"]
ROOT_URLCONF = "urls"
MIDDLEWARE = ["ratelimits.middleware.QuotaMiddleware"]
REST_FRAMEWORK = {
    "DEFAULT_THROTTLE_CLASSES": ["ratelimits.throttling.QuotaThrottle"],
    "DEFAULT_AUTHENTICATION_CLASSES": [],
    "NUM_PROXIES": 0,
    "UNAUTHENTICATED_USER": None,
}
globals().update(json.loads((BASE_DIR / "settings.json").read_text()))
"""
_URLS = """\
from django.urls import path
from rest_framework.response import Response
from rest_framework.views import APIView


class Hello(APIView):
    def get(self, request):
        return Response({"hello": "world"})


urlpatterns = [path("hello/", Hello.as_view())]
"""
_MANAGE = """\
import os
import sys

os.environ["DJANGO_SETTINGS_MODULE"] = "settings"
from django.core.management import execute_from_command_line

execute_from_command_line(sys.argv)
"""

_EARLIER = """\
from importlib import import_module

# The app's first migration without the column `lasting`, as if a later migration had added it.
FIRST = import_module("ratelimits.migrations.0001_initial").Migration
LASTING = [
    (operation.name, *operation.fields.pop(place))
    for operation in FIRST.operations
    for place, (name, _) in enumerate(getattr(operation, "fields", []))
    if name == "lasting"
]
"""
_EARLIER_MIGRATIONS = {
    "__init__.py": _EARLIER,
    "0001_initial.py": "from earlier import FIRST as Migration\n",
    "0002_lasting.py": """\
from django.db import migrations

from earlier import LASTING


class Migration(migrations.Migration):
    dependencies = [("ratelimits", "0001_initial")]
    operations = [migrations.AddField(*column) for column in LASTING]
""",
}


class Project:
    """A project with one app, `shop`, and one view, `/hello/`, that QuotaThrottle guards."""

    def __init__(self, directory: Path, servers: TestServers, namespace: str = "fresh") -> None:
        self.directory, self.servers = directory, servers
        self.settings: dict[str, Any] = {
            "DATABASES": {"default": self.database("default")},
            "CACHES": {
                "ratelimits": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": servers.redis.url},
                "default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"},
            },
            "RATELIMITS": {"CACHE_ALIAS": "ratelimits", "NAMESPACE": namespace},
        }
        self.write("settings.py", _SETTINGS)
        self.write("urls.py", _URLS)
        self.write("manage.py", _MANAGE)
        self.write("shop/__init__.py", "")

    def database(self, name: str) -> dict[str, Any]:
        """Return the settings of a database: a SQLite file, or a PostgreSQL database named after the folder."""
        if self.servers.database_kind == "sqlite":
            return {"ENGINE": "django.db.backends.sqlite3", "NAME": str(self.directory / f"{name}.sqlite3")}
        url = self.servers.url_of_database("postgres")
        return {**dj_database_url.parse(url), "NAME": f"{self.directory.name}_{name}".replace("-", "_").lower()}

    def create_database(self, name: str) -> None:
        """Create the database; SQLite creates its file by itself."""
        if self.servers.database_kind == "postgres":
            import psycopg

            with psycopg.connect(self.servers.url_of_database("postgres"), autocommit=True) as connection:
                connection.execute(f'CREATE DATABASE "{self.database(name)["NAME"]}"')

    def add_earlier_version(self) -> None:
        """Let the tables of the app be made in two steps: those of an earlier version, then those of today."""
        for name, text in _EARLIER_MIGRATIONS.items():
            self.write(f"earlier/{name}", text)
        self.settings["MIGRATION_MODULES"] = {"ratelimits": "earlier"}

    def write(self, path: str, text: str) -> None:
        """Write a file of the project."""
        target = self.directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")

    def run(self, *arguments: str, fails: bool = False) -> str:
        """Run Python with these arguments in the project; return all its output."""
        self.write("settings.json", json.dumps(self.settings))
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("DJANGO", "PYTEST"))}
        done = forked.run(
            [sys.executable, "-W", "default::ResourceWarning", *arguments],
            cwd=self.directory,
            env={**environment, "PYTHONPATH": f"{self.directory}:{ROOT}", "DJANGO_SETTINGS_MODULE": "settings"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        assert (done.returncode != 0) is fails, done.stdout
        output: str = done.stdout
        return output

    def manage(self, *arguments: str, fails: bool = False) -> str:
        """Run a management command."""
        return self.run("manage.py", *arguments, fails=fails)

    def python(self, text: str) -> str:
        """Run a script after setting Django up."""
        self.write("script.py", f"import django\n\ndjango.setup()\n{text}")
        return self.run("script.py")
