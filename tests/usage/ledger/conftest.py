from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from django.test import override_settings

from ratelimits.embedded import EmbeddedServer
from tests.support.servers import TestServers, server_binary


@pytest.fixture(autouse=True)
def _at_once(fsync_at_once: None) -> None:
    """Have the server fsync at once, so that no test waits for the fence."""


@pytest.fixture
def always_server(servers: TestServers, tmp_path: Path) -> Iterator[EmbeddedServer]:
    """Start a server for this test that may be killed, with every write fsynced; the engine uses it."""
    yield from _own(servers, tmp_path, "always")


@pytest.fixture
def everysec_server(servers: TestServers, tmp_path: Path) -> Iterator[EmbeddedServer]:
    """Start the same server with one fsync a second."""
    yield from _own(servers, tmp_path, "everysec")


def _own(servers: TestServers, path: Path, fsync: str) -> Iterator[EmbeddedServer]:
    options = {"appendfsync": fsync}
    server = EmbeddedServer(path / "redis", aof=True, binary=server_binary(servers.redis_kind), options=options)
    try:
        with on_server(server):
            yield server
    finally:
        server.stop()


def on_server(server: EmbeddedServer) -> Any:
    """Point the app's cache alias to this server."""
    return override_settings(
        CACHES={
            name: {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": f"{server.url[:-1]}{number}"}
            for number, name in enumerate(("ratelimits", "default"))
        }
    )


@pytest.fixture
def worker_environment(servers: TestServers, always_server: EmbeddedServer, transactional_db: None) -> dict[str, str]:
    """Return the environment for other processes to work on the test's own server and database."""
    return {
        **os.environ,
        "REDIS_URL": always_server.url,
        "DATABASE_URL": servers.url_of_database(str(connection.settings_dict["NAME"])),
        "DJANGO_SETTINGS_MODULE": "tests.settings",
    }
