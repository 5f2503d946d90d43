"""Test that a process notices by itself that its server is back, so that its first requests are counted."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ratelimits.answers.answer import Answer
from ratelimits.embedded import EmbeddedServer
from ratelimits.engine.server import breaker, current_server
from ratelimits.engine.transport.breaker import FAILURES, Breaker, prober
from ratelimits.engine.transport.connection import NotSent
from ratelimits.identity import Identity
from ratelimits.quota import checking
from ratelimits.status.fact import Level
from ratelimits.status.facts import facts
from tests.support.entry_points import away
from tests.support.eventually import until
from tests.support.rows import rule
from tests.support.servers import TestServers, server_binary

pytestmark = pytest.mark.django_db(transaction=True)

WHO = Identity("user:1", None, "account:acme", "ip:203.0.113.9")
REQUESTS = 10


@pytest.fixture
def server(settings: Any, tmp_path: Path, servers: TestServers) -> Iterator[EmbeddedServer]:
    """Start a server for the limits, which the test may kill."""
    started = EmbeddedServer(tmp_path / "redis", aof=True, binary=server_binary(servers.redis_kind))
    away(settings, started.port)
    rule("burst", capacity=1000)
    yield started
    breaker.succeeded()
    until(lambda: not prober.is_active(), "nobody asks any more")
    started.stop()


def opened(server: EmbeddedServer) -> None:
    """Kill the server, and ask until the breaker is open."""
    assert checking.check(WHO).decision is not None
    server.kill()
    for _ in range(FAILURES):
        assert checking.check(WHO).decision is None
    assert breaker.is_open


def probes() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ratelimits-probe"]


def test_an_idle_process_decides_its_first_requests_after_an_outage(server: EmbeddedServer) -> None:
    opened(server)
    server.start()
    until(lambda: not breaker.is_open, "the process noticed that its server is back")
    with ThreadPoolExecutor(REQUESTS) as pool:
        answers = list(pool.map(lambda _: checking.check(WHO), range(REQUESTS)))
    assert [answer.decision is not None for answer in answers] == [True] * REQUESTS


def test_an_idle_event_loop_does_too(server: EmbeddedServer) -> None:
    async def run() -> list[Answer]:
        assert (await checking.acheck(WHO)).decision is not None
        server.kill()
        for _ in range(FAILURES):
            assert (await checking.acheck(WHO)).decision is None
        server.start()
        await asyncio.to_thread(until, lambda: not breaker.is_open, "the process noticed")
        return await asyncio.gather(*(checking.acheck(WHO) for _ in range(REQUESTS)))

    assert [answer.decision is not None for answer in asyncio.run(run())] == [True] * REQUESTS


def test_one_thread_asks_while_the_server_is_away_and_ends_with_the_outage(server: EmbeddedServer) -> None:
    opened(server)
    for _ in range(20):
        assert checking.check(WHO).decision is None
    assert len(probes()) == 1
    server.start()
    until(lambda: not probes(), "the thread has ended")
    assert not breaker.is_open
    opened(server)
    assert len(probes()) == 1
    server.start()
    until(lambda: not probes(), "the thread has ended again")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_of_a_process_whose_breaker_is_open_asks_by_itself(server: EmbeddedServer) -> None:
    opened(server)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            # The child has no thread yet. So one request may try, and begins the thread.
            assert not prober.is_active()
            until(lambda: checking.check(WHO).decision is None and prober.is_active(), "the child asks")
            server.start()
            until(lambda: not breaker.is_open, "the child noticed")
            os._exit(0 if checking.check(WHO).decision is not None else 2)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    until(lambda: not breaker.is_open, "its parent noticed too")


def test_the_status_page_says_that_the_process_recovers(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(server)
    [fact] = [fact for fact in facts() if fact.name == "failure"]
    assert (fact.level, fact.word) == (Level.RED, "active: allow")
    waiting = threading.Event()
    monkeypatch.setattr(type(current_server().wire), "probe", lambda _wire: waiting.wait(60))
    server.start()
    [fact] = [fact for fact in facts() if fact.name == "failure"]
    assert (fact.level, fact.word) == (Level.AMBER, "recovering")
    waiting.set()
    until(lambda: not breaker.is_open, "the process has recovered")
    until(lambda: not prober.is_active(), "the thread has ended")
    [fact] = [fact for fact in facts() if fact.name == "failure"]
    assert (fact.level, fact.word) == (Level.GREEN, "not active (allow)")


def test_a_mistake_in_the_probe_is_logged_and_the_thread_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    outcomes: list[Exception | None] = [NotSent("it is away"), TypeError("no such argument"), None]

    def probe() -> None:
        if (error := outcomes.pop(0)) is not None:
            raise error

    breaker = Breaker(probe=probe)
    for _ in range(FAILURES):
        breaker.failed()
    until(lambda: not breaker.is_open, "the thread asks on")
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "cannot be asked whether Redis is back" in record.getMessage()
    assert record.exc_info is not None
    assert record.exc_info[0] is TypeError
    until(lambda: not prober.is_active(), "the thread has ended")
