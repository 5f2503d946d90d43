"""Test cases that other projects publish, translated into traces (Guava's are in guava.py). Only facts were copied.

These cases are left out, because the definitions here differ:
- golang.org/x/time/rate, a clock that steps back: Go counts time again from the earlier moment
  (TestLimiterJumpBackwards, TestReserveJumpBack, TestReserveJumpBackCancel); here the decision is clamped.
- golang.org/x/time/rate, cancelling: Go gives back less if others reserved meanwhile, and nothing after the
  reserved moment (TestCancel0Tokens, TestCancel1Token, TestCancelMulti, TestCancelTooLate,
  TestReserveSetLimitCancel). A refund here gives back its cost, but at most the spent permits.
- golang.org/x/time/rate, SetBurst keeps the remaining tokens (TestReserveSetBurst); here the spent permits are kept.
- golang.org/x/time/rate, limits of 0 and infinity; Guava, an infinite rate and a warm-up of 0: refused here.
- nginx counts in thousandths of a request and whole milliseconds; cases here are exact in both.
- Sentinel's LeapArray only holds counters: its cases are checked by `remaining`, which shows their sum.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from tests.traces.cases import Line, Rule, Table, patient, tries

# --- redis-cell, cell::tests::it_rate_limits --------------------------------------------------------------------

TABLES = [
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
    ),
]

# --- golang.org/x/time/rate, rate_test.go; its step d is 0.1 s --------------------------------------------------

GO = "golang/time rate/rate_test.go"


def go_bucket(rate: int, burst: int) -> Rule:
    return {"algorithm": "token_bucket", "capacity": burst, "rate": rate, "period": 1}


def reserves(*steps: tuple[int, int, int | None]) -> tuple[tuple[Line, dict[str, Any]], ...]:
    """Return a table from rows of (step of the request, cost, step granted or None)."""
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
    if burst == 0:
        # One request proceeds and none waits. A queue of capacity 0 would let nothing pass, so use a bucket of 1.
        return {"algorithm": "leaky_bucket", "capacity": 1, "rate": per_minute, "period": 60}
    return {
        "algorithm": "leaky_bucket_queue",
        "capacity": burst,
        "rate": per_minute,
        "period": 60,
        "delay_after": delay,
    }


def arrivals(*steps: tuple[Any, float | None]) -> tuple[tuple[Line, dict[str, Any]], ...]:
    """Return a table from rows of (at, seconds of delay or None for 503)."""
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
    """Return a table from rows of (at, passed now, sum over the live buckets), for a capacity of 100."""
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
            (Decimal("0.999999"), 0, 55),  # the tenth bucket is current, and the first bucket still counts
            (1, 0, 54),  # one bucket later, the second bucket is the first that counts
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
