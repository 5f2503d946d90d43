"""Test that a process notices by itself that the memory of Redis is short, and that there is enough again."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from ratelimits.embedded import free_port
from ratelimits.engine import memory
from ratelimits.engine.memory import Shortage, Use
from ratelimits.engine.memory_watch import ADDRESSES, address_seen, look
from tests.support.engine.memory import NEAR, shortage, use_share
from tests.support.entry_points import away
from tests.support.eventually import until
from tests.support.raw import RawRedis


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


def test_a_server_that_is_away_changes_nothing(settings: Any) -> None:
    memory.note([Use(9, 10)])
    away(settings, free_port())
    look()
    assert shortage() is Shortage.SHORT


def test_a_small_server_has_a_reserve_for_the_buffers_of_clients() -> None:
    assert Use(7 * 2**20, 4 * 2**20).level is Shortage.FULL
    assert Use(9 * 2**20, 4 * 2**20).level is Shortage.BEYOND
    assert Use(104 * 2**30, 100 * 2**30).level is Shortage.FULL
    assert Use(106 * 2**30, 100 * 2**30).level is Shortage.BEYOND
    assert memory.use_of({"used_memory": 7, "mem_not_counted_for_evict": 2, "maxmemory": 10}) == Use(5, 10)
    assert memory.use_of({"used_memory": 7, "maxmemory": 0}) is None
    assert memory.use_of({}) is None
