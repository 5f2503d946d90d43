"""Test that work in another thread is waited for, but not longer than a given time."""

from __future__ import annotations

import threading

import pytest

from ratelimits.background.waiting import within


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
