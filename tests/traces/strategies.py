"""Hypothesis strategies for the same rules and lines as the random traffic in traffic.py."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.traces.rules import RULES, random_rule
from tests.traces.traffic import Answer, Line, random_line, random_rules, scale, traffic, us

ALGORITHMS = sorted(RULES)
#: A trace has no line after this time (µs, in the year 2096): the app accepts times until 2112, and waits may be long.
LATEST = 4_000_000_000_000_000


def rules(*algorithms: str) -> st.SearchStrategy[Any]:
    """Return a strategy for one rule of the named algorithms (default: any)."""
    kinds = st.sampled_from(algorithms or ALGORITHMS)
    return st.builds(random_rule, st.randoms(use_true_random=False), kinds)


def rules_or_lists() -> st.SearchStrategy[Any]:
    """Return a strategy for one rule, or sometimes a list of rules."""
    return st.builds(random_rules, st.randoms(use_true_random=False), st.sampled_from(ALGORITHMS))


@st.composite
def traces(draw: st.DrawFn, *algorithms: str, length: int = 30) -> tuple[Any, list[tuple[Line, Answer]]]:
    """Return a strategy for a rule, and lines of every kind with the model's answers."""
    rule = draw(rules(*algorithms))
    return rule, list(traffic(draw(st.randoms(use_true_random=False)), rule, length))


@st.composite
def steady_lines(
    draw: st.DrawFn, rule: Any, ops: tuple[str, ...] = ("try_acquire",), length: int = 12, timeouts: bool = False
) -> list[Line]:
    """Return a strategy for lines of one key, whose clock never steps back and whose rule never changes."""
    unit = scale(rule)
    now, lines = draw(st.sampled_from((0, 1_000_000_000_000_000, 1_774_745_999_999_999))), []
    random = draw(st.randoms(use_true_random=False))
    gaps = (0, 0, 0, 1, unit // 3, unit - 1, unit, unit + 1, 2 * unit, 7 * unit, 40 * unit)
    for _ in range(draw(st.integers(1, length))):
        now += draw(st.one_of(st.sampled_from(gaps), st.integers(0, 3 * unit)))
        if now > LATEST:
            break
        line = random_line(random, us(now), rule)
        line = {"at": line["at"], "op": draw(st.sampled_from(ops)), "cost": line.get("cost", 1)}
        if timeouts and draw(st.booleans()):
            line["timeout"] = us(draw(st.integers(0, 5 * unit)))
        lines.append(line)
    return lines
