from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from ratelimits.embedded import EmbeddedServer, ServerStartError


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    server = EmbeddedServer(tmp_path / "server", aof=True, options={"appendfsync": "always"})
    yield server
    server.stop()


def test_what_was_written_survives_a_crash_when_every_write_is_kept(server: EmbeddedServer) -> None:
    with redis.Redis.from_url(server.url) as client:
        client.set("k", "v")
    server.kill()
    server.start()
    with redis.Redis.from_url(server.url) as client:
        assert client.get("k") == b"v"


def test_a_stopped_server_leaves_no_process(server: EmbeddedServer) -> None:
    server.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(server.process.pid, 0)


def test_a_server_that_cannot_start_says_why(server: EmbeddedServer, tmp_path: Path) -> None:
    with pytest.raises(ServerStartError, match=r"(?i)address already in use"):
        EmbeddedServer(tmp_path / "second", port=server.port, options={"logfile": "log"})
