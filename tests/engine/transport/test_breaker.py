"""Test when the breaker lets calls through."""

from __future__ import annotations

import pytest

from ratelimits.engine.transport.breaker import FAILURES, PAUSE, Breaker
from tests.support.entry_points import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_it_takes_several_failures_in_a_row(clock: Clock) -> None:
    breaker = Breaker(clock)
    for _ in range(5):
        for _ in range(FAILURES - 1):
            breaker.failed()
        assert breaker.closed
        breaker.succeeded()
    for _ in range(FAILURES):
        assert breaker.closed
        breaker.failed()
    assert not breaker.closed


def test_calls_that_one_lost_connection_failed_are_one_failure(clock: Clock) -> None:
    breaker = Breaker(clock)
    for _ in range(FAILURES):
        event = object()
        assert breaker.closed
        for _call in range(100):
            breaker.failed(event)
    assert not breaker.closed


def test_after_the_pause_one_call_tries_and_nobody_else(clock: Clock) -> None:
    breaker = Breaker(clock)
    for _ in range(FAILURES):
        breaker.failed()
    clock.now += PAUSE - 0.001
    assert not breaker.closed
    clock.now += 0.001
    assert [breaker.closed for _ in range(3)] == [True, False, False]
    breaker.failed()
    assert not breaker.closed
    clock.now += PAUSE
    assert [breaker.closed] == [True]
    breaker.succeeded()
    assert [breaker.closed for _ in range(3)] == [True] * 3


def test_a_trial_that_never_came_back_is_made_again(clock: Clock) -> None:
    breaker = Breaker(clock)
    for _ in range(FAILURES):
        breaker.failed()
    for _ in range(3):
        clock.now += PAUSE
        assert breaker.closed
        assert not breaker.closed
