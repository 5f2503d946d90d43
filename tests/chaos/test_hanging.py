"""Test what a server that hangs adds to requests: its timeout to the first few, then nearly nothing."""

from __future__ import annotations

import asyncio
import inspect
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ratelimits.embedded import EmbeddedServer
from ratelimits.engine.transport.breaker import FAILURES
from ratelimits.identity import Identity
from ratelimits.quota import checking
from tests.chaos.load import TIGHT, TIMEOUT, WIDE
from tests.chaos.row import Hanging
from tests.support.entry_points import away, own_breaker
from tests.support.servers import TestServers, server_binary

pytestmark = pytest.mark.django_db(transaction=True)

#: Requests after the first few. They take less than a second, so the server is not asked again meanwhile.
REQUESTS = 1_000
#: The most seconds of processor time that such a request takes, in the median.
QUICK = 0.0002
#: What other work of the machine may add to TIMEOUT, in seconds.
SLACK = 1.0
WHO = Identity("user:1", account="account:1")

Spent = list[tuple[float, float]]


@pytest.fixture
def server(servers: TestServers, tmp_path: Path, settings: Any, load_rules: None) -> Iterator[EmbeddedServer]:
    server = EmbeddedServer(tmp_path / "redis", aof=True, binary=server_binary(servers.redis_kind))
    try:
        away(settings, server.port)
        yield server
    finally:
        server.process.send_signal(signal.SIGCONT)
        server.stop()


async def spent_by(ask: Callable[..., Any], requests: int) -> Spent:
    """Return for each request how long it took, and its processor time, in seconds."""
    spent = []
    for number in range(requests):
        began, used = time.perf_counter(), time.thread_time()
        answer = ask(WHO, (TIGHT, WIDE)[number % 2], "GET")
        if inspect.isawaitable(answer):
            answer = await answer
        spent.append((time.perf_counter() - began, time.thread_time() - used))
        assert answer.decision is None
        assert answer.allowed == (number % 2 == 1)
    return spent


def middle(spent: Spent, which: int, share: float = 0.5) -> float:
    return sorted(one[which] for one in spent)[int(len(spent) * share)]


@pytest.mark.parametrize("ask", [checking.check, checking.acheck])
def test_only_the_first_few_requests_wait(
    ask: Callable[..., Any],
    server: EmbeddedServer,
    settings: Any,
    monkeypatch: pytest.MonkeyPatch,
    hanging: Callable[[Hanging], None],
) -> None:
    async def measured() -> tuple[Spent, Spent]:
        for scope in (TIGHT, WIDE):
            answer = ask(WHO, scope, "GET")
            if inspect.isawaitable(answer):
                answer = await answer
            assert answer.allowed
        server.process.send_signal(signal.SIGSTOP)
        return await spent_by(ask, FAILURES), await spent_by(ask, REQUESTS)

    settings.RATELIMITS = {**settings.RATELIMITS, "TIMEOUT": TIMEOUT, "DENY_CACHE_SECONDS": 0, "RELOAD_INTERVAL": 60}
    own_breaker(monkeypatch)
    first, others = asyncio.run(measured())
    waited = max(seconds for seconds, _used in first)
    hanging(Hanging(ask.__name__, FAILURES, waited, middle(others, 0) * 1000, middle(others, 0, 0.99) * 1000))
    assert waited <= TIMEOUT + SLACK
    assert middle(others, 1) < QUICK
    asked_again = sum(seconds > TIMEOUT / 2 for seconds, _used in others)
    assert asked_again <= 1 + sum(seconds for seconds, _used in others)
