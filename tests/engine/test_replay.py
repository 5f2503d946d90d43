"""Many decisions in a row on a virtual clock."""

from __future__ import annotations

import pytest
import redis
from redis.exceptions import ResponseError

from ratelimits.engine import Limit, Stale
from ratelimits.engine.call import Call, Op
from ratelimits.engine.keys import Keyspace
from ratelimits.engine.limits import ALGORITHMS
from ratelimits.engine.program import Term, program
from ratelimits.engine.replay import forget, replay
from ratelimits.engine.server import Server, server
from tests.end_to_end.test_round_trips import commands_of_clients
from tests.engine.asking import NOW, SECOND, limit


@pytest.fixture
def here() -> Server:
    return Server(server().wire, Keyspace("replay", 1))


def call(one: Limit, now: int = NOW, op: Op = Op.TRY, lease: str | None = None, timeout: float = 0) -> Call:
    terms = (Term(one.algorithm, one.name, 0, 0),)
    return Call(program(terms), (one.key,), (one.cost,), now=now, op=op, virtual=True, lease=lease, timeout=timeout)


def test_decisions_are_made_in_order_in_one_round_trip(here: Server, redis_url: str) -> None:
    window = limit("fixed_window", capacity=3, period=10)
    calls = [call(window, NOW + n * SECOND) for n in range(12)]
    replay(here, calls[:1])
    forget(here, calls)
    with commands_of_clients(redis_url) as commands:
        allowed = [decision.allowed for decision in replay(here, calls)]
    assert allowed == ([True] * 3 + [False] * 7 + [True] * 2)
    assert [command.split()[0] for command in commands] == ["SCRIPT"] + ["EVALSHA"] * 12


def test_moments_of_any_age_are_replayed(here: Server) -> None:
    bucket = limit(capacity=1)
    calls = [call(bucket, now) for now in (0, 1, SECOND, 5 * SECOND, NOW * 2)]
    assert [decision.allowed for decision in replay(here, calls)] == [True, False, True, True, True]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_nothing_expires_while_it_runs_and_nothing_is_left_behind(
    here: Server, redis_client: redis.Redis, algorithm: str
) -> None:
    calls = [
        call(limit(algorithm), 100 * SECOND, lease="a"),
        call(limit(algorithm, key="user:2"), 100 * SECOND, timeout=60),
    ]
    replay(here, calls)
    kept = redis_client.keys("*")
    assert kept
    assert {redis_client.ttl(key) for key in kept} == {-1}
    forget(here, calls)
    assert redis_client.keys("*") == []


def test_a_replay_touches_no_version_and_no_usage(here: Server, redis_client: redis.Redis) -> None:
    replay(here, [call(limit())])
    assert {key.split(b"}:")[1][:2] for key in redis_client.keys("*")} == {b"s:"}


def test_a_corrupt_state_ends_it(here: Server, redis_client: redis.Redis) -> None:
    redis_client.set(here.keyspace.state(0, "user:1"), b"garbage of no kind at all")
    with pytest.raises(ResponseError, match=r"^CORRUPT"):
        replay(here, [call(limit()), call(limit(key="user:2"))])
    assert replay(here, [call(limit(key="user:2"))])[0].remaining == 8


def test_a_moment_that_no_calendar_knows_is_refused(here: Server) -> None:
    with pytest.raises((Stale, ValueError)):
        replay(here, [call(limit("calendar_window"), 2**60)])
