"""Test the fast path: each of its guards is needed, because without it some traffic would be answered wrongly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest

from ratelimits.engine import decide
from tests.support.engine.asking import NOW, SECOND, limit
from tests.support.engine.guards import NO_FAST_PATH, Edit
from tests.traces.agreement import Disagreement, first_difference
from tests.traces.rules import random_rule
from tests.traces.traffic import traffic

#: The algorithms that the fast path decides.
USUAL = ("token_bucket", "leaky_bucket", "gcra", "fixed_window", "calendar_window")
#: Name of a guard -> its line in the script, and the text that replaces it.
LINES = {
    "a clock that steps back under a level": ("if values[j + 5] ~= q or now < last then", "if values[j + 5] ~= q then"),
    "a clock that steps back under a level of fractions": ("if now < last or more >", "if more >"),
    "a clock that steps back in a window": ("        if now < last then return end\n", ""),
    "a window that has ended": (
        "if remaining < 0 or reset <= 0 then return end",
        "if remaining < 0 then return end",
    ),
    "a window that is full": (
        "if remaining < 0 or reset <= 0 then return end",
        "if reset <= 0 then return end",
    ),
    "a level that is full": ("        if remaining < 0 then return end\n", ""),
    "a level of fractions that is full": ("        if room < 0 then return end\n", ""),
    "a level that has drained": ("T = (T > 0 and T or 0) + cost * q", "T = T + cost * q"),
    "a level of fractions that has drained": ("if T < 0 then T, g = 0, 0 end", ""),
    "the fraction of a level that has drained": ("if T < 0 then T, g = 0, 0 end", "if T < 0 then T = 0 end"),
    "a fraction that is carried": ("if g >= n then T, g = T + 1, g - n end", ""),
    "a cost of nothing": ("      if cost == 0 then return end\n", ""),
    "whole permits of fractions": ("          remaining = remaining - 1\n", ""),
    "the one with least left": ("if remaining < least_remaining or", "if remaining > least_remaining or"),
    "the longest reset": ("if reset > longest_reset then", "if reset < longest_reset then"),
}
#: The same for cases that no replay has: edited rules, other limits beside them, or different costs.
AMONG_OTHERS = {
    "another pace": ("if values[j + 5] ~= q or now < last then", "if now < last then"),
    "another pace of fractions": (
        "if values[j + 5] ~= q or values[j + 6] ~= r or values[j + 7] ~= n then return end",
        "",
    ),
    "another period": ("if length ~= start_or_length or start % length ~= 0 then return end", ""),
    "another calendar window": ("elseif start ~= start_or_length or start + length ~= stop then", "elseif false then"),
    "a cost of its own": ("if numbers[at + 4] > 1 then cost =", "if false then cost ="),
    "records that lie elsewhere": ("          values = nil\n          break\n", "          break\n"),
    "records of other limits": (".. string.sub(raw, bytes + 1)", ""),
}


def runs() -> Iterator[tuple[Any, list[Any]]]:
    """Return seeded traces under one, two and three rules that the fast path knows."""
    for seed in range(60):
        draw = Random(f"the short way {seed}")
        several = [random_rule(draw, draw.choice(USUAL)) for _ in range(1 + seed % 3)]
        rule = several if len(several) > 1 else several[0]
        yield rule, list(traffic(draw, rule, 120))


def difference(open_replay: Callable[[Any], Any]) -> Disagreement | None:
    """Return the first difference between the scripts and the model, or None."""
    for rule, pairs in runs():
        lines, answers = [line for line, _ in pairs], [answer for _, answer in pairs]
        found = first_difference(open_replay, rule, lines, answers)
        if found is not None:
            return found
    return None


def test_it_agrees_with_the_model(open_replay: Callable[[Any], Any]) -> None:
    assert difference(open_replay) is None


@pytest.mark.parametrize("line", LINES)
def test_without_one_of_its_lines_it_does_not(
    line: str, open_replay: Callable[[Any], Any], take_out: Callable[..., None]
) -> None:
    take_out(("fast", *LINES[line]))
    assert difference(open_replay) is not None


def edited(draw: Random, key: str) -> list[dict[str, Any]]:
    """Return a few limits of a key, at random: some of the possible ones, with numbers out of a few."""
    chosen = []
    for name in draw.sample("abcd", draw.randint(1, 4)):
        algorithm = {"a": "token_bucket", "b": "leaky_bucket", "c": "fixed_window", "d": "calendar_window"}[name]
        kinds: dict[str, dict[str, Any]] = {
            "a": {"rate": draw.choice([2, 5]), "period": 10},
            "b": {"rate": draw.choice([2, 3, 7]), "period": 10},
            "c": {"period": draw.choice([5, 10])},
            "d": {"calendar_unit": draw.choice(["hour", "day"])},
        }
        chosen.append({"algorithm": algorithm, "name": name, "key": key, "cost": draw.randint(1, 3), **kinds[name]})
    return chosen


def answers(seed: int, key: str) -> list[tuple[int, ...]]:
    """Return the answers to a trace of decisions about a key that was never seen."""
    draw, now, told = Random(seed), NOW, []
    for _ in range(40):
        now += draw.choice([0, 1, SECOND // 3, SECOND, 4 * SECOND, 1800 * SECOND])
        limits = [limit(one.pop("algorithm"), capacity=12, since=now, **one) for one in edited(draw, key)]
        told.append(tuple(decide(limits, now=now).reply))
    return told


def alike(take_out: Callable[..., None], *edits: Edit) -> bool:
    """Return whether both ways give the same answers to many traces."""
    seeds = range(12)
    take_out(*edits)
    fast = [answers(seed, f"user:short-{seed}") for seed in seeds]
    take_out(NO_FAST_PATH)
    return fast == [answers(seed, f"user:long-{seed}") for seed in seeds]


def test_among_others_it_decides_as_the_long_way_does(take_out: Callable[..., None]) -> None:
    assert alike(take_out)


@pytest.mark.parametrize("line", AMONG_OTHERS)
def test_without_one_of_its_lines_it_decides_otherwise(line: str, take_out: Callable[..., None]) -> None:
    assert not alike(take_out, ("fast", *AMONG_OTHERS[line]))
