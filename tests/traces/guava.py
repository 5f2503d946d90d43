"""Guava's RateLimiterTest: the sequences of SmoothBursty and SmoothWarmingUp."""

from __future__ import annotations

import random
from decimal import Decimal

from tests.traces.cases import Events, OpenReplay, Replays, Rule, Table, patient, tries

GUAVA = "google/guava guava-tests RateLimiterTest"


def bursty(rate: int | str) -> Rule:
    return {"algorithm": "smooth_bursty", "rate": Decimal(rate), "period": 1, "max_burst_seconds": 1}


def warming(rate: int | str, warm_up: int | str, cold_factor: int) -> Rule:
    return {
        "algorithm": "smooth_warming_up",
        "rate": Decimal(rate),
        "period": 1,
        "warm_up": Decimal(warm_up),
        "cold_factor": cold_factor,
    }


COLD_2 = "R0.00, R1.38, R1.13, R0.88, R0.63, R0.50, R0.50, R0.50"
COLD_5 = "R0.00, R1.75, R1.26, R0.76, R0.30, R0.20, R0.20, R0.20"
EVEN_2 = "R0.00, R0.50, R0.50, R0.50, R0.50, R0.50, R0.50, R0.50"
EVEN_5 = "R0.00, R0.20, R0.20, R0.20, R0.20, R0.20, R0.20, R0.20"

EVENTS = [
    Events("testSimple", GUAVA, bursty(5), "R0.00, R0.20, R0.20"),
    Events("testSimpleWithWait", GUAVA, bursty(5), "R0.00, U0.20, R0.00, R0.20"),
    Events("testSimpleAcquireEarliestAvailableIsInPast", GUAVA, bursty(5), "R0.00, U0.40, R0.00, R0.00, R0.20"),
    Events(
        "testOneSecondBurst",
        GUAVA,
        bursty(5),
        "U1.00, U1.00, acquire(1) R0.00, acquire(1) R0.00, acquire(3) R0.00, acquire(1) R0.00, R0.20",
    ),
    Events(
        "testSimpleWeights",
        GUAVA,
        bursty(1),
        "acquire(1) R0.00, acquire(1) R1.00, acquire(2) R1.00, acquire(4) R2.00, acquire(8) R4.00, acquire(1) R8.00",
    ),
    Events(
        "testBurstyAndUpdate",
        GUAVA,
        bursty(1),
        "acquire(1) R0.00, acquire(1) R1.00, rate 2, acquire(1) R1.00, acquire(2) R0.50, acquire(4) R1.00, "
        "acquire(1) R2.00",
    ),
    Events(
        "testWarmUp",
        GUAVA,
        warming(2, 4, 3),
        f"{COLD_2}, U0.50, U4.00, {COLD_2}, U0.50, U2.00, {EVEN_2}",
    ),
    Events(
        "testWarmUpWithColdFactor",
        GUAVA,
        warming(5, 4, 10),
        f"{COLD_5}, U0.20, U4.00, {COLD_5}, U0.20, U1.00, {EVEN_5}",
    ),
    Events("testWarmUpWithColdFactor1", GUAVA, warming(5, 4, 1), f"{EVEN_5}, U0.34, {EVEN_5}"),
    Events(
        "testWarmUpAndUpdate",
        GUAVA,
        warming(2, 4, 3),
        f"{COLD_2}, U4.50, R0.00, R1.38, R1.13, rate 4, R0.88, R0.34, R0.28, R0.25, R0.25, U4.25, R0.00, R0.72, R0.66, "
        "R0.59, R0.53, R0.47, R0.41, R0.34, R0.28, R0.25, R0.25",
    ),
    Events(
        "testWarmUpAndUpdateWithColdFactor",
        GUAVA,
        warming(5, 4, 10),
        f"{COLD_5}, U4.20, R0.00, R1.75, R1.26, rate 10, R0.76, R0.20, R0.10, R0.10, R0.10, U4.10, R0.00, R0.94, "
        "R0.81, R0.69, R0.57, R0.44, R0.32, R0.20, R0.10, R0.10, R0.10",
    ),
]

TABLES = [
    Table("testImmediateTryAcquire", GUAVA, bursty(1), tries((0, 1, True), (0, 1, False))),
    Table(
        "testDoubleMinValueCanAcquireExactlyOnce (the least rate here)",
        GUAVA,
        bursty("0.000001"),
        tries((0, 1, True), (0, 1, False), (2147, 1, False)),
    ),
    Table(
        "testTryAcquire_noWaitAllowed",
        GUAVA,
        bursty(5),
        patient((0, 1, 0, True), (0, 1, 0, False), (0, 1, 0, False), (0.1, 1, 0, False)),
    ),
    Table(
        "testTryAcquire_someWaitAllowed",
        GUAVA,
        bursty(5),
        # Guava sleeps through the granted wait of 0.2 s before the third call.
        patient((0, 1, 0, True), (0, 1, 0.2, True), (0.2, 1, 0.1, False), (0.3, 1, 0.1, True)),
    ),
    Table(
        "testTryAcquire_overflow",
        GUAVA,
        bursty(5),
        patient((0, 1, 0, True), (0.1, 1, 9223372036, True)),
    ),
    Table(
        "testTryAcquire_negative",
        GUAVA,
        bursty(5),
        patient((0, 5, 0, True), (0.9, 1, -9223372036, False), (1.0, 1, -1, True)),
    ),
]


def total_time(replay: Replays, at: Decimal, permits: int, draw: random.Random) -> Decimal:
    """Acquire the permits in random portions; return the time after the last portion's wait is over."""
    while permits > 0:
        portion = max(1, draw.randrange(permits))
        permits -= portion
        at += Decimal(repr(replay.step({"at": at, "op": "acquire", "cost": portion})["wait"]))
    return at + Decimal(repr(replay.step({"at": at, "op": "acquire"})["wait"]))


def play_bursts_of_a_second(open_replay: OpenReplay, seed: int) -> None:
    """testWeNeverGetABurstMoreThanOneSec."""
    draw = random.Random(seed)
    at = Decimal(0)
    replay = open_replay(bursty(1))
    replay.step({"at": at, "op": "create"})
    for rate in (1000, 1, 10, 1_000_000, 10, 1):
        at += rate
        replay.step({"at": at, "op": "set_rule", "rule": bursty(rate)})
        start, at = at, total_time(replay, at, rate, draw)
        assert at - start <= 1
        start, at = at, total_time(replay, at, rate, draw)
        assert at - start >= Decimal("0.999999")


def play_warm_up_in_any_portions(open_replay: OpenReplay, seed: int) -> None:
    """testTimeToWarmUpIsHonouredEvenWithWeights."""
    draw = random.Random(seed)
    for factor in (2, 3, 10):
        for rate in ("4", "2", "1", "0.5", "0.1"):
            warm_up = (1 + factor) * 10 / (2 * Decimal(rate))
            replay = open_replay(warming(rate, str(warm_up), factor))
            replay.step({"at": Decimal(0), "op": "create"})
            # There are at most 11 acquires, and each truncates less than two microseconds.
            assert 0 <= warm_up - total_time(replay, Decimal(0), 10, draw) <= Decimal("0.000022")
