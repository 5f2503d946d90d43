"""Test that the real scripts answer like the exact model, line by line."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from ratelimits.engine.transport.wire import Wire
from tests.traces import cases, guava, properties, published
from tests.traces.agreement import first_difference, shortest, trace
from tests.traces.machine import machine
from tests.traces.strategies import ALGORITHMS, rules, steady_lines

brief = settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("case", [*guava.EVENTS, *guava.TABLES, *published.TABLES], ids=lambda case: case.name)
def test_what_other_projects_publish(case: cases.Events | cases.Table, open_replay: Any) -> None:
    case.play(open_replay)


def test_guava_never_bursts_for_more_than_a_second(open_replay: Any) -> None:
    guava.play_bursts_of_a_second(open_replay, 1)


def test_guava_warm_up_takes_its_time_in_any_portions(open_replay: Any) -> None:
    guava.play_warm_up_in_any_portions(open_replay, 1)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("seed", range(3))
def test_random_traffic(algorithm: str, seed: int, open_replay: Any) -> None:
    """A sample of `python -m tests.long.agree`, which replays more than a million lines."""
    found = first_difference(open_replay, *trace(algorithm, seed, 400))
    assert found is None, str(shortest(open_replay, found))


def test_any_line_after_any_other(open_replay: Any) -> None:
    run_state_machine_as_test(
        machine(lambda: open_replay),
        settings=settings(max_examples=40, stateful_step_count=30),
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@brief
@given(data=st.data())
def test_retry_after_is_exact(algorithm: str, data: st.DataObject, open_replay: Any) -> None:
    rule = data.draw(rules(algorithm))
    lines = data.draw(steady_lines(rule, timeouts=True))
    properties.check_retry_after_is_exact(open_replay, rule, lines)


@brief
@given(data=st.data())
def test_several_limits_are_all_or_nothing(data: st.DataObject, open_replay: Any) -> None:
    several = data.draw(st.lists(rules(), min_size=2, max_size=5))
    lines = data.draw(steady_lines(several, ("try_acquire", "acquire", "peek"), timeouts=True))
    properties.check_all_or_nothing(open_replay, several, lines)


def test_scripts_that_the_server_forgot_are_loaded_again(wire: Wire, open_replay: Any) -> None:
    """NOSCRIPT can come at any time, also inside a pipeline."""
    rule, lines, answers = trace("token_bucket", "flush", 50)
    replay = open_replay(rule)
    for line, answer in zip(lines, answers, strict=True):
        assert list(replay.run([line])) == [answer]
        wire.client.script_flush()
