"""Test that the model agrees with the published test cases of other projects."""

from __future__ import annotations

import pytest

from tests.reference import Replay
from tests.traces import cases, guava, published


@pytest.mark.parametrize("case", guava.EVENTS, ids=lambda case: case.name)
def test_guava_waits(case: cases.Events) -> None:
    case.play(Replay)


@pytest.mark.parametrize("case", [*guava.TABLES, *published.TABLES], ids=lambda case: case.name)
def test_published_table(case: cases.Table) -> None:
    case.play(Replay)


@pytest.mark.parametrize("seed", range(3))
def test_guava_never_bursts_for_more_than_a_second(seed: int) -> None:
    guava.play_bursts_of_a_second(Replay, seed)


@pytest.mark.parametrize("seed", range(10))
def test_guava_warm_up_takes_its_time_in_any_portions(seed: int) -> None:
    guava.play_warm_up_in_any_portions(Replay, seed)
