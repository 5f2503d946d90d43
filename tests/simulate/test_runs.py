"""Test that a simulation leaves nothing in Redis, also if its process was killed, and that no other one disturbs it."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from django.core.management import call_command

from ratelimits.engine.call import Op
from ratelimits.engine.server import current_server
from ratelimits.engine.transport.connection import Unavailable
from ratelimits.engine.transport.wire import Wire
from ratelimits.simulate import Replay, Simulator, TraceLine, clean, read_rules, runs, sandbox
from ratelimits.usage import tasks
from tests.support.eventually import until
from tests.support.forked import Forked
from tests.support.raw import RawRedis
from tests.support.selection import few
from tests.support.servers import TestServers

LOG = {"algorithm": "sliding_log", "capacity": 5, "period": 60}
LEASES = {"algorithm": "concurrency", "capacity": 5, "lease_ttl": 60}
#: More keys than one command names, in more than one round trip.
MANY = 2500


@pytest.fixture
def wire(servers: TestServers) -> Iterator[Wire]:
    with sandbox(servers.redis.url) as wire:
        yield wire


def lines(replay: Replay, count: int) -> Iterator[tuple[Replay, TraceLine]]:
    return ((replay, TraceLine(n, n, Op.TRY, str(n), 1, 0, str(n))) for n in range(count))


def begun(wire: Wire, count: int = MANY) -> tuple[Simulator, Iterator[Any]]:
    """Begin a simulation, and return it with its further outcomes."""
    simulator = Simulator(wire)
    outcomes = simulator.run(lines(Replay(read_rules([LOG, LEASES])), count))
    next(outcomes)
    return simulator, outcomes


def states(client: RawRedis) -> set[bytes]:
    return {key for key in client.scan_iter("rl:1:simulate-*") if client.type(key) != b"string" or b"}:s:" in key}


def is_silent_too_long(client: redis.Redis) -> None:
    """Let the server forget the proofs that simulations live, as it does after KEEP_SECONDS."""
    (proof,) = client.scan_iter("rl:1:simulate-*:alive")
    assert 0 < client.ttl(proof) <= 600
    client.delete(proof)


def test_each_state_is_noted_and_forgotten_with_its_replay(wire: Wire, redis_client: RawRedis) -> None:
    simulator = Simulator(wire)
    first, second = Replay(read_rules([LOG, LEASES]), "first:"), Replay(read_rules([LOG]), "second:")
    for replay in (first, second):
        assert len(list(simulator.run(lines(replay, 3)))) == 3
    changed = TraceLine(3, 3, Op.TRY, "", 0, 0, "", rules=read_rules([LEASES]))
    assert len(list(simulator.run([(second, changed)]))) == 1

    def noted() -> set[bytes]:
        (names,) = redis_client.scan_iter("rl:1:simulate-*:names")
        return set(redis_client.hkeys(names))

    own = {key for key in states(redis_client) if not key.endswith((b":names", b":runs", b":x", b":b"))}
    assert own
    assert own <= noted()
    simulator.forget([first])
    assert {b"first:" in name for name in noted()} == {False}
    simulator.close()
    assert redis_client.keys("rl:1:simulate-*") == []


KILLED = """
import sys
from ratelimits.engine.call import Op
from ratelimits.simulate import Replay, Simulator, TraceLine, read_rules, sandbox
with sandbox() as wire, Simulator(wire) as simulator:
    replay = Replay(read_rules({rules}))
    for _ in simulator.run((replay, TraceLine(n, n, Op.TRY, str(n), 1, 0, str(n))) for n in range({count})):
        print("running", flush=True)
        sys.stdin.read()
"""


@pytest.mark.parametrize("owner", few(["the next simulation", "the task", "the command"], "the next simulation"))
def test_what_a_killed_simulation_left_is_deleted(
    owner: str,
    servers: TestServers,
    redis_client: redis.Redis,
    tmp_path: Path,
    db: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed = Forked(
        [sys.executable, "-c", KILLED.format(rules=[LOG, LEASES], count=MANY)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "REDIS_URL": servers.redis.url},
    )
    assert killed.stdin is not None
    assert killed.stdout is not None
    with killed.stdin, killed.stdout:
        assert killed.stdout.readline() == b"running\n"
        killed.kill()
        killed.wait()
    assert len(states(redis_client)) > MANY

    def take_turn() -> None:
        if owner == "the task":
            tasks.compact()
        elif owner == "the command":
            call_command("ratelimits_compact", stdout=said)
        else:
            (tmp_path / "rule.json").write_text(json.dumps(LOG))
            (tmp_path / "trace.jsonl").write_text('{"at": 1}\n')
            call_command(
                "ratelimits_simulate",
                rule=str(tmp_path / "rule.json"),
                trace=str(tmp_path / "trace.jsonl"),
                stdout=said,
            )

    said = io.StringIO()
    monkeypatch.setenv("REDIS_URL", servers.redis.url)
    take_turn()  # perhaps the process lives, and only waits
    assert len(states(redis_client)) > MANY
    is_silent_too_long(redis_client)
    take_turn()
    assert redis_client.keys("rl:1:simulate-*") == []
    if owner == "the command":
        assert "Deleted what 1 killed simulation left in Redis." in said.getvalue()


def test_a_cleaner_that_was_killed_is_followed_by_another(wire: Wire, redis_client: redis.Redis) -> None:
    begun(wire, 5)
    (proof,) = redis_client.scan_iter("rl:1:simulate-*:alive")
    redis_client.set(proof, "cleaning", px=600_000)
    assert clean(wire) == 0
    is_silent_too_long(redis_client)
    assert clean(wire) == 1
    assert redis_client.keys("rl:1:simulate-*") == []


def test_a_living_simulation_renews_its_proof_and_ends_as_usual(wire: Wire, redis_client: redis.Redis) -> None:
    simulator, outcomes = begun(wire)
    (proof,) = redis_client.scan_iter("rl:1:simulate-*:alive")
    redis_client.pexpire(proof, 300_000)
    runs._background.run()
    assert redis_client.ttl(proof) > 590
    is_silent_too_long(redis_client)
    runs._background.run()  # nobody has cleaned meanwhile
    assert redis_client.ttl(proof) > 590
    assert len(list(outcomes)) == MANY - 1
    simulator.close()
    assert redis_client.keys("rl:1:simulate-*") == []


@pytest.mark.parametrize("how", ["cleaned", "being cleaned", "flushed"])
def test_a_simulation_that_lost_its_states_raises_an_error_and_no_wrong_result(
    wire: Wire, redis_client: redis.Redis, how: str
) -> None:
    simulator, outcomes = begun(wire)
    (proof,) = redis_client.scan_iter("rl:1:simulate-*:alive")
    if how == "flushed":
        redis_client.flushdb()
    elif how == "being cleaned":
        redis_client.set(proof, "cleaning")
    else:
        is_silent_too_long(redis_client)
        assert clean(wire) == 1
    runs._background.run()
    with pytest.raises(Unavailable, match="stood still for more than 10 minutes, or the server lost its data"):
        list(outcomes)
    simulator.close()


def test_a_machine_that_slept_asks_at_the_end(
    wire: Wire, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulator, outcomes = begun(wire)
    is_silent_too_long(redis_client)
    clean(wire)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3600)
    with pytest.raises(Unavailable):
        list(outcomes)
    simulator.close()


def test_an_empty_simulation_writes_nothing(wire: Wire, redis_client: redis.Redis) -> None:
    with Simulator(wire) as simulator:
        assert list(simulator.run([])) == []
        assert redis_client.keys("rl:1:simulate-*") == []
    assert clean(current_server().wire) == 0


def test_the_process_renews_by_a_thread(wire: Wire) -> None:
    simulator, _outcomes = begun(wire, 3)
    until(lambda: runs._background.running, "the thread runs")
    simulator.close()
    assert simulator._run not in runs._runs
