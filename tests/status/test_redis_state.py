from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import connection

from ratelimits.conf import DEFAULTS
from ratelimits.engine.server import publish_version
from ratelimits.status.redis_state import read_redis
from ratelimits.usage.ledger.seal import seal
from tests.support.engine.proxy import Proxy
from tests.support.entry_points import away, short_timeout
from tests.support.raw import RawRedis
from tests.support.servers import TestServers
from tests.support.usage.traffic import use

#: The time that a server may add to the page; half of it again is for a busy machine.
BOUND = DEFAULTS["TIMEOUT"] * 1.5


@contextmanager
def dripping() -> Iterator[int]:
    """Yield the port of a server that never stops to answer, a byte at a time, so that no wait for a byte is long."""
    ended = threading.Event()

    def drip(client: socket.socket) -> None:
        with client:
            while not ended.wait(0.02):
                try:
                    client.sendall(b"+")
                except OSError:
                    return

    def accept() -> None:
        while True:
            try:
                client, _address = listener.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=drip, args=(client,)))
            threads[-1].start()

    threads: list[threading.Thread] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            yield listener.getsockname()[1]
        finally:
            ended.set()
            listener.shutdown(socket.SHUT_RDWR)
            for thread in (accepting, *threads):
                thread.join()


@pytest.mark.django_db
def test_a_server_that_answers_is_described(redis_client: RawRedis) -> None:
    publish_version(7)
    use("acme", configuration=7)
    seal()
    use("acme", configuration=7)
    use("other", configuration=7)
    state = read_redis()
    (server,) = state.servers
    assert state.answers
    assert state.error == ""
    assert (server.version, server.open, server.sealed) == (7, 2, 1)
    assert (server.said.policy, server.said.aof, server.said.aof_written) == ("noeviction", True, True)
    assert (server.said.memory or 0) > 100_000
    assert server.said.max_memory == 0


def test_a_server_that_hangs_takes_no_longer_than_timeout(settings: Any, servers: TestServers) -> None:
    with short_timeout(settings), Proxy(servers.redis.port) as proxy:
        proxy.hold()
        away(settings, proxy.port)
        states = [read_redis() for _ in range(3)]
    assert not any(state.answers or state.servers for state in states)
    assert all(state.error for state in states)
    assert min(state.seconds for state in states) < BOUND


def test_a_server_that_hangs_after_connecting_takes_no_longer_either(settings: Any, servers: TestServers) -> None:
    with short_timeout(settings), Proxy(servers.redis.port) as proxy:
        away(settings, proxy.port)
        assert read_redis().answers
        proxy.hold()
        states = [read_redis() for _ in range(3)]
    assert not any(state.answers for state in states)
    assert min(state.seconds for state in states) < BOUND


def test_a_server_that_answers_byte_by_byte_takes_no_longer_either(settings: Any) -> None:
    with short_timeout(settings), dripping() as port:
        away(settings, port)
        state = min((read_redis() for _ in range(3)), key=lambda each: each.seconds)
    assert (state.answers, state.error) == (False, "no answer within 0.25 s")
    assert state.seconds < BOUND


def test_a_server_that_refuses_connections_is_named(settings: Any) -> None:
    away(settings, 1)
    state = read_redis()
    assert not state.answers
    assert state.error.startswith("ConnectionError: ")


def test_threads_that_ask_need_no_database() -> None:
    with connection.execute_wrapper(lambda *args: pytest.fail("a query")):
        assert read_redis().answers
