"""Test the recipes of docs/requests/who.md with the packages themselves, each file in a project with their tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fresh import ROOT, Project
from tests.support.own_apps import OWN
from tests.support.servers import TestServers

#: The tests make tables without migrations. Nothing of this repository's own test session is loaded.
_PLUGINS = ["-p", "ratelimits.pytest_plugin", "-p", "no:randomly", "-p", "no:asyncio"]
_PYTEST = ["-m", "pytest", "-q", "--nomigrations", *_PLUGINS, "-W", "error"]


def run(folder: Path, servers: TestServers, recipes: str, *apps: str) -> str:
    """Run the tests in a file of this folder, in a project with these apps; return what pytest prints."""
    project = Project(folder, servers)
    contrib = [f"django.contrib.{name}" for name in ("auth", "contenttypes", "sessions")]
    project.settings |= {
        "INSTALLED_APPS": [
            *contrib,
            "rest_framework",
            *apps,
            "simple_history",
            *OWN,
            "tests.identity.shop",
        ],
        "REST_FRAMEWORK": {"DEFAULT_THROTTLE_CLASSES": ["ratelimits.throttling.QuotaThrottle"], "NUM_PROXIES": 0},
        "ALLOWED_HOSTS": ["testserver"],
        "SECRET_KEY": "a key that is long enough for a JWT",
    }
    project.write("pytest.ini", "[pytest]\n")
    project.write("test_recipes.py", (ROOT / "tests" / "identity" / recipes).read_text())
    return project.run(*_PYTEST, "test_recipes.py")


def test_the_recipes_work(tmp_path: Path, servers: TestServers) -> None:
    apps = ("rest_framework.authtoken", "knox", "rest_framework_api_key")
    assert "12 passed" in run(tmp_path, servers, "recipes.py", *apps)


@pytest.mark.system
def test_the_recipe_of_oauth_works(tmp_path: Path, servers: TestServers) -> None:
    """.ci/requirements.txt installs django-oauth-toolkit: it needs cryptography, which is large."""
    assert "1 passed" in run(tmp_path, servers, "oauth_recipes.py", "oauth2_provider")
