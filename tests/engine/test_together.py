"""Test five limits of five algorithms in one decision: one round trip, all or nothing, also with many processes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from ratelimits.engine import Limit, algorithm_from_json, decide, peek
from tests.end_to_end.test_round_trips import commands_of_clients
from tests.support.engine.decider import CAPACITIES

PROCESSES, DECISIONS = 8, 10_000
#: The factor for the deciders' capacities: large enough that each process gets some requests admitted.
FACTOR = 6


def five(cost: int) -> list[Limit]:
    """Return the deciders' limits; no permit comes back during a test."""
    numbers = {"rate": 1, "period": 1_000_000, "lease_ttl": 1_000_000, "window_start": "first_hit"}
    return [
        Limit(
            f"user:{number % 2}",
            algorithm_from_json({"algorithm": name, "capacity": capacity * FACTOR, **numbers}),
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


def test_eight_processes_charge_all_five_or_none(capsys: pytest.CaptureFixture[str]) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.engine.decider", str(seed), str(DECISIONS // PROCESSES), str(FACTOR)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        for seed in range(PROCESSES)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    began = time.monotonic()
    for process in processes:
        assert process.stdin is not None
        print("go", file=process.stdin, flush=True)
    permits = sum(int(process.communicate()[0]) for process in processes)
    seconds = time.monotonic() - began
    charged = {one.name: FACTOR * CAPACITIES[one.name] - peek([one]).remaining for one in five(0)}
    with capsys.disabled():
        print(
            f"\n{DECISIONS:,} decisions over 5 limits of 5 algorithms by {PROCESSES} processes in {seconds:.1f} s: "
            f"{permits:,} permits admitted, charged: {charged}"
        )
    assert charged == dict.fromkeys(charged, permits)
    least = FACTOR * min(CAPACITIES.values())
    assert least - 2 <= permits <= least
