"""Draw random traces from a seed: bursts, pauses, times at exact boundaries, clocks that jump, and edits of the rule.

A trace is drawn while the model answers it. So many of its lines are at moments at which answers change: exactly at the
moment that a refusal named, and just before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from random import Random
from typing import Any

from tests.reference import Replay
from tests.traces.rules import LONGEST, RULES, SLOW, edited, is_large, random_rule, slowness

Line = dict[str, Any]
Answer = dict[str, Any]

MICRO = Decimal("0.000001")
STARTS = ("0", "1000000000", "1431857100.25", "1774745999.999999", "61", "1761437000", "31536000.000001")
HALF_A_YEAR = 15_768_000
SCALES = {"hour": 3600, "day": 86400, "week": 604800, "month": 2629746, "year": 31556952, "billing_period": 2629746}
"""The mean length in seconds of each calendar unit."""


def us(micros: int) -> Decimal:
    return Decimal(micros) * MICRO


class Clock:
    """The time of a trace in µs, and how it advances."""

    def __init__(self, draw: Random, start: int) -> None:
        self.draw = draw
        self.now = start
        self.origin = start

    def advance(self, unit: int, answer: Answer | None) -> None:
        """Move the clock to the time of the next line; `unit` is a length of time that fits the rule."""
        draw = self.draw
        kind = draw.random()
        told = [answer[field] for field in ("retry_after", "reset_after", "wait")] if answer else []
        named = [round(seconds * 1_000_000) for seconds in told if seconds]
        if kind < 0.30:
            return
        if kind < 0.45:
            self.now += draw.choice((1, 2, 3, draw.randint(1, max(2, unit // 10))))
        elif kind < 0.60:
            self.now += draw.choice((unit, 2 * unit, unit // 2, unit - 1, unit + 1, draw.randint(0, 3 * unit)))
        elif kind < 0.80 and named:
            self.now += max(0, draw.choice(named) - draw.choice((0, 0, 0, 1, 2)))
        elif kind < 0.88:
            self.now += draw.choice((10 * unit, draw.randint(0, 50 * unit), 60_000_000, 60_000_001))
        elif kind < 0.97:
            self.now -= draw.choice((1, 59_999_999, 60_000_000, draw.randint(0, 60_000_000), draw.randint(0, unit)))
        elif kind < 0.985:
            self.now -= draw.choice((60_000_001, 3_600_000_000, draw.randint(60_000_001, 10**11)))
        else:
            self.now += draw.choice((3_600_000_000, draw.randint(0, 10**11), 86_400_000_000))
        self.now = max(0, self.now)
        if self.now > self.origin + HALF_A_YEAR * 40 * 1_000_000:
            self.now = self.origin


def scale(rule: Any) -> int:
    """Return a length of time (µs) after which this rule's answers change."""
    if isinstance(rule, list):
        return scale(rule[0])
    if rule.get("calendar_unit"):
        return SCALES[rule["calendar_unit"]] * 1_000_000
    if rule.get("rate"):
        return max(1, int(1_000_000 * rule["period"] / rule["rate"]))
    if rule.get("lease_ttl"):
        return int(1_000_000 * rule["lease_ttl"])
    return max(1, int(1_000_000 * rule["period"]) // int(rule.get("sub_windows") or 1))


def random_cost(draw: Random, rule: Any) -> int:
    rules = rule if isinstance(rule, list) else [rule]
    capacity = rules[0].get("capacity", 10)
    kind = draw.random()
    if kind < 0.06:
        cost = draw.choice((capacity + 1, capacity + 2, 10 * capacity))
    elif kind < 0.12:
        cost = 0
    else:
        cost = draw.choice((1, 1, 1, 1, 2, 3, max(1, capacity), max(1, capacity // 2), draw.randint(1, capacity + 1)))
    # A line whose cost takes longer than 142 years is not valid.
    slowest = max(slowness(one) for one in rules)
    return cost if cost * slowest < LONGEST / 2 else 1


def random_timeout(draw: Random, unit: int) -> Any:
    return draw.choice(
        (0, -1, us(unit), us(unit - 1), us(3 * unit), us(draw.randint(0, 20 * unit)), 1, Decimal("0.25"), 10**7)
    )


SHARES = {
    "try_acquire": 60,
    "acquire": 15,
    "peek": 10,
    "refund": 6,
    "release": 3,
    "create": 3,
    "reset": 1,
    "set_rule": 2,
}
OPS = [op for op, share in SHARES.items() for _ in range(share)]


def random_line(draw: Random, at: Decimal, rule: Any, large: bool = False) -> Line:
    line: Line = {"at": at, "op": draw.choice(OPS)}
    if line["op"] == "set_rule":
        line["rule"] = (
            [edited(draw, one, large) for one in rule] if isinstance(rule, list) else edited(draw, rule, large)
        )
    optional = (
        (0.9, "key", lambda: draw.choice(("a", "a", "a", "b", "user:42", "клю|ч"))),
        (0.8, "cost", lambda: random_cost(draw, rule)),
        (0.3, "timeout", lambda: random_timeout(draw, scale(rule))),
        (0.3, "lease", lambda: draw.choice(("x", "y", "", "z"))),
    )
    for chance, field, value in optional:
        if draw.random() < chance:
            line[field] = value()
    return line


def traffic(draw: Random, rule: Any, length: int) -> Iterator[tuple[Line, Answer]]:
    """Return `length` lines under a rule (or a list), each with the model's answer."""
    model = Replay(rule)
    large = any(map(is_large, rule if isinstance(rule, list) else [rule]))
    clock = Clock(draw, int(Decimal(draw.choice(STARTS)) * 1_000_000))
    answer: Answer | None = None
    for _ in range(length):
        clock.advance(scale(rule), answer)
        line = random_line(draw, us(clock.now), rule, large)
        answer = model.step(line)
        rule = line.get("rule", rule)
        yield line, answer


def random_rules(draw: Random, algorithm: str) -> Any:
    """Return a rule of one algorithm; in one of six cases, a list of up to five rules that begins with it."""
    first = random_rule(draw, algorithm)
    if draw.random() < 5 / 6:
        return first
    others = [random_rule(draw, draw.choice(list(RULES))) for _ in range(draw.randint(1, 4))]
    together = [first, *others]
    if any(is_large(rule) for rule in together) and any(slowness(rule) > SLOW for rule in together):
        return first
    return together
