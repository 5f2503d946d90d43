"""Test work in other threads: what is logged if it fails, how it ends with the process, and how long others wait."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator

import pytest

from ratelimits.background import Background, _all, within
from tests.support import forked
from tests.support.eventually import until

_STOPPED = """
import os, signal, sys
from django.core.signals import request_finished
from ratelimits import background

signal.signal(signal.SIGTERM, lambda *args: sys.exit(7))
ended = []
background.watch_signals(lambda *seconds: ended.append(seconds))
request_finished.send(None)
assert ended == []
try:
    with request_finished.lock:
        os.kill(os.getpid(), signal.SIGTERM)
finally:
    request_finished.send(None)
    assert len(ended) == 2, ended
"""


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


def test_a_signal_in_the_middle_of_the_end_of_a_request_does_not_hang() -> None:
    process = forked.run([sys.executable, "-c", _STOPPED], timeout=120, capture_output=True, text=True)
    assert process.returncode == 7, process.stderr


def test_work_that_ends_in_time_is_done_in_another_thread() -> None:
    threads: list[str] = []
    within(30, lambda: threads.append(threading.current_thread().name), "asking")
    assert threads == ["asking"]


def test_an_error_of_the_work_is_raised() -> None:
    def fail() -> None:
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        within(30, fail, "asking")


def test_work_that_hangs_is_waited_for_no_longer_than_the_time() -> None:
    ended = threading.Event()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.01 s"):
        within(0.01, lambda: (ended.wait(30), None)[1], "asking")
    with pytest.raises(TimeoutError):
        within(-1, lambda: (ended.wait(30), None)[1], "asking")
    ended.set()
