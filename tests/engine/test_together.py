"""Test five limits of five algorithms in one decision: one round trip, all or nothing, also with many processes."""

from __future__ import annotations

import time

import pytest

from ratelimits.engine import Limit, algorithm_from_json, decide, peek
from tests.end_to_end.test_round_trips import commands_of_clients
from tests.support.engine.decider import CAPACITIES
from tests.support.siblings import siblings

PROCESSES = 8


def five(cost: int, factor: int = 1) -> list[Limit]:
    """Return the deciders' limits; no permit comes back during a test."""
    numbers = {"rate": 1, "period": 1_000_000, "lease_ttl": 1_000_000, "window_start": "first_hit"}
    return [
        Limit(
            f"user:{number % 2}",
            algorithm_from_json({"algorithm": name, "capacity": capacity * factor, **numbers}),
            name,
            cost,
        )
        for number, (name, capacity) in enumerate(CAPACITIES.items())
    ]


def test_a_decision_over_five_algorithms_is_one_round_trip(redis_url: str) -> None:
    decide(five(1))
    with commands_of_clients(redis_url) as commands:
        assert decide(five(1)).allowed
    assert [command.split()[0] for command in commands] == ["EVALSHA"]


def test_eight_processes_charge_all_five_or_none(capsys: pytest.CaptureFixture[str], long_run: bool) -> None:
    # The factor for the deciders' capacities: large enough that each process gets some requests admitted.
    decisions, factor = (10_000, 6) if long_run else (2_000, 2)
    with siblings("tests.support.engine.decider", PROCESSES) as processes:
        began = time.monotonic()
        for process in processes:
            process.ask({"times": decisions // PROCESSES, "factor": factor})
        permits = sum(process.answer() for process in processes)
        seconds = time.monotonic() - began
    charged = {one.name: factor * CAPACITIES[one.name] - peek([one]).remaining for one in five(0, factor)}
    with capsys.disabled():
        print(
            f"\n{decisions:,} decisions over 5 limits of 5 algorithms by {PROCESSES} processes in {seconds:.1f} s: "
            f"{permits:,} permits admitted, charged: {charged}"
        )
    assert charged == dict.fromkeys(charged, permits)
    least = factor * min(CAPACITIES.values())
    assert least - 2 <= permits <= least
