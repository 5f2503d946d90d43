from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from django.test import override_settings

from ratelimits.embedded import EmbeddedServer
from ratelimits.engine.server import current_server
from ratelimits.engine.transport.connection import read_run
from ratelimits.usage.ledger import fence as fencing
from ratelimits.usage.ledger.drain import drain
from ratelimits.usage.ledger.fence import NotFencedError, check_server, fence
from ratelimits.usage.ledger.seal import seal
from ratelimits.usage.models import Batch
from tests.support.eventually import until
from tests.support.plain import PLAIN
from tests.support.servers import TestServers, server_binary
from tests.support.usage.power import is_written, stalled_disk, unwritten, wait_for_fsync
from tests.support.usage.traffic import use

pytestmark = pytest.mark.django_db(transaction=True)


def wait_for_fence(max_wait: float = 5) -> str:
    server = current_server()
    return fence(server, read_run(server.wire.client), max_wait)


@pytest.fixture
def everysec_client(everysec_server: EmbeddedServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(everysec_server.url) as client:
        yield client


@contextmanager
def writes_without_end(server: EmbeddedServer, sockets: int = 3) -> Iterator[None]:
    """Keep sending more writes than the server has taken, so that every turn of its loop has writes to append."""
    with ExitStack() as stack:
        opened = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(sockets)]

        def write(connection: socket.socket) -> None:
            try:
                while True:
                    connection.sendall(b"INCR n\r\n" * 5000)
            except OSError:
                return

        def read(connection: socket.socket) -> None:
            try:
                while connection.recv(1 << 20):
                    pass
            except OSError:
                return

        threads = [threading.Thread(target=work, args=(one,)) for one in opened for work in (write, read)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            for one in opened:
                one.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()


def test_the_fence_waits_for_the_fsync_and_tells_the_policy(everysec_server: EmbeddedServer) -> None:
    assert wait_for_fence() == "everysec"


def test_the_fence_comes_however_much_is_written_meanwhile(everysec_server: EmbeddedServer) -> None:
    with writes_without_end(everysec_server):
        assert [wait_for_fence() for _ in range(2)] == ["everysec"] * 2


def test_what_is_acknowledged_and_not_yet_in_the_file_is_waited_for(
    everysec_server: EmbeddedServer, everysec_client: redis.Redis
) -> None:
    with stalled_disk(everysec_server):
        key = unwritten(everysec_server, everysec_client)
        with pytest.raises(NotFencedError, match="did not fsync in time"):
            wait_for_fence(max_wait=3)  # after which the server stops waiting, and writes
    assert wait_for_fence() == "everysec"
    assert is_written(everysec_server, key)


def test_what_was_written_before_every_write_was_fsynced_is_fsynced_too(
    everysec_server: EmbeddedServer, everysec_client: redis.Redis
) -> None:
    wait_for_fsync(everysec_server, everysec_client)
    everysec_client.set("n", 1)
    everysec_client.config_set("appendfsync", "always")
    written = everysec_client.info()["aof_current_size"]
    assert wait_for_fence() == "always"
    # Redis 6.2 fsyncs earlier writes only together with the next write.
    assert everysec_client.info()["aof_current_size"] > written


def test_what_a_rewrite_of_the_file_leaves_to_be_fsynced_is_waited_for(
    everysec_server: EmbeddedServer, everysec_client: redis.Redis
) -> None:
    for _ in range(20):
        wait_for_fsync(everysec_server, everysec_client)
        with stalled_disk(everysec_server):
            everysec_client.set("n", 1)
            everysec_client.bgrewriteaof()
            # The server does not report the fsync of the old file; it would report an ordinary fsync that began before.
            hidden = not everysec_client.info()["aof_pending_bio_fsync"]
            if hidden:
                with pytest.raises(NotFencedError, match="did not fsync in time"):
                    wait_for_fence(max_wait=3)
        assert wait_for_fence() == "everysec"
        if hidden:
            return
    pytest.fail("the rewrite always came behind an fsync")


def test_a_rewrite_that_begins_while_the_fence_waits_is_waited_for_too(
    everysec_server: EmbeddedServer, everysec_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = fencing._write_key

    def mark_and_rewrite(connection: redis.Redis, key: str) -> None:
        mark(connection, key)
        if not rewritten:
            rewritten.append(connection.bgrewriteaof())

    rewritten: list[object] = []
    monkeypatch.setattr(fencing, "_write_key", mark_and_rewrite)
    wait_for_fsync(everysec_server, everysec_client)
    with stalled_disk(everysec_server), pytest.raises(NotFencedError, match="did not fsync in time"):
        wait_for_fence(max_wait=3)
    assert rewritten
    assert wait_for_fence() == "everysec"


def test_a_server_without_memory_is_fenced_all_the_same(
    everysec_server: EmbeddedServer, everysec_client: redis.Redis
) -> None:
    wait_for_fence()
    everysec_client.config_set("maxmemory", 1)
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        everysec_client.set("n", 0)
    assert wait_for_fence() == "everysec"


def test_with_every_write_fsynced_there_is_nothing_to_wait_for(always_server: EmbeddedServer) -> None:
    assert wait_for_fence() == "always"


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [("appendfsync", "no", "set it to everysec or always"), ("appendonly", "no", "set appendonly yes")],
)
def test_a_server_that_may_forget_is_refused_with_what_to_do(
    everysec_server: EmbeddedServer, option: str, value: str, message: str
) -> None:
    with redis.Redis.from_url(everysec_server.url) as client:
        client.config_set(option, value)
    use()
    seal()
    with pytest.raises(NotFencedError, match=message):
        drain()
    assert not Batch.objects.exists()


def test_without_a_fence_the_batch_says_that_there_was_none(everysec_server: EmbeddedServer) -> None:
    with redis.Redis.from_url(everysec_server.url) as client:
        client.config_set("appendonly", "no")
    use()
    seal()
    with override_settings(RATELIMITS={**PLAIN, "FENCE": "none"}):
        drain()
    assert Batch.objects.get().fence == "none"


def test_what_was_read_under_another_run_is_not_fenced(always_server: EmbeddedServer) -> None:
    server = current_server()
    run = read_run(server.wire.client)
    always_server.kill()
    always_server.start()
    with pytest.raises(NotFencedError, match="restarted or replaced"):
        fence(server, run)


def fenced_by(fence: str, **more: object) -> Any:
    return override_settings(RATELIMITS={**PLAIN, "FENCE": fence, **more})


def test_the_server_says_itself_that_it_has_fsynced(everysec_server: EmbeddedServer, servers: TestServers) -> None:
    with fenced_by("waitaof"):
        if servers.redis_kind == "redis6":
            with pytest.raises(NotFencedError, match=r"does not have WAITAOF.*RATELIMITS\['FENCE'\]"):
                wait_for_fence()
            return
        assert wait_for_fence() == "waitaof"
        with stalled_disk(everysec_server), pytest.raises(NotFencedError, match="did not fsync in time"):
            wait_for_fence(max_wait=1)
        with redis.Redis.from_url(everysec_server.url) as client:
            client.config_set("appendonly", "no")
        with pytest.raises(NotFencedError, match="keeps no append-only file"):
            wait_for_fence()


def test_replicas_have_what_is_drained(everysec_server: EmbeddedServer, servers: TestServers, tmp_path: Path) -> None:
    with fenced_by("wait"):
        with pytest.raises(NotFencedError, match=r"fewer than 1 replicas.*FENCE_REPLICAS"):
            wait_for_fence(max_wait=0)
        replica = EmbeddedServer(tmp_path / "replica", binary=server_binary(servers.redis_kind))
        try:
            with redis.Redis(port=replica.port) as client:
                client.replicaof("127.0.0.1", everysec_server.port)
                until(lambda: client.info("replication")["master_link_status"] == "up", "the replica follows")
            assert wait_for_fence(max_wait=60) == "wait-1"
            server = current_server()
            assert check_server(server, read_run(server.wire.client)) == "wait-1"
        finally:
            replica.stop()


def test_a_window_is_no_fence_if_the_server_restarts_in_it(
    always_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def restart(_seconds: float) -> None:
        always_server.kill()
        always_server.start()

    with fenced_by("window"):
        server = current_server()
        run = read_run(server.wire.client)
        monkeypatch.setattr(fencing, "time", SimpleNamespace(sleep=restart, monotonic=time.monotonic))
        # The connection has ended too. Behind a proxy it lives on, and shows another run.
        with pytest.raises((NotFencedError, redis.ConnectionError)):
            fence(server, run)
