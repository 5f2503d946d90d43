"""Test many decisions in a row on a virtual clock, the server that decides them, and what a change of a rule keeps."""

from __future__ import annotations

import struct

import pytest
from django.test import override_settings
from redis.exceptions import ResponseError

from ratelimits.algorithms.limits import ALGORITHMS, algorithm_from_json
from ratelimits.engine import Stale
from ratelimits.engine.assemble.scripts import bulks
from ratelimits.engine.call import Call, Op
from ratelimits.engine.command import Command
from ratelimits.engine.keys import Keyspace
from ratelimits.engine.program import Term, program
from ratelimits.engine.server import Server, current_server
from ratelimits.simulate import sandbox
from ratelimits.simulate.replay import CommandMaker, ReadyCommand, replay
from ratelimits.simulate.runs import forget
from tests.end_to_end.test_round_trips import commands_of_clients
from tests.support.engine.asking import NOW, SECOND
from tests.support.engine.replaying import opening
from tests.support.raw import RawRedis
from tests.support.servers import TestServers

KEYS = Keyspace("replay", 1)
ALLOWED, REMAINING = 1, 3


@pytest.fixture
def server() -> Server:
    return Server(current_server().wire, KEYS)


def maker(*algorithms: str, **more: object) -> CommandMaker:
    numbers = {"capacity": 10, "rate": 1, "period": 1, "lease_ttl": 60, "calendar_unit": "month", **more}
    rules = [algorithm_from_json({"algorithm": algorithm, **numbers}) for algorithm in algorithms or ["token_bucket"]]
    return CommandMaker(KEYS, program(tuple(Term(rule, str(place), 0, 0) for place, rule in enumerate(rules))))


def ready_command(one: CommandMaker, now: int = NOW, key: str = "user:1") -> ReadyCommand:
    return one.command(Op.TRY, key, 1, now)


def test_decisions_are_made_in_order_in_one_round_trip(server: Server, redis_url: str) -> None:
    window = maker("fixed_window", capacity=3, period=10)
    ready_commands = [ready_command(window, NOW + n * SECOND) for n in range(12)]
    replay(server, ready_commands[:1])
    forget(server, window.state_keys("user:1"))
    with commands_of_clients(redis_url) as commands:
        allowed = [answer[ALLOWED] for answer in replay(server, ready_commands)]
    assert allowed == ([1] * 3 + [0] * 7 + [1] * 2)
    assert [command.split()[0] for command in commands] == ["EVAL"] + ["EVALSHA"] * 11


def test_moments_of_any_age_are_replayed(server: Server) -> None:
    bucket = maker(capacity=1)
    ready_commands = [ready_command(bucket, now) for now in (0, 1, SECOND, 5 * SECOND, NOW * 2)]
    assert [answer[ALLOWED] for answer in replay(server, ready_commands)] == [1, 0, 1, 1, 1]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("op", [Op.TRY, Op.PEEK, Op.CHANGE])
def test_a_command_made_of_parts_is_the_whole_one(algorithm: str, op: Op) -> None:
    """This also holds for a second command of the same form, another key, and another calendar period."""
    one = maker(algorithm)
    for key, cost, now, timeout in (("user:1", 0, 0, 0), ("ü" * 99, 7, NOW, -1), ("user:1", 2**40, NOW + 1, 2**52)):
        seconds = float("inf") if timeout < 0 else timeout / SECOND
        call = Call(one.program, (key,), (cost,), timeout=seconds, now=now, op=op, lease=".a", virtual=True)
        command, script = one.command(op, key, cost, now, timeout, "a")
        whole_command = Command(KEYS, call)
        whole = whole_command.to_bytes("virtual", b"0")
        if algorithm != "concurrency":
            # The other algorithms ignore the lease, which is the same for all requests.
            whole = whole.replace(bulks(b".a"), bulks(b"."))
        assert command == whole
        assert script is whole_command.script


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_nothing_expires_while_it_runs_and_nothing_is_left_behind(
    server: Server, redis_client: RawRedis, algorithm: str
) -> None:
    one = maker(algorithm)
    replay(server, [ready_command(one, 100 * SECOND), one.command(Op.TRY, "user:2", 1, 100 * SECOND, 60 * SECOND, "a")])
    kept = redis_client.keys("*")
    assert kept
    assert {redis_client.ttl(key) for key in kept} == {-1}
    forget(server, [*one.state_keys("user:1"), *one.state_keys("user:2")])
    assert redis_client.keys("*") == []


def test_a_replay_touches_no_version_and_no_usage(server: Server, redis_client: RawRedis) -> None:
    replay(server, [ready_command(maker())])
    assert {key.split(b"}:")[1][:2] for key in redis_client.keys("*")} == {b"s:"}


def test_a_corrupt_state_ends_it(server: Server, redis_client: RawRedis) -> None:
    redis_client.set(server.keyspace.state(0, "user:1"), b"garbage of no kind at all")
    with pytest.raises(ResponseError, match=r"^CORRUPT"):
        replay(server, [ready_command(maker()), ready_command(maker(), key="user:2")])
    assert replay(server, [ready_command(maker(), key="user:2")])[0][REMAINING] == 8


def test_a_moment_that_its_calendars_do_not_reach_to_is_refused(server: Server) -> None:
    one = maker("calendar_window")
    months, script = ready_command(one)
    later = months.replace(struct.pack("<d", NOW), struct.pack("<d", NOW + 40 * 86_400 * SECOND))
    with pytest.raises(Stale):
        replay(server, [(later, script)])


@override_settings(CACHES={}, RATELIMITS={}, DEBUG=False)
def test_a_trace_runs_on_the_given_server_also_in_a_project_that_has_none(servers: TestServers) -> None:
    with sandbox(servers.redis.url) as wire:
        assert wire.client.info("server")["process_id"] == servers.redis.process.pid


def test_a_rule_that_gets_its_former_algorithm_back_starts_afresh(servers: TestServers) -> None:
    window = {"algorithm": "fixed_window", "capacity": 1, "period": 3600}
    with sandbox(servers.redis.url) as wire, opening(wire) as open_replay:
        trace = open_replay(window)
        asked = [
            trace.step({"at": 1, "op": "try_acquire"}),
            trace.step({"at": 2, "op": "set_rule", "rule": {**window, "algorithm": "sliding_window"}}),
            trace.step({"at": 3, "op": "set_rule", "rule": window}),
            trace.step({"at": 4, "op": "try_acquire"}),
            trace.step({"at": 5, "op": "try_acquire"}),
        ]
    assert [outcome["remaining"] for outcome in asked] == [0, 1, 1, 0, 0]
    assert [outcome["allowed"] for outcome in asked[3:]] == [True, False]
