"""Test that each connection is replaced after some time, so that a process notices what has changed since."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis

from ratelimits.engine.transport.ages import LIFETIME, SPREAD, Ages
from ratelimits.engine.transport.connection import UNREADABLE
from ratelimits.engine.transport.link import IN_FLIGHT
from ratelimits.engine.transport.wire import Wire
from tests.support.engine.askers import INCREASE, POOLS, Asker
from tests.support.engine.proxy import Proxy
from tests.support.engine.rotating import Callers
from tests.support.engine.saying import WHO, let_be_old, say
from tests.support.restricted import as_user, user_of


def test_a_connection_is_replaced_before_a_command_is_sent_on_it(asking: Callable[..., Asker], proxy: Proxy) -> None:
    with asking(proxy.url) as ask:
        first = ask(WHO)
        let_be_old(ask.wire, LIFETIME * (1 - SPREAD) / 2)
        assert (ask(WHO), proxy.connections) == (first, 1), "this one is not old enough"
        let_be_old(ask.wire, LIFETIME)
        second = ask(WHO)
        assert second > first
        assert (ask(WHO), proxy.connections, proxy.count(b"PING")) == (second, 2, 0)


def test_the_connections_that_were_made_together_are_not_replaced_together() -> None:
    ages, began = Ages({}, 1.0), time.monotonic()
    ends = [ages.until() for _ in range(100)]
    assert len(set(ends)) > 1
    assert began + LIFETIME * (1 - SPREAD) <= min(ends)
    assert max(ends) <= time.monotonic() + LIFETIME


def test_a_run_that_can_be_read_now_is_noticed_and_one_that_cannot_too(
    asking: Callable[..., Asker], redis_url: str, redis_client: redis.Redis
) -> None:
    command = say(b"INCR", b"counter")
    with user_of([redis_client], "-info"), asking(as_user(redis_url)) as ask:
        ask(command)
        redis_client.execute_command("ACL", "SETUSER", "restricted", "+info")
        ask(command)
        let_be_old(ask.wire, LIFETIME)
        ask(command)
        run = command.runs[-1]
        assert command.runs == [UNREADABLE, UNREADABLE, run]
        assert run != UNREADABLE
        redis_client.execute_command("ACL", "SETUSER", "restricted", "-info")
        let_be_old(ask.wire, LIFETIME)
        ask(command)
        assert command.runs[-1] == UNREADABLE


@pytest.mark.parametrize("name", POOLS)
def test_each_call_has_one_reply_while_connections_are_replaced(
    opened: Callable[..., Wire], redis_url: str, name: str
) -> None:
    wire = opened(redis_url, **POOLS[name])
    wire._pool.ages.lifetime = 0.0
    with Callers(lambda: wire.call(INCREASE, b""), lambda: wire.acall(INCREASE, b"")) as callers:
        callers.a_round()
    assert callers.errors == []
    assert wire.call(INCREASE, b"") == sum(callers.calls) + 1


def test_the_replies_of_a_connection_that_is_replaced_arrive(opened: Callable[..., Wire], redis_url: str) -> None:
    wire, number = opened(redis_url), 3 * IN_FLIGHT
    wire._pool.ages.lifetime = 0.0

    async def together() -> list[Any]:
        return await asyncio.gather(*(wire.acall(INCREASE, b"") for _ in range(number)))

    assert sorted(asyncio.run(together())) == list(range(1, number + 1))


@pytest.mark.parametrize("name", POOLS)
def test_seal_and_drain_and_waits_have_new_connections_too(
    opened: Callable[..., Wire], proxy: Proxy, redis_client: redis.Redis, name: str
) -> None:
    wire = opened(proxy.url, **POOLS[name])
    first = wire.client.client_id()
    let_be_old(wire, LIFETIME)
    assert (wire.client.client_id() > first, proxy.connections) == (True, 2)
    redis_client.rpush("list", "a")
    let_be_old(wire, LIFETIME)
    assert (wire.pop("list", 1), proxy.connections) == (b"a", 3)
