"""Test that a process notices by itself that the memory of Redis is short, and that there is enough again."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from redis.exceptions import ResponseError

from ratelimits import engine
from ratelimits.embedded import free_port
from ratelimits.engine import memory, memory_watch
from ratelimits.engine.memory import Shortage, Use
from ratelimits.engine.memory_watch import ADDRESSES, address_seen, look
from tests.support.engine.asking import everything, limit
from tests.support.engine.memory import FULL, NEAR, looking_by_hand, shortage, use_share
from tests.support.entry_points import away
from tests.support.eventually import until
from tests.support.raw import RawRedis
from tests.support.restricted import restricted


def see_addresses() -> bool:
    for _ in range(ADDRESSES):
        address_seen()
    return True


def test_new_addresses_let_a_process_look_until_there_is_enough(
    redis_client: RawRedis, caplog: pytest.LogCaptureFixture
) -> None:
    try:
        use_share(redis_client, NEAR)
        with caplog.at_level(logging.WARNING, "ratelimits"):
            # A process does not ask more often than once a second. So go on until it has asked.
            until(lambda: see_addresses() and memory.level, "the process notices it")
        assert shortage() is Shortage.NEAR
        assert "new addresses are counted together" in caplog.text
    finally:
        redis_client.config_set("maxmemory", 0)
    until(lambda: not memory.level, "the process notices that there is enough memory")


def test_a_refusal_lets_a_process_look(redis_client: RawRedis) -> None:
    memory.note_refusal()
    until(lambda: not memory.level, "the process asked, and the server is not full")


def test_a_server_that_is_away_changes_nothing(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with looking_by_hand(monkeypatch):
        memory.note([Use(9, 10)])
        away(settings, free_port())
        look()
        assert shortage() is Shortage.SHORT


@pytest.mark.parametrize("is_async", [False, True])
def test_a_server_that_refuses_info_is_not_filled_without_end(
    redis_client: RawRedis, redis_url: str, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    def decide(user: str) -> bool:
        limits = [limit(key=user)]
        return (asyncio.run(engine.adecide(limits)) if is_async else engine.decide(limits)).allowed

    with restricted(redis_client, redis_url, "-info"), looking_by_hand(monkeypatch, redis_client):
        use_share(redis_client, FULL)
        assert decide("user:1"), "nobody has asked yet how much memory there is"
        for _ in range(2):
            look()
            assert shortage() is Shortage.NONE
            before = everything(redis_client)
            with pytest.raises(ResponseError) as caught:
                decide("user:2")
            assert memory.is_refusal(caught.value)
            assert everything(redis_client) == before
            assert shortage() is Shortage.BEYOND
        redis_client.config_set("maxmemory", 0)
        look()
        assert shortage() is Shortage.NONE
        assert decide("user:2")


def test_a_server_that_never_says_how_full_it_is_gets_the_reserve_for_a_short_time(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with looking_by_hand(monkeypatch):
        assert memory.note_refusal()
        away(settings, free_port())
        look()
        assert shortage() is Shortage.FULL, "it is perhaps only slow"
        monkeypatch.setattr(memory_watch, "PATIENCE", 0.0)
        look()
        assert shortage() is Shortage.NONE
        assert not memory.note_refusal()
        look()
        assert shortage() is Shortage.NONE, "the next request asks the server again"


def test_a_server_that_hides_its_memory_prevents_that_another_gets_the_reserve() -> None:
    def level(*shares: int, **more: bool) -> Shortage:
        memory.note([Use(share, 100) for share in shares], **more)
        return memory.level

    found = {
        "full": level(102, hidden=True),
        "short": level(95, hidden=True),
        "enough": level(50, hidden=True),
        "refused": (memory.note_refusal(), shortage()),
        "an answer": level(50),
        "known": (memory.note_refusal(), shortage()),
        "full and away": level(50, away=True),
        "enough and away": level(50, away=True),
        "near and away": (level(85), level(50, away=True)),
    }
    assert found == {
        "full": Shortage.BEYOND,
        "short": Shortage.SHORT,
        "enough": Shortage.NONE,
        "refused": (False, Shortage.BEYOND),
        "an answer": Shortage.NONE,
        "known": (True, Shortage.FULL),
        "full and away": Shortage.SHORT,
        "enough and away": Shortage.SHORT,
        "near and away": (Shortage.NEAR, Shortage.NEAR),
    }
    memory.forget()


def test_a_small_server_has_a_reserve_for_the_buffers_of_clients() -> None:
    assert Use(7 * 2**20, 4 * 2**20).level is Shortage.FULL
    assert Use(9 * 2**20, 4 * 2**20).level is Shortage.BEYOND
    assert Use(104 * 2**30, 100 * 2**30).level is Shortage.FULL
    assert Use(106 * 2**30, 100 * 2**30).level is Shortage.BEYOND
    assert memory.use_of({"used_memory": 7, "mem_not_counted_for_evict": 2, "maxmemory": 10}) == Use(5, 10)
    assert memory.use_of({"used_memory": 7, "maxmemory": 0}) is None
    assert memory.use_of({}) is None
