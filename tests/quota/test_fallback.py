"""Test what decides while the server is away."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from ratelimits.algorithms.limits import Algorithm
from ratelimits.quota import fallback
from ratelimits.quota.fallback import MAX_KEYS, LocalLimiter
from tests.support.engine.asking import limit
from tests.support.entry_points import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


def asked(
    algorithm: str, cost: int = 1, key: str = "user:1", name: str = "a", **numbers: Any
) -> tuple[str, str, Algorithm, int]:
    return key, name, limit(algorithm, **numbers).algorithm, cost


def admits(limiter: LocalLimiter, limits: list[Any]) -> bool:
    return limiter.charge(limits) == 0


class TestLocalLimiter:
    @pytest.mark.parametrize(
        ("algorithm", "numbers", "quota", "seconds"),
        [
            ("fixed_window", {"capacity": 5, "period": 10}, 5, 10),
            ("sliding_log", {"capacity": 5, "period": 10}, 5, 10),
            ("token_bucket", {"capacity": 5, "rate": 2}, 5, 2.5),
            ("calendar_window", {"capacity": 5, "calendar_unit": "hour"}, 5, 3600),
            # A calendar window has no fixed length: a minute is used.
            ("calendar_window", {"capacity": 5}, 5, 60),
            ("concurrency", {"capacity": 5}, 5, 60),
            ("smooth_bursty", {"rate": 5, "capacity": None}, 5, 1),
            ("leaky_bucket_queue", {"capacity": 1, "rate": 5}, 2, 0.4),
        ],
    )
    def test_a_quota_passes_and_comes_back_over_its_window(
        self, clock: Clock, algorithm: str, numbers: dict[str, Any], quota: int, seconds: float
    ) -> None:
        limiter, one = LocalLimiter(clock), asked(algorithm, **numbers)
        assert [admits(limiter, [one]) for _ in range(quota + 1)] == [True] * quota + [False]
        clock.now += seconds / quota * 1.001
        assert [admits(limiter, [one]) for _ in range(2)] == [True, False]
        clock.now += seconds * 2
        assert [admits(limiter, [one]) for _ in range(quota + 1)] == [True] * quota + [False]

    @pytest.mark.parametrize("algorithm", ["fixed_window", "token_bucket", "leaky_bucket_queue", "concurrency"])
    def test_of_a_capacity_of_nothing_nothing_passes(self, clock: Clock, algorithm: str) -> None:
        limiter, one = LocalLimiter(clock), asked(algorithm, capacity=0)
        assert not admits(limiter, [one])
        clock.now += 1e9
        assert not admits(limiter, [one])
        assert admits(limiter, [asked(algorithm, cost=0, capacity=0)])

    def test_all_or_none_are_charged(self, clock: Clock) -> None:
        limiter = LocalLimiter(clock)
        wide, tight = asked("fixed_window", period=60), asked("fixed_window", name="b", capacity=1, period=60)
        assert admits(limiter, [wide, tight])
        for _ in range(20):
            assert not admits(limiter, [wide, tight])
        assert [admits(limiter, [wide]) for _ in range(10)] == [True] * 9 + [False]

    def test_keys_and_names_are_apart(self, clock: Clock) -> None:
        limiter = LocalLimiter(clock)
        for key in ("user:1", "user:2"):
            for name in ("a", "b"):
                one = asked("fixed_window", key=key, name=name, capacity=1, period=60)
                assert [admits(limiter, [one]) for _ in range(2)] == [True, False]

    def test_costs(self, clock: Clock) -> None:
        limiter = LocalLimiter(clock)
        assert admits(limiter, [asked("fixed_window", 10, period=60)])
        assert admits(limiter, [asked("fixed_window", 0, period=60)])
        assert not admits(limiter, [asked("fixed_window", 1, period=60)])
        assert not admits(limiter, [asked("fixed_window", 11, key="user:2", period=60)])
        assert admits(limiter, [])

    def test_it_remembers_so_many_keys_and_forgets_the_longest_unused(
        self, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert MAX_KEYS >= 10_000
        monkeypatch.setattr(fallback, "MAX_KEYS", 3)
        limiter = LocalLimiter(clock)
        numbers: dict[str, Any] = {"capacity": 1, "period": 60}
        for number in range(3):
            assert admits(limiter, [asked("fixed_window", key=f"user:{number}", **numbers)])
        assert not admits(limiter, [asked("fixed_window", key="user:0", **numbers)])
        assert admits(limiter, [asked("fixed_window", key="user:3", **numbers)])
        assert admits(limiter, [asked("fixed_window", key="user:0", **numbers)])
        assert not admits(limiter, [asked("fixed_window", key="user:2", **numbers)])

    def test_threads_are_admitted_as_often_as_the_quota_says(self, clock: Clock) -> None:
        limiter, one, seen = LocalLimiter(clock), asked("fixed_window", capacity=300, period=60), []

        def work() -> None:
            seen.append(sum(admits(limiter, [one]) for _ in range(200)))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(seen) == 300
