"""Test every pair of algorithms in one decision: random traces of both rules together agree with the model."""

from __future__ import annotations

from itertools import combinations_with_replacement
from random import Random
from typing import Any

import pytest

from ratelimits.algorithms.limits import ALGORITHMS
from tests.traces.agreement import first_difference
from tests.traces.rules import random_rule
from tests.traces.traffic import traffic


@pytest.mark.parametrize(("one", "other"), list(combinations_with_replacement(ALGORITHMS, 2)))
def test_a_pair_of_algorithms_agrees_with_the_model(open_replay: Any, one: str, other: str, long_run: bool) -> None:
    for seed in range(40 if long_run else 1):
        draw = Random(f"{one} and {other} {seed}")
        rules = [random_rule(draw, one), random_rule(draw, other)]
        pairs = list(traffic(draw, rules, 200 if long_run else 40))
        lines, answers = [line for line, _answer in pairs], [answer for _line, answer in pairs]
        assert first_difference(open_replay, rules, lines, answers) is None
