"""Test how requests are held back: the wait itself, and how many may wait at the same time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis

from ratelimits.answers.answer import Answer
from ratelimits.identity import Identity
from ratelimits.quota.waiting import Waiters, acheck_and_wait, check_and_wait, waiters
from tests.support.entry_points import Clock, begin_afresh, counted
from tests.support.rows import arule, rule

pytestmark = pytest.mark.django_db(transaction=True)

WHO = Identity("user:1", None, "account:acme", None)
ONE = {"requests": 1}


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return begin_afresh(monkeypatch)


@pytest.fixture(params=["check_and_wait", "acheck_and_wait"])
def check(request: pytest.FixtureRequest) -> Callable[[], tuple[Answer, float]]:
    """Make one request; return the answer and how long it was held back."""

    def timed() -> tuple[Answer, float]:
        started = time.monotonic()
        if request.param == "check_and_wait":
            answer = check_and_wait(WHO, "*", "GET", ONE)
        else:
            answer = asyncio.run(acheck_and_wait(WHO, "*", "GET", ONE))
        return answer, time.monotonic() - started

    return timed


def at_most(settings: Any, waiting: int) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "MAX_WAITING": waiting, "DENY_CACHE_SECONDS": 0}


class TestWait:
    def test_a_request_that_is_granted_for_later_is_held_back_until_then(
        self, check: Callable[[], tuple[Answer, float]]
    ) -> None:
        rule("queue", "leaky_bucket_queue", capacity=10, rate=5, max_wait=2)
        first, _held = check()
        assert (first.allowed, first.wait) == (True, 0.0)
        for _ in range(2):
            answer, held = check()
            assert answer.allowed
            assert 0 < answer.wait <= held
            assert answer.wait <= 0.2

    def test_a_request_that_would_wait_too_long_is_refused_at_once_with_the_true_time(
        self, check: Callable[[], tuple[Answer, float]]
    ) -> None:
        rule("bucket", capacity=1, rate=1, period=60, max_wait="0.05")
        assert check()[0].allowed
        answer, held = check()
        assert not answer.allowed
        assert answer.retry_after is not None
        assert 55 < answer.retry_after < 60
        assert held < 2
        assert int(answer.headers()["Retry-After"]) >= answer.retry_after

    def test_places_are_given_back_whatever_happens(self, check: Callable[[], tuple[Answer, float]]) -> None:
        rule("bucket", capacity=1, rate=20, max_wait=1)
        for _ in range(3):
            check()
        with pytest.raises(ValueError):
            check_and_wait(WHO, "*", "GET", {"requests": -1})
        with pytest.raises(ValueError):
            asyncio.run(acheck_and_wait(WHO, "*", "GET", {"requests": -1}))
        assert waiters._count == 0


class TestCrowds:
    def test_beyond_the_most_that_wait_one_is_refused_uncharged(self, settings: Any, redis_client: redis.Redis) -> None:
        at_most(settings, 2)
        row = rule("queue", "leaky_bucket_queue", capacity=100, rate=1, max_wait=100)
        answers: list[Answer] = []
        assert check_and_wait(WHO, "*", "GET", ONE).allowed
        threads = [
            threading.Thread(target=lambda: answers.append(check_and_wait(WHO, "*", "GET", ONE))) for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        passed = [answer for answer in answers if answer.allowed]
        assert len(passed) == 2
        assert all(answer.retry_after and answer.retry_after > 0 for answer in answers if not answer.allowed)
        assert max(answer.wait for answer in passed) <= 2
        assert counted(redis_client) == {
            "a requests 0 acme user:1 1": 3,
            f"d requests {row.pk} acme user:1 1": 4,
        }

    def test_who_need_not_wait_passes_whoever_waits(self, settings: Any) -> None:
        at_most(settings, 0)
        rule("queue", "leaky_bucket_queue", capacity=10, rate=1000, delay_after=10, max_wait=1)
        assert check_and_wait(WHO, "*", "GET", ONE).allowed
        assert asyncio.run(acheck_and_wait(WHO, "*", "GET", ONE)).allowed

    async def test_others_of_the_loop_go_on_while_one_is_held_back(self, settings: Any) -> None:
        at_most(settings, 2)
        await arule("queue", "leaky_bucket_queue", capacity=100, rate="0.001", max_wait=100_000)
        assert (await acheck_and_wait(WHO, "*", "GET", ONE)).allowed
        held = asyncio.ensure_future(acheck_and_wait(WHO, "*", "GET", ONE))
        for _waiting in iter(lambda: waiters._count, 1):  # until it waits
            await asyncio.sleep(0)
        other = Identity("user:2", None, "account:acme", None)
        assert (await acheck_and_wait(other, "*", "GET", ONE)).allowed
        assert not held.done()  # its turn comes in a quarter of an hour, however slow this machine is
        held.cancel()
        with pytest.raises(asyncio.CancelledError):
            await held

    async def test_one_that_is_cancelled_leaves_its_place(self) -> None:
        await arule("queue", "leaky_bucket_queue", capacity=100, rate="0.001", max_wait=100_000)
        await acheck_and_wait(WHO, "*", "GET", ONE)
        held = asyncio.ensure_future(acheck_and_wait(WHO, "*", "GET", ONE))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(held, 0.2)
        assert waiters._count == 0


def test_places_are_as_many_as_the_setting_says(settings: Any) -> None:
    at_most(settings, 3)
    places = Waiters()
    assert [places.enter() for _ in range(5)] == [True] * 3 + [False] * 2
    places.leave()
    assert [places.enter() for _ in range(2)] == [True, False]
