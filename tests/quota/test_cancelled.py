"""Test callers that are cancelled or stopped while their decision is under way.

The permits of a cancelled task are given back. The lost reply of a stopped thread is declared.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import redis

from ratelimits.engine import adecide
from ratelimits.engine.server import current_server
from ratelimits.identity import Identity
from ratelimits.quota import checking
from ratelimits.quota.waiting import acheck_and_wait
from ratelimits.usage.counting import process_totals
from tests.support.engine.asking import everything, limit
from tests.support.engine.memory import NEAR, looking_by_hand, notice
from tests.support.engine.proxy import Proxy
from tests.support.entry_points import away, begin_afresh, counted
from tests.support.raw import RawRedis
from tests.support.rows import arule
from tests.support.servers import TestServers

pytestmark = pytest.mark.django_db(transaction=True)

WHO = Identity("user:1", None, "account:acme", None)
ONE = {"requests": 1}
Entry = Callable[[], Awaitable[Any]]


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    begin_afresh(monkeypatch)


@pytest.fixture
def proxy(servers: TestServers, settings: Any) -> Iterator[Proxy]:
    """Put a proxy in front of the server of the limits."""
    settings.RATELIMITS = {**settings.RATELIMITS, "DENY_CACHE_SECONDS": 0}
    with Proxy(servers.redis.port) as running:
        away(settings, running.port)
        yield running


async def cancelled(proxy: Proxy, entry: Entry, *, times: int = 1) -> None:
    """Cancel a task whose command is written and whose reply has not come yet; then let the reply come."""
    proxy.hold()
    before = proxy.count(b"EVALSHA")
    task = asyncio.ensure_future(entry())
    await asyncio.to_thread(proxy.wait_for, b"EVALSHA", before + 1)
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)
    proxy.let_go()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize(
    "entry",
    [lambda: checking.acheck(WHO), lambda: acheck_and_wait(WHO, "*", "GET", ONE)],
    ids=["acheck", "acheck_and_wait"],
)
async def test_what_was_granted_is_given_back(
    proxy: Proxy, redis_client: redis.Redis, entry: Entry, times: int
) -> None:
    await arule("bucket", capacity=2, rate="0.000001")
    await arule("flights", "concurrency", capacity=2)
    assert (await checking.acheck(WHO)).allowed
    for number in range(1, 4):
        await cancelled(proxy, entry, times=times)
        assert counted(redis_client) == {"a requests 0 acme user:1 1": 1 + number, "r requests 0 acme user:1 1": number}
    assert (await checking.acheck(WHO)).allowed
    assert not (await checking.acheck(WHO)).allowed


async def test_the_engine_gives_back_as_well(proxy: Proxy) -> None:
    bucket = limit(capacity=1, rate=1, period=1_000_000)
    await adecide([limit(capacity=1, key="user:2")])
    for _ in range(3):
        await cancelled(proxy, lambda: adecide([bucket]))
    assert (await adecide([bucket])).allowed


async def test_a_reply_that_is_lost_meanwhile_is_declared(proxy: Proxy) -> None:
    assert (await checking.acheck(WHO)).allowed
    before = proxy.count(b"EVALSHA")
    proxy.hold()
    task = asyncio.ensure_future(checking.acheck(WHO))
    await asyncio.to_thread(proxy.wait_for, b"EVALSHA", before + 1)
    task.cancel()
    proxy.cut.set()
    proxy.let_go()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert {place.kind for place in process_totals.totals()} == {"admitted", "unanswered"}


async def test_who_waits_no_longer_than_so_long_is_told_that_the_time_is_over(
    proxy: Proxy, redis_client: redis.Redis
) -> None:
    assert (await checking.acheck(WHO)).allowed
    proxy.hold()

    async def ask() -> None:
        async with asyncio.timeout(0.01):
            await checking.acheck(WHO)

    task = asyncio.ensure_future(ask())
    await asyncio.sleep(0.1)
    assert not task.done()
    proxy.let_go()
    with pytest.raises(TimeoutError):
        await task
    assert counted(redis_client) == {"a requests 0 acme user:1 1": 2, "r requests 0 acme user:1 1": 1}


async def test_a_task_that_was_cancelled_before_may_still_ask(redis_client: redis.Redis) -> None:
    async def ask_at_last() -> bool:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return (await checking.acheck(WHO)).allowed
        raise AssertionError

    task = asyncio.ensure_future(ask_at_last())
    await asyncio.sleep(0)
    task.cancel()
    assert await task
    assert counted(redis_client) == {"a requests 0 acme user:1 1": 1}


@pytest.mark.parametrize("reply", ["comes", "is lost"])
@pytest.mark.parametrize("times_out", [False, True])
async def test_a_request_that_is_cancelled_while_memory_is_short_is_not_decided(
    proxy: Proxy, redis_client: RawRedis, monkeypatch: pytest.MonkeyPatch, reply: str, times_out: bool
) -> None:
    """Cancel it while Redis is asked whether it has a state of the address."""
    await arule("hourly", "fixed_window", capacity=2, period=3600, key_kind="ip")
    one, other = (Identity(None, None, "account:acme", f"ip:203.0.113.{number}") for number in (1, 2))
    deadline = asyncio.timeout(None)

    async def ask() -> None:
        async with deadline:
            await checking.acheck(other)

    with looking_by_hand(monkeypatch):
        assert (await checking.acheck(one)).allowed
        before = everything(redis_client)
        notice(NEAR)
        proxy.hold()
        task = asyncio.ensure_future(ask())
        await asyncio.to_thread(proxy.wait_for, b"EXISTS")
        if times_out:
            deadline.reschedule(0.0)
            await asyncio.sleep(0)  # the loop ends the task in its next turn
        else:
            task.cancel()
        assert task.cancelling()
        if reply == "is lost":
            proxy.cut.set()
        proxy.let_go()
        with pytest.raises(TimeoutError if times_out else asyncio.CancelledError):
            await task
    assert everything(redis_client) == before
    assert {place.kind for place in process_totals.totals()} == {"admitted"}


class Stopped(BaseException):
    """Not a subclass of Exception, like GreenletExit and gevent's timeouts."""


@pytest.mark.parametrize("stop", [SystemExit, KeyboardInterrupt, Stopped])
@pytest.mark.parametrize("pooled", [False, True], ids=["idle connections", "a pool's connection"])
def test_a_thread_that_is_stopped_while_it_waits_for_the_reply_declares_it(
    proxy: Proxy, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch, stop: type[BaseException], pooled: bool
) -> None:
    if pooled:
        monkeypatch.setattr(current_server().wire, "_idle", None)  # as with Sentinel and clusters
    assert checking.check(WHO).allowed
    before, connections = proxy.count(b"EVALSHA"), proxy.connections
    proxy.hold()

    def handler(*_: object) -> None:
        raise stop

    def stop_it() -> None:
        proxy.wait_for(b"EVALSHA", before + 1)
        os.kill(os.getpid(), signal.SIGUSR1)

    usual = signal.signal(signal.SIGUSR1, handler)
    other = threading.Thread(target=stop_it)
    other.start()
    try:
        with pytest.raises(stop):
            checking.check(WHO)
    finally:
        other.join()
        signal.signal(signal.SIGUSR1, usual)
    proxy.let_go()
    assert {place.kind: total for place, total in process_totals.totals().items()} == {
        "admitted": (1, 1),
        "unanswered": (1, 1),
    }
    # The next decision is sent at once, because the server did not fail, and reads its own reply.
    assert checking.check(WHO).decision is not None
    assert proxy.connections == connections + 1
    assert counted(redis_client) == {"a requests 0 acme user:1 1": 3}
