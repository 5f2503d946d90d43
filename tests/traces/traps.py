"""Traps: faults of other rate limiters that a trace can show, each with the promise that the fault breaks."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from tests.traces.cases import Line, Table, tries

Steps = tuple[tuple[Line, dict[str, Any]], ...]


@dataclass(frozen=True)
class Trap(Table):
    """A trace whose expected answers a limiter with the fault does not give; `source` is the broken promise."""


def bucket(capacity: int, rate: str, period: str = "1", **more: Any) -> dict[str, Any]:
    return {
        "algorithm": "token_bucket",
        "capacity": capacity,
        "rate": Decimal(rate),
        "period": Decimal(period),
        **more,
    }


def step(at: Any, expected: dict[str, Any], **fields: Any) -> tuple[Line, dict[str, Any]]:
    return {"at": Decimal(str(at)), **fields}, expected


ALLOWED, REFUSED = {"allowed": True}, {"allowed": False}
DIGITS = "Lua numbers are truncated to integers on return; tostring, .. and cjson keep 14 digits"
DEBT = "A key's time to live must outlast its debt; a TTL that rounds to 0 makes the limit vanish"
BACK = "A clock that steps back must not mint permits"
AHEAD = "nor may one that jumped ahead lock a key out"
FRACTION = "Whole-second clocks and floored refills admit the wrong amount at fractional rates"
DENIED = "A denied hit, or a sibling's, must not be charged; a poller at a fixed pace must not starve"
NEVER = "A cost larger than the capacity can never pass: retry_after is None"
EDIT = "Raising or lowering a limit mid-flight keeps what was already spent"
DRIFT = "no rounding adds up from one decision to the next"
BIRTH = "a bucket with initial: empty fills from its first request, also when that is refused"

LATE = "1774745999.999999"  # sixteen digits in µs


def every_algorithm(capacity: int, slow: str) -> dict[str, dict[str, Any]]:
    """Return one rule of each algorithm that admits `capacity` at once and then nothing for a while."""
    seconds = Decimal(slow)
    return {
        "fixed_window": {"period": seconds, "capacity": capacity},
        "fixed_window first_hit": {"period": seconds, "capacity": capacity, "window_start": "first_hit"},
        "calendar_window": {"calendar_unit": "year", "timezone": "UTC", "capacity": capacity},
        "sliding_window": {"period": seconds, "capacity": capacity, "sub_windows": 10},
        "sliding_window weighted": {"period": seconds, "capacity": capacity, "sub_windows": 1, "weighted": True},
        "sliding_log": {"period": seconds, "capacity": capacity},
        "token_bucket": {"rate": 1, "period": seconds, "capacity": capacity},
        "gcra": {"rate": 1, "period": seconds, "capacity": capacity},
        "leaky_bucket": {"rate": 1, "period": seconds, "capacity": capacity},
        "leaky_bucket_queue": {
            "rate": 1,
            "period": seconds,
            "capacity": capacity - 1,
            "delay_after": capacity - 1,
        },
        "concurrency": {"lease_ttl": seconds, "capacity": capacity},
    }


def rule_of(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {"algorithm": name.split()[0], **fields}


TRAPS: list[Trap] = [
    Trap(
        "a moment of sixteen digits keeps its last",
        DIGITS,
        bucket(1, "3"),
        (
            step(LATE, ALLOWED),
            step(LATE, {"allowed": False, "retry_after": 0.333334, "reset_after": 0.333334}),
            step("1774746000.333332", {"allowed": False, "retry_after": 0.000001}),
            step("1774746000.333333", ALLOWED),
        ),
    ),
    Trap(
        "a window's start keeps its last digit",
        DIGITS,
        {"algorithm": "fixed_window", "capacity": 1, "period": 10, "window_start": "first_hit"},
        (
            step(LATE, ALLOWED),
            step("1774746009.999998", {"allowed": False, "retry_after": 0.000001}),
            step("1774746009.999999", ALLOWED),
        ),
    ),
    Trap(
        "a log's entry keeps its last digit",
        DIGITS,
        {"algorithm": "sliding_log", "capacity": 1, "period": 10},
        (
            step(LATE, ALLOWED),
            step("1774746009.999998", {"allowed": False, "retry_after": 0.000001}),
            step("1774746009.999999", ALLOWED),
        ),
    ),
    Trap("100 a second, 10 at once: 10 of 50", DEBT, bucket(10, "100"), tries(*((7, 1, n < 10) for n in range(50)))),
    Trap("rate above twice the capacity", DEBT, bucket(1, "10"), tries(*((7, 1, n < 1) for n in range(5)))),
    Trap(
        "a debt of many periods is still owed",
        DEBT,
        bucket(1, "1", "10"),
        (
            *(step(0, {"wait": 10 * n}, op="acquire") for n in range(20)),
            step(199.999999, {"allowed": False, "retry_after": 0.000001}),
            step(200, ALLOWED),
        ),
    ),
    Trap(
        "0.9 a second for 30 seconds: 28 of 30",
        FRACTION,
        bucket(2, "0.9"),
        tries(*((n, 1, n not in (11, 21)) for n in range(30))),
    ),
    Trap(
        "a poller at a fixed pace passes as soon as it may",
        DENIED,
        {"algorithm": "sliding_log", "capacity": 2, "period": 10},
        tries(*((n, 1, n % 10 < 2) for n in range(60))),
    ),
    Trap(
        "what a sibling refuses costs nothing",
        DENIED,
        [bucket(5, "1", "1000"), {"algorithm": "concurrency", "capacity": 1, "lease_ttl": 10}],
        (
            step(0, {"allowed": True, "remaining": 0}),
            *(step(1, {"allowed": False, "limit": 1, "remaining": 0, "retry_after": 9}) for _ in range(10)),
            step(10, {"allowed": True, "remaining": 0}),
            step(20, {"allowed": True, "remaining": 0}),
            step(30, {"allowed": True, "remaining": 0}),
            step(40, {"allowed": True, "remaining": 0}),
            step(50, {"allowed": False, "limit": 5, "retry_after": 950}),
        ),
    ),
    Trap(
        "three in seven seconds, to the microsecond",
        DRIFT,
        bucket(2, "3", "7"),
        (
            step(0, ALLOWED, cost=2),
            *(
                one
                for n in range(1, 60)
                for third in (-(-7_000_000 * n // 3),)
                for one in (step(Decimal(third - 1) / 10**6, REFUSED), step(Decimal(third) / 10**6, ALLOWED))
            ),
        ),
    ),
    Trap(
        "a million in thirty days, to the microsecond",
        DRIFT,
        {"algorithm": "gcra", "capacity": 1, "rate": 1_000_000, "period": 2_592_000},
        (
            *(step(Decimal("2.592") * n, ALLOWED) for n in range(50)),
            step(Decimal("2.592") * 50 - Decimal("0.000001"), {"allowed": False, "retry_after": 0.000001}),
        ),
    ),
    Trap(
        "an empty bucket fills from its first, refused request",
        BIRTH,
        bucket(2, "1", initial="empty"),
        (
            step(100, {"allowed": False, "retry_after": 1, "remaining": 0}),
            step("100.999999", REFUSED),
            step(101, {"allowed": True, "remaining": 0}),
        ),
    ),
    Trap(
        "a request that can never pass brings no bucket into being",
        BIRTH,
        bucket(2, "1", initial="empty"),
        (
            step(100, {"allowed": False, "retry_after": None}, cost=3),
            step(101, {"allowed": False, "retry_after": 1}),
        ),
    ),
    Trap(
        "a lower capacity keeps what was spent",
        EDIT,
        bucket(10, "1", "100"),
        (
            step(0, {"remaining": 3}, cost=7),
            step(0, {"remaining": 0, "limit": 5}, op="set_rule", rule=bucket(5, "1", "100")),
            step(0, {"allowed": False, "retry_after": 300}),
            step(300, ALLOWED),
        ),
    ),
    Trap(
        "time that a swinging clock counts twice is counted once",
        BACK,
        bucket(3, "1", "1000"),
        (
            step(1030, {"remaining": 2, "reset_after": 1000}),
            step(1000, {"remaining": 1, "reset_after": 2000}),
            step(1030, {"remaining": 0, "reset_after": 3000}),
            step(1000, {"allowed": False, "retry_after": 1000}),
            step(1040, {"allowed": False, "retry_after": 990}),
        ),
    ),
    Trap(
        "another rate keeps what was spent, in permits",
        EDIT,
        bucket(10, "1", "100"),
        (
            step(0, {"remaining": 3, "reset_after": 700}, cost=7),
            step(50, {"remaining": 3, "reset_after": 65}, op="set_rule", rule=bucket(10, "1", "10")),
            step(50, {"allowed": False, "retry_after": 35}, cost=7),
            step(85, {"allowed": True, "remaining": 0}, cost=7),
        ),
    ),
    Trap(
        "a higher capacity adds only the difference",
        EDIT,
        {"algorithm": "sliding_log", "capacity": 3, "period": 100},
        (
            step(0, {"remaining": 0}, cost=3),
            step(1, {"remaining": 2}, op="set_rule", rule={"algorithm": "sliding_log", "capacity": 5, "period": 100}),
            step(1, {"allowed": True, "remaining": 0}, cost=2),
            step(1, REFUSED),
        ),
    ),
]

TRAPS.append(
    Trap(
        "a refusal remembers that the clock was put right",
        AHEAD,
        bucket(2, "1", "1000"),
        (
            step(10**6, ALLOWED, cost=2),
            step(10**5, {"allowed": False, "retry_after": 1000, "reset_after": 2000}),
            step(10**5 + 2000, {"allowed": True, "remaining": 0}, cost=2),
        ),
    )
)
for _name, _fields in every_algorithm(3, "1000").items():
    _rule = rule_of(_name, _fields)
    _late = Decimal("63072000")  # 1972-01-01: windows of every length begin here
    TRAPS += [
        Trap(
            f"{_name}: a clock that steps back mints nothing",
            BACK,
            _rule,
            # If the 50 seconds after the clock's step back counted twice, one more request would pass at 990.
            tries(
                *((_late + at, 1, True) for at in (30, -20, 30)),
                *((_late + at, 1, False) for at in (30, -20, 30, 990)),
            ),
        ),
        Trap(
            f"{_name}: a clock that jumped ahead and was put right locks nobody out",
            AHEAD,
            _rule,
            (*tries((_late * 40, 2, True)), *tries((_late, 1, True), (_late, 1, False), (_late * 2, 3, True))),
        ),
        Trap(
            f"{_name}: what cannot pass is never told to come back",
            NEVER,
            _rule,
            (
                step(_late, {"allowed": False, "retry_after": None, "remaining": 3}, cost=4),
                step(_late, {"allowed": False, "retry_after": None}, cost=4, op="acquire"),
                step(_late, {"allowed": False, "retry_after": None}, cost=4, timeout=10**6),
                step(_late, {"allowed": True, "remaining": 0}, cost=3),
            ),
        ),
    ]
