from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import redis

from tests.servers import DATABASES, REDIS_SERVERS, TestServers

servers_key = pytest.StashKey[TestServers]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ratelimits")
    group.addoption(
        "--redis-server",
        choices=REDIS_SERVERS,
        default=os.environ.get("RATELIMITS_TEST_SERVER", "valkey"),
        help="the server to decide on (default: RATELIMITS_TEST_SERVER, else valkey)",
    )
    group.addoption(
        "--test-database",
        choices=DATABASES,
        default=os.environ.get("RATELIMITS_TEST_DATABASE", "sqlite"),
        help="the database to bill from (default: RATELIMITS_TEST_DATABASE, else sqlite)",
    )
    group.addoption("--long", action="store_true", help="run the long suites in full")


def pytest_configure(config: pytest.Config) -> None:
    """Start the servers and name them to Django before anything reads its settings."""
    if config.option.collectonly or config.option.help:
        redis_url, database_url, name = "redis://127.0.0.1:1/0", "sqlite://", ":memory:"
    else:
        servers = TestServers(config.option.redis_server, config.option.test_database)
        config.stash[servers_key] = servers
        redis_url, database_url = servers.redis.url, servers.database_url
        name = str(servers.directory / "test.sqlite3") if config.option.test_database == "sqlite" else "test"
        os.environ["DEMO_DATA_DIR"] = str(servers.directory)
    os.environ["REDIS_URL"] = redis_url
    os.environ["DATABASE_URL"] = database_url
    os.environ["RATELIMITS_TEST_DATABASE_NAME"] = name
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"

    import django

    django.setup()


def pytest_unconfigure(config: pytest.Config) -> None:
    if servers_key in config.stash:
        config.stash[servers_key].stop()


def pytest_report_header(config: pytest.Config) -> list[str]:
    if servers_key not in config.stash:
        return []
    servers = config.stash[servers_key]
    with redis.Redis.from_url(servers.redis.url) as client:
        info = client.info("server")
    version = info.get("valkey_version") or info["redis_version"]
    return [f"server: {servers.redis_kind} {version}; database: {config.option.test_database}"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the long tests out (deselected, never skipped) unless they were asked for."""
    if config.option.long:
        return
    long = [item for item in items if item.get_closest_marker("long")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if not item.get_closest_marker("long")]


@pytest.fixture(scope="session")
def servers(pytestconfig: pytest.Config) -> TestServers:
    """The real servers of this session."""
    return pytestconfig.stash[servers_key]


@pytest.fixture(scope="session")
def redis_url(servers: TestServers) -> str:
    """Where the session's server answers, database 0."""
    return servers.redis.url


@pytest.fixture
def redis_client(redis_url: str) -> Iterator[redis.Redis]:
    """A plain client on the database that the limits live in; answers are bytes."""
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture(autouse=True)
def _empty_server(redis_url: str) -> None:
    """Every test meets an empty server."""
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()


@pytest.fixture(scope="session")
def long_run(pytestconfig: pytest.Config) -> bool:
    """Whether suites with a size run in full (`--long`) or as their fixed-seed sample."""
    return bool(pytestconfig.option.long)
