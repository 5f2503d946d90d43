"""Test that a server whose memory is full still decides, counts, settles, refunds and releases."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from redis.exceptions import ResponseError

from ratelimits import engine
from ratelimits.algorithms.limits import ALGORITHMS
from ratelimits.engine import AlreadySettled, Decision, Full, memory
from ratelimits.engine.assemble import assembled
from ratelimits.engine.command import Command
from ratelimits.engine.decide import adecide_call, call_for, decide_call
from ratelimits.engine.memory import Shortage
from ratelimits.engine.server import current_server
from tests.support.engine.asking import counted, everything, limit, usage
from tests.support.engine.memory import FULL, looking_by_hand, notice, use_share
from tests.support.raw import RawRedis


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch, redis_client: RawRedis) -> Iterator[RawRedis]:
    """Yield a client of a server that is full. This process does not know it yet."""
    with looking_by_hand(monkeypatch, redis_client):
        use_share(redis_client, FULL)
        yield redis_client


def decided(is_async: bool, *limits: engine.Limit, **more: Any) -> Decision:
    return asyncio.run(engine.adecide(limits, **more)) if is_async else engine.decide(limits, **more)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_decision_is_made_and_counted_once(full: RawRedis, is_async: bool) -> None:
    one = limit("fixed_window", capacity=3, period=3600)
    left = [decided(is_async, one, account="acme", usage=usage()).remaining for _ in range(3)]
    assert left == [2, 1, 0]
    assert memory.level is Shortage.FULL
    assert sum(counted(full).values()) == 3


@pytest.mark.parametrize("is_async", [False, True])
def test_whoever_prepares_commands_must_make_them_again(full: RawRedis, is_async: bool) -> None:
    server, call = current_server(), call_for([limit("fixed_window", capacity=3, period=3600)])
    command, before = Command(server.keyspace, call), everything(full)

    def decide(command: Command) -> Decision:
        return asyncio.run(adecide_call(server, call, command)) if is_async else decide_call(server, call, command)

    for _ in range(2):
        with pytest.raises(Full):
            decide(command)
    assert everything(full) == before
    assert decide(Command(server.keyspace, call)).remaining == 2


@pytest.mark.parametrize("is_general", [False, True])
def test_every_algorithm_decides(full: RawRedis, monkeypatch: pytest.MonkeyPatch, is_general: bool) -> None:
    if is_general:
        assembled.cache_clear()
        monkeypatch.setattr("ratelimits.engine.assemble._MAX_LIMITS", 0)
    refused = []
    for name in ALGORITHMS:
        memory.forget()
        if not engine.decide([limit(name, f"user:{name}")], account="acme", usage=usage()).allowed:
            refused.append(name)
    assembled.cache_clear()
    assert refused == []
    assert sum(counted(full).values()) == len(ALGORITHMS)


def test_receipts_are_settled_refunded_and_released(full: RawRedis) -> None:
    window, places = limit("fixed_window", capacity=10, period=3600), limit("concurrency", "user:2", capacity=1)
    receipt = engine.decide([window], account="acme", usage=usage()).receipt
    lease = engine.decide([places]).receipt
    assert receipt is not None
    assert lease is not None
    memory.forget()  # as another process, which does not know it either
    assert engine.settle(receipt, [4, 4]).remaining == 6
    with pytest.raises(AlreadySettled):
        engine.refund(receipt)
    memory.forget()
    assert not engine.decide([places]).allowed
    engine.release(lease)
    assert engine.decide([places]).allowed
    memory.forget()
    engine.reset([window])
    assert engine.peek([window]).remaining == 10


def test_beyond_the_reserve_the_server_refuses(full: RawRedis) -> None:
    notice(1.2)
    before = everything(full)
    with pytest.raises(ResponseError) as caught:
        engine.decide([limit()])
    assert memory.is_refusal(caught.value)
    assert everything(full) == before


def test_other_errors_say_nothing_about_memory(redis_client: RawRedis) -> None:
    assert not memory.is_refusal(ResponseError("MISCONF Errors writing to the AOF file"))
    assert not memory.is_refusal(ResponseError("ERR a ZOOM command"))
