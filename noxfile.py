"""Test with the lowest and with the newest versions of packages: the ends of the ranges in pyproject.toml.

`nox` runs all sessions except `audit`. `nox --list` lists the sessions. Each session installs the packages into a new
environment. Arguments after `--` are given to pytest instead of TESTS.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import nox

nox.options.default_venv_backend = "uv|virtualenv"
#: Tests of everything that depends on the versions of other packages. They take one or two minutes.
TESTS = (
    "tests/usage/alerts/test_deliver.py",
    "tests/usage/api/test_access.py",
    "tests/checks",
    "tests/engine/test_decide.py",
    "tests/engine/transport",
    "tests/models/test_rules.py",
    "tests/ninja",
    "tests/outbound",
    "tests/telemetry",
    "tests/test_decorators.py",
    "tests/throttling",
    "tests/usage/ledger/test_drain.py",
    "tests/admin/test_rules.py",
    "tests/admin/test_lists.py",
)
_PROJECT = tomllib.loads((Path(__file__).parent / "pyproject.toml").read_text())["project"]


def _floors() -> list[str]:
    """Return DRF, Celery and the packages that the app needs, each with its lowest version, as `name==version`."""
    optional = _PROJECT["optional-dependencies"]
    return [
        "==".join(found.groups())
        for line in (*_PROJECT["dependencies"], *optional["drf"], *optional["celery"])
        if (found := re.match(r"([\w-]+)>=([\w.]+)", line))
    ]


def _test(session: nox.Session, *constraints: str) -> None:
    session.install("-r", "requirements.txt", *constraints)
    session.run("python", "-m", "django", "--version")
    session.run("python", "-m", "pytest", "-q", "-n", "2", "-m", "not slow and not system", *(session.posargs or TESTS))


def _test_everywhere(session: nox.Session, **environment: str) -> None:
    """Run all fast tests, and the tests of the admin's pages, in a project whose settings follow the environment."""
    session.install("-r", "requirements.txt")
    session.env.update(environment)
    run = ("python", "-m", "pytest", "-q", "-n", "2")
    session.run(*run, "-m", "not slow and not system", *(session.posargs or ["tests"]))
    if not session.posargs:
        session.run(*run, *(f"tests/admin/test_{name}.py" for name in ("access", "lists", "forms")))


@nox.session(python="3.11")
def floor(session: nox.Session) -> None:
    """Test the lowest version of each package that `_floors` lists."""
    # From 5.7, the Redis broker of kombu needs redis 6.1. This session tests an older redis.
    _test(session, *_floors(), "kombu<5.7")
    if not session.posargs:
        # The lowest version for a cluster.
        session.install("redis==6.0.0")
        session.run("python", "-m", "pytest", "-q", "tests/end_to_end/test_cluster.py")


@nox.session(python="3.12")
@nox.parametrize("django", ["5.2", "6.0", "6.1"])
def versions(session: nox.Session, django: str) -> None:
    """Test one version of Django, with the newest version of each other package."""
    _test(session, f"Django~={django}.0")


@nox.session(python="3.13")
def ceiling(session: nox.Session) -> None:
    """Test the newest version of each package."""
    _test(session, "--upgrade")


@nox.session(python="3.11")
@nox.parametrize("missing", ["admin", "drf", "celery", "billing", "usage", "usage and the admin", "everything"])
def without(session: nox.Session, missing: str) -> None:
    """Use the app in a small project that does not have one of its optional parts. The package is not installed."""
    extras = [extra for extra in ("drf", "celery") if missing not in (extra, "everything")]
    session.install(f".[{','.join([*extras, 'embedded'])}]")
    folder, root = Path(session.create_tmp()).resolve(), Path(__file__).resolve().parent
    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(folder / "site.sqlite3")}
    (folder / "site.sqlite3").unlink(missing_ok=True)
    with session.chdir(folder):
        program = ("python", "-W", "error", "-m", "tests.without.site", missing, json.dumps(database), "")
        session.run(*program, env={"PYTHONPATH": str(root)})


@nox.session(python="3.11")
def decide(session: nox.Session) -> None:
    """Use the throttles with rates in code in projects without the app in INSTALLED_APPS and without a database."""
    session.install(".[drf,embedded]", "adrf~=0.1.14")
    folder, root = Path(session.create_tmp()).resolve(), Path(__file__).resolve().parent
    with session.chdir(folder):
        for site in ("no apps", "usual apps"):
            program = ("python", "-W", "error", "-m", "tests.decide.site", site)
            session.run(*program, env={"PYTHONPATH": str(root)}, silent=True)


@nox.session(python="3.12")
def naive(session: nox.Session) -> None:
    """Run all fast tests, and the tests of the admin's pages, as in a project with `USE_TZ=False` west of UTC."""
    _test_everywhere(session, RATELIMITS_TEST_NAIVE="America/Los_Angeles")


@nox.session(python="3.12")
def below(session: nox.Session) -> None:
    """Run all fast tests, and the tests of the admin's pages, as in a project below a path (`FORCE_SCRIPT_NAME`)."""
    _test_everywhere(session, RATELIMITS_TEST_SCRIPT_NAME="/app")


@nox.session(default=False)
def audit(session: nox.Session) -> None:
    """Look up known vulnerabilities of all installed packages. Fail if one of the packages cannot be looked up."""
    session.install("-r", "requirements.txt", "pip-audit~=2.10")
    session.run("pip-audit", "--strict")
