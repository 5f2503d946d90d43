"""Draw rules at random: round and odd rates, short and long periods, small and large capacities."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from random import Random
from typing import Any

Rule = dict[str, Any]

PACES = (
    ("5", "1"),
    ("1", "1"),
    ("10", "1"),
    ("0.9", "1"),
    ("3", "7"),
    ("100", "60"),
    ("1000000", "2592000"),
    ("0.123457", "1"),
    ("33.333333", "1"),
    ("1.000001", "0.999999"),
    ("7", "0.3"),
    ("3000000", "1"),
    ("0.000701", "1"),
    ("2", "86400"),
    ("999.999", "13.37"),
    ("30", "60"),
)
"""(rate, period in seconds)."""
CAPACITIES = (0, 1, 2, 3, 3, 5, 7, 10, 10, 20, 100, 1000, 1_000_000)
PERIODS = ("1", "10", "60", "0.5", "3600", "7", "86400", "0.000012", "13.37", "2592000", "2")
LONGEST = 4_503_599_627
"""Seconds that the scripts can look ahead: 142 years."""
SLOW = 10
"""Seconds that a permit may take where a million fit."""
ZONES = (
    "UTC",
    "Europe/Berlin",
    "America/New_York",
    "Asia/Kathmandu",
    "Australia/Lord_Howe",
    "America/Sao_Paulo",
    "Pacific/Apia",
    "Africa/Cairo",
)
ANCHORS = (
    "2026-01-31T06:00",
    "2024-02-29T00:00",
    "2026-03-29T02:30",
    "2025-10-26T02:30:15",
    "2026-01-15T23:59:59",
    "2000-12-31T12:00",
)
UNITS = ("hour", "day", "week", "month", "year", "billing_period")
QUARTERS = frozenset(("00:00", "15:00", "30:00", "45:00"))
"""Minutes and seconds at which billing periods can start: usage is counted in quarters of an hour."""


def pace(draw: Random) -> Rule:
    rate, period = draw.choice(PACES)
    return {"rate": Decimal(rate), "period": Decimal(period)}


def fixed_window(draw: Random) -> Rule:
    rule: Rule = {"capacity": draw.choice(CAPACITIES), "period": Decimal(draw.choice(PERIODS))}
    return rule | draw.choice(({}, {"window_start": "epoch"}, {"window_start": "first_hit"}))


def calendar_window(draw: Random) -> Rule:
    return {
        "capacity": draw.choice(CAPACITIES),
        "calendar_unit": draw.choice(UNITS),
        "timezone": draw.choice(ZONES),
        **draw.choice(({}, {"anchor": draw.choice(ANCHORS)})),
    }


def sliding_window(draw: Random) -> Rule:
    period = Decimal(draw.choice(PERIODS))
    return {
        "capacity": draw.choice(CAPACITIES),
        "period": period,
        "sub_windows": draw.choice([n for n in (1, 1, 2, 3, 4, 5, 10, 12) if int(period * 1_000_000) % n == 0]),
        "weighted": draw.random() < 0.5,
    }


def sliding_log(draw: Random) -> Rule:
    return {"capacity": draw.choice(CAPACITIES), "period": Decimal(draw.choice(PERIODS))}


def token_bucket(draw: Random) -> Rule:
    rule = {"capacity": draw.choice(CAPACITIES), **pace(draw)}
    return rule | {"initial": draw.choice(("full", "full", "empty", draw.randint(0, rule["capacity"])))}


def level(draw: Random) -> Rule:
    return {"capacity": draw.choice(CAPACITIES), **pace(draw)}


def leaky_bucket_queue(draw: Random) -> Rule:
    capacity = draw.choice(CAPACITIES)
    return {"capacity": capacity, **pace(draw), "delay_after": draw.choice((0, 0, capacity, draw.randint(0, capacity)))}


def smooth_bursty(draw: Random) -> Rule:
    return {**pace(draw), "max_burst_seconds": Decimal(draw.choice(("1", "1", "5", "0.5", "60", "2.718281")))}


def smooth_warming_up(draw: Random) -> Rule:
    return {
        **pace(draw),
        "warm_up": Decimal(draw.choice(("4", "1", "10", "0.3", "60"))),
        "cold_factor": draw.choice((Decimal(1), Decimal(2), 3, 3, Decimal(10), Decimal("2.5"))),
    }


def concurrency(draw: Random) -> Rule:
    return {"capacity": draw.choice(CAPACITIES), "lease_ttl": Decimal(draw.choice(("1", "30", "60", "0.25", "600")))}


RULES: dict[str, Callable[[Random], Rule]] = {
    "fixed_window": fixed_window,
    "calendar_window": calendar_window,
    "sliding_window": sliding_window,
    "sliding_log": sliding_log,
    "token_bucket": token_bucket,
    "gcra": level,
    "leaky_bucket": level,
    "leaky_bucket_queue": leaky_bucket_queue,
    "smooth_bursty": smooth_bursty,
    "smooth_warming_up": smooth_warming_up,
    "concurrency": concurrency,
}


def random_rule(draw: Random, algorithm: str) -> Rule:
    """Return a valid rule of one algorithm."""
    while True:
        rule = {"algorithm": algorithm, **RULES[algorithm](draw)}
        if coherent(rule):
            return rule


def slowness(rule: Rule) -> Decimal:
    """Return the seconds that one permit takes; 0 if permits do not come back one by one."""
    return rule["period"] / rule["rate"] if rule.get("rate") else Decimal(0)


def edited(draw: Random, rule: Rule, large: bool) -> Rule:
    """Return a rule that replaces this one: mostly the same algorithm, with one or all numbers changed."""
    while True:
        other = random_rule(draw, draw.choice(list(RULES)) if draw.random() < 0.1 else rule["algorithm"])
        if other["algorithm"] == rule["algorithm"] and draw.random() < 0.5:
            field = draw.choice([field for field in rule if field != "algorithm"])
            other = rule | {field: other.get(field)}
        if coherent(other) and (slowness(other) <= SLOW if large else not is_large(other)):
            return other


def is_large(rule: Rule) -> bool:
    """Return whether the capacity is so large that slow permits would take longer than 142 years."""
    return bool(rule.get("capacity", 0) > 1000)


def coherent(rule: Rule) -> bool:
    """Return whether the rule is valid: the app refuses a capacity that takes more than 142 years to refill."""
    if slowness(rule) * max(rule.get("capacity", 0) + 1, 1000) > LONGEST or (is_large(rule) and slowness(rule) > SLOW):
        return False
    initial, delay_after = rule.get("initial"), rule.get("delay_after")
    if isinstance(initial, int) and initial > rule["capacity"]:
        return False
    if delay_after is not None and delay_after > rule["capacity"]:
        return False
    if rule.get("calendar_unit") == "billing_period" and rule.get("anchor"):
        return f"{rule['anchor']}:00"[14:19] in QUARTERS
    if rule["algorithm"] == "sliding_window":
        return int(rule["period"] * 1_000_000) % int(rule["sub_windows"] or 10) == 0
    return True
