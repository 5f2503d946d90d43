"""Test logs and leases of any length: trees of many levels are exact, and many entries cost no more work than few."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from benchmarks.bounded import CHARGES, KINDS, LIFE, fill, operations
from ratelimits.engine.keys import Keyspace
from ratelimits.engine.server import Server
from ratelimits.engine.transport.wire import Wire
from tests.traces.agreement import disagreement, shortest, trace
from tests.traces.traffic import us

#: Blocks so small that a short trace makes a tree with all levels.
SMALL = ("sliding_log", "local SPREAD, TOP = 64, 3", "local SPREAD, TOP = 4, 3")
#: How many ended leases a charge drops.
FEW = ("concurrency", "local MAX_REMOVED = 4", "local MAX_REMOVED = 2")


def busy(seed: int, capacity: int, rule: dict[str, Any], length: int = 600) -> list[dict[str, Any]]:
    """Return lines that mostly charge, some at the same moment; a few refund, peek, wait or change the rule."""
    draw, at, lines = Random(seed), 1_000_000_000, []
    for number in range(length):
        at += draw.choice((0, 0, 1, 1000, 700_000, draw.choice((1, 1, 1, 4_000_000))))
        line: dict[str, Any] = {"at": us(at)}
        kind = draw.random()
        if kind < 0.12:
            line |= {"op": "refund", "cost": draw.choice((1, 2, 7, 40))}
        elif kind < 0.16:
            line |= {"op": "peek", "cost": draw.choice((1, capacity // 2, capacity))}
        elif kind < 0.18 and number > 300:
            line |= {"op": "set_rule", "rule": rule | {draw.choice(("period", "lease_ttl")): draw.choice((20, 60, 90))}}
            line["rule"] = {name: value for name, value in line["rule"].items() if name in rule}
        elif kind < 0.19:
            at -= draw.choice((1000, 90_000_000))
            at = max(at, 0)
            line["at"] = us(at)
        else:
            line["cost"] = draw.choice((1, 1, 1, 1, 2, 3, 9))
        if "lease_ttl" in rule:
            line["lease"] = draw.choice(("a", "b", "c", f"{number}"))
            if kind > 0.9:
                line |= {"op": "release", "cost": 1}
        lines.append(line)
    return lines


@pytest.mark.parametrize("capacity", [60, 300, 5000])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "rule", [{"algorithm": "sliding_log", "period": 60}, {"algorithm": "concurrency", "lease_ttl": 60}]
)
def test_long_traces_agree_with_the_model_whatever_lies_in_trees(
    rule: dict[str, Any], seed: int, capacity: int, open_replay: Any, take_out: Callable[..., None]
) -> None:
    take_out(SMALL, FEW)
    rule = {**rule, "capacity": capacity}
    found = disagreement(open_replay, rule, busy(seed, capacity, rule))
    assert found is None, str(shortest(open_replay, found))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("algorithm", ["sliding_log", "concurrency"])
def test_random_traffic_agrees_too(algorithm: str, seed: int, open_replay: Any, take_out: Callable[..., None]) -> None:
    take_out(SMALL, FEW)
    rule, lines, _ = trace(algorithm, f"bounded {seed}", 300)
    found = disagreement(open_replay, rule, lines)
    assert found is None, str(shortest(open_replay, found))


def commands(wire: Wire) -> int:
    """Return how many commands the server has run, including those of scripts."""
    stats = wire.client.info("commandstats")
    return sum(of["calls"] for name, of in stats.items() if name not in ("cmdstat_info", "cmdstat_config|resetstat"))


#: The most commands that one call may run in a script, whatever the state contains.
MOST = 180


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("entries", [1000, 5000])
def test_no_call_does_more_the_more_there_is(kind: str, entries: int, wire: Wire) -> None:
    rule, costs = KINDS[kind]
    start = 1_900_000_000_000_000
    state = fill(Server(wire, Keyspace(f"bounded-{entries}", 1)), rule, entries, costs, start)
    most: dict[str, int] = {}
    answered = 0
    for name, call in operations(state):
        before = commands(wire)
        call()
        most[name] = max(most.get(name, 0), commands(wire) - before)
        answered += 1
    assert answered > 2 * CHARGES
    assert max(most.values()) <= MOST, most


def test_each_refusal_of_the_benchmark_waits_for_the_part_that_its_name_says(wire: Wire) -> None:
    rule, costs = KINDS["sliding_log"]
    state = fill(Server(wire, Keyspace("bounded-names", 1)), rule, 1000, costs, 1_900_000_000_000_000)
    waits: dict[str, Any] = {}
    for name, call in operations(state):
        if "must end first" in name:
            decision: Any = call()
            waits[name] = decision.retry_after
    # One entry was made in each millisecond. Entry `last` must end, and 1000 ms have passed since entry 0.
    assert waits == {
        f"refusal, 1/{share} must end first": pytest.approx(LIFE + (last - 1000) / 1000, abs=0.002)
        for share, last in ((1, 999), (2, 499), (4, 249))
    }
