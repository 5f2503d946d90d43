"""Test that work which fails again and again is logged once, and in which order the last work begins."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from ratelimits.background import Background, _all
from tests.support.eventually import until


@pytest.fixture
def failing() -> Iterator[threading.Event]:
    """Return an event: while it is set, the work of the tests fails."""
    before = list(_all)
    yield threading.Event()
    _all[:] = before


def test_a_failure_is_logged_once_and_again_after_a_success(
    failing: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    done: list[bool] = []

    def work() -> None:
        done.append(failing.is_set())
        if failing.is_set():
            raise OSError("the database is away")

    def again(fails: bool) -> None:
        (failing.set if fails else failing.clear)()
        before = len(done)
        background.wake()
        until(lambda: len(done) > before, "the work is done again")

    background = Background("a-test", lambda: 3600, work)
    with caplog.at_level(logging.WARNING):
        background.start()
        for fails, logs in ((True, 1), (True, 1), (True, 1), (False, 1), (True, 2)):
            again(fails)
            until(lambda: len(caplog.records) >= logs, "it is logged")  # noqa: B023
        again(False)
    assert [record.getMessage() for record in caplog.records] == ["a-test failed; it is tried again."] * 2


@pytest.mark.usefixtures("failing")
def test_the_last_work_begins_in_the_order_that_each_says() -> None:
    for order in (9, 0):
        Background("a-test", lambda: 3600, lambda: None, end_order=order)
    orders = [background.end_order for background in _all]
    assert orders == sorted(orders)
