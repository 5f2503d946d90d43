"""Test that the real scripts count in the billing periods of accounts like the exact model, also after edits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from random import Random
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from tests.reference import Replay as Model
from tests.traces.agreement import first_difference, shortest
from tests.traces.properties import admitted
from tests.traces.rules import ANCHORS, UNITS, ZONES, Rule, coherent, random_rule
from tests.traces.traffic import Answer, Clock, Line, scale, traffic, us

#: Starts of traces, in µs. One is in the year in which Samoa had no 30 December.
STARTS = (0, 1_325_000_000_000_000, 1_774_745_999_999_999, 1_795_132_800_000_000)


def terms(draw: Random) -> Rule:
    """Return a limit on the billing periods of an account whose terms are drawn."""
    while True:
        anchor = draw.choice(({}, {"anchor": draw.choice(ANCHORS)}))
        rule = {
            "algorithm": "calendar_window",
            "capacity": draw.choice((0, 1, 3, 10)),
            "calendar_unit": "billing_period",
            "timezone": draw.choice(ZONES),
            **anchor,
        }
        if coherent(rule):
            return rule


def account(draw: Random, rule: Rule, length: int) -> Iterator[tuple[Line, Answer]]:
    """Yield requests of an account whose terms are edited again and again, each with the model's answer."""
    model, clock = Model(rule), Clock(draw, draw.choice(STARTS))
    answer: Answer | None = None
    for _ in range(length):
        clock.advance(scale(rule), answer)
        line: Line = {"at": us(clock.now), "cost": draw.choice((0, 1, 1, 1, 2, 3)), "key": draw.choice("aab")}
        if draw.random() < 0.2:
            rule = terms(draw)
            line |= {"op": "set_rule", "rule": rule}
        elif draw.random() < 0.1:
            line |= {"op": draw.choice(("peek", "refund", "reset", "create"))}
        answer = model.step(line)
        yield line, answer


def test_accounts_whose_terms_are_edited(open_replay: Any, long_run: bool) -> None:
    for seed in range(300 if long_run else 12):
        draw = Random(f"terms {seed}")
        rule = terms(draw)
        lines, answers = zip(*account(draw, rule, 100), strict=True)
        found = first_difference(open_replay, rule, list(lines), list(answers))
        assert found is None, str(shortest(open_replay, found))


@pytest.mark.parametrize("unit", UNITS)
def test_random_traffic_of_each_unit(unit: str, open_replay: Any) -> None:
    rule = {"algorithm": "calendar_window", "capacity": 3, "calendar_unit": unit, "timezone": "Europe/Berlin"}
    for anchor in ({}, {"anchor": "2026-01-31T06:00"}):
        lines, answers = zip(*traffic(Random(unit), rule | anchor, 200), strict=True)
        found = first_difference(open_replay, rule | anchor, list(lines), list(answers))
        assert found is None, str(shortest(open_replay, found))


def test_traces_have_every_unit() -> None:
    drawn = [random_rule(Random(seed), "calendar_window") for seed in range(200)]
    assert {rule["calendar_unit"] for rule in drawn} == set(UNITS)
    assert {"anchor" in rule for rule in drawn if rule["calendar_unit"] == "billing_period"} == {True, False}


def number_of_period(moment: Any, zone: str, day: int, hour: int) -> int:
    """Return a number for the billing period of a moment (s), by the clocks of a zone: a new one begins on `day`."""
    local = datetime.fromtimestamp(int(moment), ZoneInfo(zone))
    return 12 * local.year + local.month - ((local.day, local.hour) < (day, hour))


@pytest.mark.parametrize("zone", ZONES)
def test_no_period_has_more_than_the_capacity(zone: str, open_replay: Any) -> None:
    draw, day, hour = Random(zone), 10, 12
    rule = {
        "algorithm": "calendar_window",
        "capacity": 5,
        "calendar_unit": "billing_period",
        "timezone": zone,
        "anchor": f"2024-01-{day}T{hour}:00",
    }
    now, lines = 1_735_689_600, list[Line]()
    for _ in range(300):
        now += draw.choice((0, 3_600, 86_400, draw.randrange(10 * 86_400)))
        lines.append({"at": us(now * 1_000_000), "op": "try_acquire", "cost": draw.randrange(1, 4)})
    taken: Counter[int] = Counter()
    asked: Counter[int] = Counter()
    for line in lines:
        asked[number_of_period(line["at"], zone, day, hour)] += line["cost"]
    for moment, cost in admitted(open_replay, rule, lines)[0]:
        taken[number_of_period(moment, zone, day, hour)] += cost
    assert max(taken.values()) == 5
    assert all(taken[period] >= min(asked[period], 5) - 2 for period in asked)
