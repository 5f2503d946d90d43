"""Test that states with wrong bytes, and replies in small pieces, lead to a decision or to a known error."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from redis.exceptions import ResponseError

from ratelimits.algorithms.limits import ALGORITHMS
from ratelimits.engine import ANY, adecide, reset
from tests.fuzz.test_targets import changed
from tests.support.engine.asking import NOW, ask, limit
from tests.support.engine.proxy import Proxy
from tests.support.entry_points import away
from tests.support.raw import RawRedis
from tests.support.servers import TestServers


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_state_with_any_bytes_is_used_or_reported(redis_client: RawRedis, algorithm: str, long_run: bool) -> None:
    rng = random.Random(algorithm)
    one = limit(algorithm)
    for number in range(3):
        ask(one, now=NOW + number, timeout=ANY)
    (key,) = (key for key in redis_client.keys("*") if redis_client.type(key) == b"string" and b"head" not in key)
    valid = redis_client.get(key)
    for _ in range(5_000 if long_run else 50):
        text = changed(rng, valid)
        redis_client.set(key, text)
        try:
            decision = ask(one, now=NOW + rng.randrange(10**7), timeout=ANY)
        except ResponseError:
            # The failure policy decides, and a reset helps.
            reset([one])
            assert ask(one, timeout=ANY).allowed, text
        else:
            assert isinstance(decision.remaining, int)


@pytest.mark.parametrize("piece", [1, 3, 7, 64])
def test_replies_that_come_in_pieces_say_the_same(servers: TestServers, settings: Any, piece: int) -> None:
    limits = [limit("token_bucket"), limit("gcra", name="second"), limit("sliding_log", name="third")]
    with Proxy(servers.redis.port) as proxy:
        proxy.piece = piece
        away(settings, proxy.port)
        first = [ask(*limits).remaining for _ in range(3)]

        async def more() -> list[int]:
            decisions = await asyncio.gather(*(adecide(limits, now=NOW) for _ in range(5)))
            return sorted(decision.remaining for decision in decisions)

        assert (first, asyncio.run(more())) == ([9, 8, 7], [2, 3, 4, 5, 6])
