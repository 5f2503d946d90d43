"""Test cases that other projects publish, translated to traces. The facts are theirs, the words and code ours.

Left out, since DESIGN defines something else:
- golang.org/x/time/rate, a clock that steps back: Go counts time again from the earlier moment
  (TestLimiterJumpBackwards, TestReserveJumpBack, TestReserveJumpBackCancel); here the decision is clamped.
- golang.org/x/time/rate, cancelling: Go gives back less when others reserved meanwhile, and nothing once the
  reserved moment has passed (TestCancel0Tokens, TestCancel1Token, TestCancelMulti, TestCancelTooLate,
  TestReserveSetLimitCancel); a refund here gives back what it says, up to what is spent.
- golang.org/x/time/rate, SetBurst keeps the tokens (TestReserveSetBurst); here what is spent is kept.
- golang.org/x/time/rate, limits of 0 and infinity; Guava, an infinite rate and a warm-up of 0: not rules here.
- redis-cell counts `remaining` and `reset_after` alike, but a first request above the burst tells `limit` remaining
  there and here; it blocks by whole seconds in that old version, so no case closer than that is kept.
- nginx counts in thousandths of a request and whole milliseconds; cases here are exact in both.
- Sentinel's LeapArray is a container of counters: its cases are read as what `remaining` tells of their sum.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from typing import Any, Protocol

Line = dict[str, Any]
Rule = dict[str, Any]


class Replays(Protocol):
    def step(self, line: Line) -> dict[str, Any]: ...


OpenReplay = Callable[[Any], Replays]


@dataclass(frozen=True)
class Table:
    """Lines with the parts of their answers that the source states."""

    name: str
    source: str
    rule: Any
    steps: tuple[tuple[Line, dict[str, Any]], ...]

    def play(self, open_replay: OpenReplay) -> None:
        replay = open_replay(self.rule)
        for number, (line, expected) in enumerate(self.steps, start=1):
            answer = replay.step(line)
            told = {field: answer[field] for field in expected}
            assert told == expected, f"{self.name}, line {number}: {line}"


@dataclass(frozen=True)
class Events:
    """Guava's notation: R0.20 is an acquire that had to wait 0.20 s (and did), U0.50 an idle half second.

    `acquire(3) R0.00` takes three permits, `rate 4` changes the rate.
    """

    name: str
    source: str
    rule: Rule
    events: str

    def play(self, open_replay: OpenReplay) -> None:
        replay = open_replay(self.rule)
        at = Decimal(0)
        rule = self.rule
        replay.step({"at": at, "op": "create"})
        for number, event in enumerate(self.events.split(", "), start=1):
            if event.startswith("U"):
                at += Decimal(event[1:])
            elif event.startswith("rate "):
                rule = rule | {"rate": Decimal(event[5:])}
                replay.step({"at": at, "op": "set_rule", "rule": rule})
            else:
                call, _, waited = event.rpartition("R")
                cost = int(call[len("acquire(") : -2]) if call else 1
                answer = replay.step({"at": at, "op": "acquire", "cost": cost})
                assert answer["allowed"], f"{self.name}, event {number}"
                wait = Decimal(repr(answer["wait"]))
                told = wait.quantize(Decimal("0.01"), ROUND_HALF_UP)
                assert told == Decimal(waited), f"{self.name}, event {number}: waited {wait}, not {waited}"
                at += wait


def tries(*steps: tuple[Any, ...]) -> tuple[tuple[Line, dict[str, Any]], ...]:
    """(at, cost, allowed) rows."""
    return tuple(({"at": Decimal(str(at)), "cost": cost}, {"allowed": allowed}) for at, cost, allowed in steps)


# --- Guava, RateLimiterTest -------------------------------------------------------------------------------------

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


def patient(*steps: tuple[Any, ...]) -> tuple[tuple[Line, dict[str, Any]], ...]:
    """(at, cost, timeout, allowed) rows."""
    return tuple(
        ({"at": Decimal(str(at)), "cost": cost, "timeout": Decimal(str(timeout))}, {"allowed": allowed})
        for at, cost, timeout, allowed in steps
    )


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
    """When all permits, drawn in random portions, and the debt of the last are paid."""
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
            # Each of the at most 11 acquires cuts off less than two microseconds.
            assert 0 <= warm_up - total_time(replay, Decimal(0), 10, draw) <= Decimal("0.000022")


# --- redis-cell, cell::tests::it_rate_limits --------------------------------------------------------------------

TABLES.append(
    Table(
        "it_rate_limits",
        "brandur/redis-cell src/cell/mod.rs",
        {"algorithm": "gcra", "capacity": 5, "rate": 1, "period": 1},
        tuple(
            (
                {"at": Decimal(str(at)), "cost": cost},
                {
                    "allowed": allowed,
                    "limit": 5,
                    "remaining": remaining,
                    "reset_after": reset_after,
                    "retry_after": retry_after,
                },
            )
            for at, cost, remaining, reset_after, retry_after, allowed in (
                (0, 6, 5, 0, None, False),
                (0, 1, 4, 1, 0, True),
                (0, 1, 3, 2, 0, True),
                (0, 1, 2, 3, 0, True),
                (0, 1, 1, 4, 0, True),
                (0, 1, 0, 5, 0, True),
                (0, 1, 0, 5, 1, False),
                ("3.0", 1, 2, 3, 0, True),
                ("3.1", 1, 1, 3.9, 0, True),
                ("4.0", 1, 1, 4, 0, True),
                ("8.0", 1, 4, 1, 0, True),
                ("9.5", 1, 4, 1, 0, True),
                ("9.5", 0, 4, 1, 0, True),
                ("9.5", 2, 2, 3, 0, True),
                ("9.5", 5, 2, 3, 3, False),
            )
        ),
    )
)

# --- golang.org/x/time/rate, rate_test.go; its step d is 0.1 s --------------------------------------------------

GO = "golang/time rate/rate_test.go"


def go_bucket(rate: int, burst: int) -> Rule:
    return {"algorithm": "token_bucket", "capacity": burst, "rate": rate, "period": 1}


def reserves(*steps: tuple[int, int, int | None]) -> tuple[tuple[Line, dict[str, Any]], ...]:
    """(step asked, cost, step granted or None) rows."""
    return tuple(
        (
            {"at": Decimal(asked) / 10, "op": "acquire", "cost": cost},
            {"allowed": granted is not None, "wait": 0 if granted is None else (granted - asked) / 10},
        )
        for asked, cost, granted in steps
    )


TABLES += [
    Table(
        "TestLimiterBurst1",
        GO,
        go_bucket(10, 1),
        tries(
            (0, 1, True),
            (0, 1, False),
            (0, 1, False),
            (0.1, 1, True),
            (0.1, 1, False),
            (0.1, 1, False),
            (0.2, 2, False),
            (0.2, 1, True),
            (0.2, 1, False),
        ),
    ),
    Table(
        "TestLimiterBurst3",
        GO,
        go_bucket(10, 3),
        tries(
            (0, 2, True),
            (0, 2, False),
            (0, 1, True),
            (0, 1, False),
            (0.1, 4, False),
            (0.2, 1, True),
            (0.3, 1, True),
            (0.4, 1, True),
            (0.4, 1, True),
            (0.4, 1, False),
            (0.4, 1, False),
            (0.9, 3, True),
            (0.9, 0, True),
        ),
    ),
    Table("TestLimiter_noTruncationErrors", GO, go_bucket(1, 1) | {"rate": Decimal("0.769231")}, tries((0, 1, True))),
    Table("TestSimultaneousRequests", GO, go_bucket(1, 5), tries(*((0, 1, n < 5) for n in range(15)))),
    Table("TestSimpleReserve", GO, go_bucket(10, 2), reserves((0, 2, 0), (0, 2, 2), (3, 2, 4))),
    Table(
        "TestMix",
        GO,
        go_bucket(10, 2),
        reserves((0, 3, None), (0, 2, 0))
        + tries((0.1, 2, False))
        + reserves((1, 2, 2))
        + tries((0.1, 1, False), (0.3, 1, True)),
    ),
    Table("TestCancelInvalid", GO, go_bucket(10, 2), reserves((0, 2, 0), (0, 3, None), (0, 2, 2))),
    Table(
        "TestCancelLast",
        GO,
        go_bucket(10, 2),
        (
            *reserves((0, 2, 0), (0, 2, 2)),
            ({"at": Decimal("0.1"), "op": "refund", "cost": 2}, {"allowed": True}),
            *reserves((1, 2, 2)),
        ),
    ),
    Table(
        "TestReserveSetLimit",
        GO,
        go_bucket(5, 2),
        (
            *reserves((0, 2, 0), (0, 2, 4)),
            ({"at": Decimal("0.2"), "op": "set_rule", "rule": go_bucket(10, 2)}, {"remaining": 0}),
            *reserves((2, 1, 4)),
        ),
    ),
    Table(
        "TestReserveMax",
        GO,
        go_bucket(10, 2),
        patient((0, 2, 0.1, True), (0, 1, 0.1, True), (0, 1, 0.1, False)),
    ),
    Table(
        "TestWaitSimple",
        GO,
        go_bucket(10, 3),
        reserves((0, 4, None), (0, 2, 0), (0, 3, 2)),
    ),
]

# --- nginx, limit_req -------------------------------------------------------------------------------------------

NGINX = "nginx/nginx-tests limit_req.t"


def limit_req(per_minute: int, burst: int, delay: int = 0) -> Rule:
    return {
        "algorithm": "leaky_bucket_queue",
        "capacity": burst,
        "rate": per_minute,
        "period": 60,
        "delay_after": delay,
    }


def arrivals(*steps: tuple[Any, float | None]) -> tuple[tuple[Line, dict[str, Any]], ...]:
    """(at, seconds of delay or None for 503) rows."""
    return tuple(
        ({"at": Decimal(str(at)), "op": "acquire"}, {"allowed": delay is not None, "wait": delay or 0})
        for at, delay in steps
    )


TABLES += [
    Table(
        "burst=1 nodelay; rejected requests are not counted",
        NGINX,
        limit_req(120, 1, delay=1),
        arrivals((0, 0), (0, 0), (0, None), (0, None), (0, None), (1.1, 0)),
    ),
    Table("burst=5, the second request is delayed", NGINX, limit_req(120, 5), arrivals((0, 0), (0, 0.5))),
    Table("negative excess", NGINX, limit_req(60_000, 1), arrivals((0, 0), (0.1, 0))),
    Table(
        "delay=1 burst=2",
        "nginx/nginx-tests limit_req_delay.t",
        limit_req(30, 2, delay=1),
        # The first request runs, the second is within the delay, the third waits, the fourth is rejected.
        arrivals((0, 0), (0, 0), (0, 2), (0.2, None)),
    ),
    Table(
        "ten at once without a burst",
        "sportebois/nginx-rate-limit-sandbox, 30r/m",
        limit_req(30, 0),
        arrivals((0, 0), *((0, None) for _ in range(9))),
    ),
    Table(
        "ten at once, burst=5",
        "sportebois/nginx-rate-limit-sandbox, 30r/m",
        limit_req(30, 5),
        arrivals((0, 0), (0, 2), (0, 4), (0, 6), (0, 8), (0, 10), *((0, None) for _ in range(4))),
    ),
    Table(
        "ten at once, burst=5 nodelay",
        "sportebois/nginx-rate-limit-sandbox, 30r/m",
        limit_req(30, 5, delay=5),
        arrivals(*((0, 0) for _ in range(6)), *((0, None) for _ in range(4))),
    ),
]

# --- Sentinel, LeapArray ----------------------------------------------------------------------------------------


def leap_array(interval: int, samples: int, capacity: int = 100) -> Rule:
    return {"algorithm": "sliding_window", "capacity": capacity, "period": interval, "sub_windows": samples}


def passes(*steps: tuple[Any, int, int]) -> tuple[tuple[Line, dict[str, Any]], ...]:
    """(at, passed now, sum over the live buckets) rows, of a capacity of 100."""
    return tuple(
        ({"at": Decimal(str(at)), "cost": cost}, {"allowed": True, "remaining": 100 - total})
        for at, cost, total in steps
    )


TABLES += [
    Table(
        "testGetValidHead",
        "alibaba/Sentinel LeapArrayTest",
        leap_array(1, 10),
        passes(
            *((Decimal(n) / 10, n + 1, (n + 1) * (n + 2) // 2) for n in range(10)),
            (Decimal("0.999999"), 0, 55),  # the first bucket is the head while the tenth is current
            (1, 0, 54),  # the second is, one bucket later
        ),
    ),
    Table(
        "testWindowAfterOneInterval",
        "alibaba/Sentinel BucketLeapArrayTest",
        leap_array(2, 2),
        passes((7, 1, 1), (7.5, 1, 2), (8, 0, 2), (8.999999, 0, 2), (9, 0, 0)),
    ),
    Table(
        "testListWindowsResetOld",
        "alibaba/Sentinel BucketLeapArrayTest",
        leap_array(1, 10),
        passes((5.03, 1, 1), (5.13, 1, 2), (6.13, 1, 1)),
    ),
    Table(
        "testListWindowsNewBucket",
        "alibaba/Sentinel BucketLeapArrayTest",
        leap_array(1, 10),
        passes((5.03, 1, 1), (5.13, 1, 2), (6.33, 1, 1)),
    ),
]
