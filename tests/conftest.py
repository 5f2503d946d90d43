from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import django
import pytest
import redis
from asgiref.sync import SyncToAsync
from django.conf import settings
from django.core.management import get_commands
from django.db import connection, connections
from django.utils import translation
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings

from tests.support import forked
from tests.support.below import SITE, serve_below_site
from tests.support.eventually import until
from tests.support.garbage import collect_garbage, collect_rarely
from tests.support.servers import TestServers

collect_rarely()
# This is not a fixture, because Django's settings name the servers and test modules import models. For the same
# reason pyproject.toml does not name the settings: pytest-django would read them before this file.
if settings.configured:
    raise pytest.UsageError("Unset DJANGO_SETTINGS_MODULE: the tests bring settings of their own.")
# Otherwise each of the hundred processes that tests start would compile the project again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
_SERVERS = TestServers(
    redis=os.environ.get("RATELIMITS_TEST_SERVER", "valkey"),
    database=os.environ.get("RATELIMITS_TEST_DATABASE", "sqlite"),
)
os.environ.update(_SERVERS.environment)
# Each worker of pytest-xdist has its own servers here, so the app need not separate the keys of workers.
os.environ.pop("PYTEST_XDIST_WORKER", None)
django.setup()
# How long an example takes says how busy the machine is, not whether the code is right.
hypothesis_settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
hypothesis_settings.load_profile("any machine")

#: Fixtures that several directories use. They are modules, because they need models.
pytest_plugins = ["tests.support.selection", "tests.support.reading", "tests.support.usage.quarantine"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--screenshots", metavar="DIR", help="write pictures of the admin's pages into this folder")
    parser.addoption("--reliability", metavar="FILE", help="write the table of tests/chaos into this page")
    parser.addoption("--runtimes", metavar="FILE", help="write the table of tests/runtimes into this page")
    parser.addoption("--crashes", type=int, help="how many crashes, or power cuts, a test of them makes")
    parser.addoption("--crash-seed", type=int, help="what the crashes are drawn from; default: the same ones again")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """Let each worker process of pytest-xdist start its own servers, as this process did."""
    os.environ.pop("DJANGO_SETTINGS_MODULE", None)


@pytest.fixture(scope="session")
def django_db_setup(django_db_setup: None, django_db_blocker: Any) -> Iterator[None]:
    """Drop the test database only when its thread of async code and all ended processes have left it."""
    yield
    if connection.vendor != "postgresql":
        return
    # The thread in which asgiref runs queries of async tests keeps its connection, and does not end.
    SyncToAsync.single_thread_executor.submit(connections.close_all).result()
    with django_db_blocker.unblock(), connection.cursor() as cursor:
        try:
            until(lambda: not _other_sessions(cursor), "the last sessions of ended processes", pause=0.2)
        except AssertionError:
            pytest.fail(f"These sessions do not leave the test database: {_other_sessions(cursor)}")


def _other_sessions(cursor: Any) -> list[Any]:
    cursor.execute(
        "SELECT pid, state, query FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    return list(cursor.fetchall())


def pytest_unconfigure() -> None:
    forked.end()
    _SERVERS.stop()


def pytest_report_header() -> str:
    with redis.Redis.from_url(_SERVERS.redis.url) as client:
        info = client.info("server")
    version = info.get("valkey_version") or info["redis_version"]
    return f"server: {_SERVERS.redis_kind} {version}; database: {_SERVERS.database_kind}"


def pytest_collection_finish() -> None:
    """Hide objects that stay for the whole session from the garbage collector: each collection of them takes 0.3 s."""
    collect_garbage()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the session if a test was skipped, because nobody ran it."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and reporter.stats.get("skipped") and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session", autouse=True)
def _tests_are_announced() -> None:
    """Do what the app's plugin for pytest does, where pip has not installed the app."""
    from ratelimits.testing import prepare_tests

    prepare_tests()


@pytest.fixture(scope="session", autouse=True)
def _script_name() -> None:
    """Send the requests of all tests below a path, if the project is served there (`nox -s below`)."""
    if SITE:
        serve_below_site()


@pytest.fixture(scope="session")
def servers() -> TestServers:
    """Return the real servers of this session."""
    return _SERVERS


@pytest.fixture(scope="session", autouse=True)
def _quick_flush() -> None:
    """Let Django empty the tables after a test by a command that keeps the rows made by migrations."""
    from tests.support.database import Flush, keep_connections

    get_commands()["flush"] = Flush()  # type: ignore[assignment]
    keep_connections()


@pytest.fixture(scope="session")
def redis_url(servers: TestServers) -> str:
    """Return the URL of the session's server, database 0."""
    return servers.redis.url


@pytest.fixture
def redis_client(redis_url: str) -> Iterator[redis.Redis]:
    """Return a plain client of the database with the limits; its answers are bytes."""
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture(scope="session")
def _steward(redis_url: str) -> Iterator[redis.Redis]:
    """Return the client that makes the server ready for each test; to make a client takes longer than its work."""
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture(autouse=True)
def _restored_settings() -> Iterator[None]:
    """Fail a test that leaves settings to later tests: the last change of settings must be the first to end."""
    current: Any = settings
    before = current._wrapped
    yield
    assert current._wrapped is before


@pytest.fixture(autouse=True)
def _restored_language() -> Iterator[None]:
    """Restore the language after a test: `LocaleMiddleware` leaves the language of the last request active."""
    yield
    translation.deactivate()


@pytest.fixture(autouse=True)
def _empty_server(_steward: redis.Redis) -> None:
    """Give every test an empty server, and a process that has nothing left to send, and has decorated no function."""
    from ratelimits import logs, unknown_names
    from ratelimits.engine import memory
    from ratelimits.engine.server import breaker, isolate
    from ratelimits.engine.transport.breaker import prober
    from ratelimits.quota import costs, from_memory

    isolate("")  # a test that was rolled back had its own keys
    logs.forget()
    unknown_names.forget_decorators()
    memory.forget()
    breaker.succeeded()
    with prober._lock:
        prober._watched.clear()  # nobody waits any more for a server of an earlier test
    costs.forget_meters()
    from_memory.denials.clear()
    from_memory.sender.flush()  # after what its thread was just sending
    _steward.flushall()


@pytest.fixture(autouse=True)
def _few_scripts() -> None:
    """Let a test find room for new scripts: the tests of a worker together make more than the maximum."""
    from ratelimits.engine.assemble import _MAX_SCRIPTS, assembled

    if assembled.cache_info().currsize > _MAX_SCRIPTS // 2:
        assembled.cache_clear()


@pytest.fixture
def fsync_at_once(_steward: redis.Redis) -> Iterator[None]:
    """Have the session's server fsync every write during the test, so that it does not wait for the fence."""
    _steward.config_set("appendfsync", "always")
    yield
    _steward.config_set("appendfsync", "everysec")


@pytest.fixture
def no_bills(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the floor of bills install nothing during the test."""
    from ratelimits import as_code
    from ratelimits.admin.operate.confirming import AsksBeforeSaving
    from ratelimits.billing import status as billed
    from ratelimits.status import additions
    from ratelimits.usage import erasure
    from ratelimits.usage.ledger.bills import Bills, bills

    for function in fields(Bills):
        monkeypatch.setattr(bills, function.name, function.default)
    monkeypatch.setattr(AsksBeforeSaving, "compare_bills", None)
    monkeypatch.delitem(as_code.parts, "prices")
    # Other modules have these two by name.
    added, parts = [*additions.registered], {*erasure.PARTS}
    additions.registered.remove(billed.ADDITIONS)
    erasure.PARTS.clear()
    yield
    additions.registered[:] = added
    erasure.PARTS.update(parts)


@pytest.fixture(scope="session")
def long_run(pytestconfig: pytest.Config) -> bool:
    """Return whether long suites run in full (`--long`) or as a sample with a fixed seed."""
    return bool(pytestconfig.option.long)


@pytest.fixture
def crashes(pytestconfig: pytest.Config, long_run: bool) -> Callable[[int, int], int]:
    """Return a function of two numbers of crashes, for a sample and in full; `--crashes` gives another number."""
    asked: int | None = pytestconfig.option.crashes
    return lambda sample, full: asked or (full if long_run else sample)


@pytest.fixture
def crash_seed(pytestconfig: pytest.Config) -> int:
    """Return the seed of the random crashes."""
    asked: int | None = pytestconfig.option.crash_seed
    return 20261 if asked is None else asked


@pytest.fixture(params=["check", "acheck"])
def check(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Return `quota.check`, then its async version."""
    from ratelimits.quota import checking

    if request.param == "check":
        return checking.check
    return lambda *args, **more: asyncio.run(checking.acheck(*args, **more))
