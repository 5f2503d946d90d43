"""Test the tools in a project: the snippets of docs/testing.md, word for word, without a server that runs."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from ratelimits.embedded import free_port
from tests.support.fresh import ROOT, Project
from tests.support.servers import TestServers

_PAGE = (ROOT / "docs/testing.md").read_text()
SNIPPETS = dict(re.findall(r"^```python\n# (shop/\S+)\n(.*?)^```", _PAGE, re.MULTILINE | re.DOTALL))
(INI,) = (textwrap.dedent(block) for block in re.findall(r"^ +```ini\n(.*?)^ +```", _PAGE, re.MULTILINE | re.DOTALL))
#: As if the app were installed with pip, whose entry point names the plugin.
_PYTEST = [
    "-m",
    "pytest",
    "-q",
    "-p",
    "ratelimits.pytest_plugin",
    "-p",
    "no:randomly",
    "-p",
    "no:asyncio",
    "-W",
    "error",
]


@pytest.fixture
def project(tmp_path: Path, servers: TestServers) -> Project:
    """Return a project with the snippets. Nothing listens at the address of its tests' Redis database."""
    made = Project(tmp_path, servers)
    default: dict[str, Any] = made.settings["DATABASES"]["default"]
    default["TEST"] = {"MIGRATE": False}
    made.write("pytest.ini", INI.replace("shop.settings", "settings"))
    for path in ("shop/tests.py", "shop/test_hello.py"):
        made.write(path, SNIPPETS[path])
    settings = (tmp_path / "settings.py").read_text() + SNIPPETS["shop/settings.py"]
    made.write("settings.py", settings.replace("127.0.0.1:6379", f"127.0.0.1:{free_port()}"))
    return made


@pytest.fixture(autouse=True)
def _site_untouched(project: Project, redis_client: redis.Redis) -> Iterator[None]:
    """Look that nothing was written to the Redis database of the site, which the tests' own database replaces."""
    yield
    assert redis_client.dbsize() == 0


def test_the_page_has_all_snippets() -> None:
    assert list(SNIPPETS) == ["shop/settings.py", "shop/tests.py", "shop/test_hello.py", "shop/test_signed_in.py"]


def test_under_djangos_runner(project: Project) -> None:
    assert "Ran 2 tests" in (said := project.manage("test", "--noinput", "shop.tests")), said
    assert "OK" in said


def test_under_pytest(project: Project) -> None:
    assert "5 passed" in project.run(*_PYTEST, "shop")


def test_signed_in_users_and_tokens(project: Project) -> None:
    framework = "rest_framework.authentication"
    apps = ["django.contrib.sessions", "rest_framework.authtoken"]
    added = f"""
INSTALLED_APPS += {apps}
MIDDLEWARE += [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
]
REST_FRAMEWORK["DEFAULT_AUTHENTICATION_CLASSES"] = [
    "{framework}.SessionAuthentication",
    "{framework}.TokenAuthentication",
]
del REST_FRAMEWORK["UNAUTHENTICATED_USER"]
"""
    project.write("settings.py", (project.directory / "settings.py").read_text() + added)
    project.write("shop/test_signed_in.py", SNIPPETS["shop/test_signed_in.py"])
    assert "3 passed" in project.run(*_PYTEST, "shop/test_signed_in.py")


def test_under_pytest_in_two_processes(project: Project) -> None:
    assert "5 passed" in project.run(*_PYTEST, "-n", "2", "shop")
