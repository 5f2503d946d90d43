"""Limits to decision, on the real scripts."""

from __future__ import annotations

import time
from fractions import Fraction
from typing import Any

import pytest
import redis

from ratelimits.engine import ANY, Limit, peek, reserve, reset, settle
from ratelimits.engine.keys import shard_of
from ratelimits.engine.limits import ALGORITHMS, LeakyBucket, SmoothWarmingUp
from tests.engine.asking import DAY, KEYS, MONTHS, NOW, SECOND, ask, everything, limit


class TestChangedRates:
    """What is spent stays spent, in permits, whatever the old and the new rate are."""

    @pytest.mark.parametrize(
        ("before", "after"),
        [
            ({"rate": 1, "period": 1}, {"rate": 3, "period": 7}),
            ({"rate": "0.9", "period": 1}, {"rate": "33.333333", "period": 86_400}),
            # Numerators and denominators beyond 2**53.
            ({"rate": "27737203.145318", "period": "3394804.024435"}, {"rate": "0.004729", "period": "1933.625891"}),
            ({"rate": "14.304068", "period": "0.002461"}, {"rate": "9758489.313253", "period": "68787.062178"}),
            ({"rate": "0.333333", "period": 86_400}, {"rate": "7654321.123457", "period": 2_678_400}),
        ],
    )
    def test_a_bucket_keeps_its_debt(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        old, new = limit("leaky_bucket", cost=7, **before), limit("leaky_bucket", **after)
        ask(old)
        told = peek([new], now=NOW)
        assert isinstance(new.algorithm, LeakyBucket)
        debt = 7 * new.algorithm.interval
        assert debt <= micros(told.reset_after) <= debt + 1 + debt / 2**51
        assert told.remaining == 3

    def test_stored_permits_are_scaled_by_the_new_maximum(self) -> None:
        old = limit("smooth_warming_up", rate=5, warm_up=206, cold_factor="11.805618", cost=300)
        new = limit("smooth_warming_up", rate=5, warm_up="115231.559753", cold_factor="1.020001")
        ask(old)
        told = peek([old], now=NOW + 1000 * SECOND), peek([new], now=NOW)
        stored = _most(old.algorithm) - 300
        assert isinstance(old.algorithm, SmoothWarmingUp)
        assert told[0].remaining == int(_most(old.algorithm))
        owed = micros(told[1].reset_after)
        assert owed > 0
        later = peek([new], now=NOW + owed)
        assert later.remaining == int(stored * _most(new.algorithm) / _most(old.algorithm))


def micros(seconds: float) -> int:
    return round(seconds * SECOND)


def _most(algorithm: Any) -> Fraction:
    """Guava's maxPermits."""
    cold, interval = Fraction(algorithm.cold_factor), algorithm.interval / SECOND
    threshold = Fraction(algorithm.warm_up) / 2 / interval
    return threshold + 2 * Fraction(algorithm.warm_up) / (interval * (1 + cold))


class TestVanishedStates:
    """A log and leases have keys beside the packed string, which may go before it: by their time, or evicted."""

    @pytest.mark.parametrize("algorithm", ["sliding_log", "concurrency"])
    @pytest.mark.parametrize("later", [2 * SECOND, 300 * SECOND])
    def test_a_limit_whose_own_key_is_gone_starts_afresh(
        self, redis_client: redis.Redis, algorithm: str, later: int
    ) -> None:
        short = limit(algorithm, name="short", capacity=3, period=10, lease_ttl=10)
        month = limit("calendar_window", name="month", capacity=100)
        for _ in range(3):
            ask(short, month)
        assert not ask(short, month).allowed
        redis_client.delete(*own_keys(redis_client))
        answers = [ask(short, month, now=NOW + later) for _ in range(4)]
        assert [answer.allowed for answer in answers] == [True, True, True, False]
        assert [answer.remaining for answer in answers] == [2, 1, 0, 0]
        assert peek([month], now=NOW + later).remaining == 94

    @pytest.mark.parametrize("algorithm", ["sliding_log", "concurrency"])
    def test_a_limit_that_has_expired_beside_a_longer_one_starts_afresh(
        self, redis_client: redis.Redis, algorithm: str
    ) -> None:
        short = limit(algorithm, name="short", capacity=3, period=10, lease_ttl=10)
        ask(short, limit("calendar_window", name="month"), lease="one")
        assert ask(short, now=NOW + 300 * SECOND).remaining == 2


def own_keys(client: redis.Redis) -> list[bytes]:
    """The keys of states that are not packed."""
    kinds = (b"head", b"open", b"meta", b"sealed")
    return [key for key in client.keys("*") if key.split(b"}:")[1] not in kinds and b"}:s:" not in key]


class TestChangedAlgorithms:
    @pytest.mark.parametrize("before", ALGORITHMS)
    @pytest.mark.parametrize("after", ALGORITHMS)
    def test_a_changed_algorithm_starts_afresh(self, before: str, after: str) -> None:
        if before == after:
            return
        other = limit("fixed_window", name="other", period=3600)
        for _ in range(3):
            ask(limit(before), other, timeout=ANY)
        alone = ask(limit(after, key="user:2"))
        answer = ask(limit(after), timeout=ANY)
        assert (answer.allowed, answer.remaining, answer.wait) == (True, alone.remaining, 0)
        assert peek([other], now=NOW).remaining == 7

    def test_leases_under_a_key_that_looks_like_anothers_index(self) -> None:
        for key in ("user:1:n", "user:1", "user:1:n"):
            assert ask(limit("concurrency", key=key)).allowed


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_reset_leaves_nothing_of_a_limit_behind(redis_client: redis.Redis, algorithm: str) -> None:
    ask(limit(algorithm), timeout=ANY)
    reset([limit(algorithm)])
    assert [key for key in redis_client.keys("*") if not key.endswith(b"head")] == []


class TestHugeCosts:
    @pytest.mark.parametrize("algorithm", ["smooth_bursty", "smooth_warming_up"])
    def test_a_cost_that_would_take_more_than_142_years_never_passes_and_charges_nothing(
        self, redis_client: redis.Redis, algorithm: str
    ) -> None:
        smooth = limit(algorithm, name="smooth", rate=1, period=86_400, warm_up=86_400, cost=2**40)
        log, lease = limit("sliding_log", name="log"), limit("concurrency", name="lease")
        ask(log, lease)
        before = everything(redis_client)
        answer = ask(log, lease, smooth, timeout=ANY)
        assert (answer.allowed, answer.retry_after, answer.binding) == (False, None, 2)
        assert everything(redis_client) == before

    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    def test_settling_a_huge_cost_keeps_the_limit_used_up(self, algorithm: str) -> None:
        one = limit(algorithm, rate=1, period=86_400, lease_ttl=86_400, warm_up=86_400)
        for _ in range(3):
            receipt = ask(one, now=now_of_this_machine(), timeout=ANY).receipt
            if receipt is not None:
                settle(receipt, [2**40])
        later = peek([one], now=now_of_this_machine() + SECOND)
        assert (later.allowed, later.remaining) == (False, 0)

    @pytest.mark.parametrize("cost", [-1, 2**40 + 1, 1.5])
    def test_a_cost_that_makes_no_sense_is_refused(self, cost: float) -> None:
        with pytest.raises(ValueError, match=r"^cost must be a whole number from 0 to 2\*\*40, not"):
            ask(limit(cost=cost))  # type: ignore[arg-type]
        receipt = ask(limit()).receipt
        assert receipt is not None
        with pytest.raises(ValueError, match=r"^settle with 1 whole costs from 0 to 2\*\*40, one for each"):
            settle(receipt, [cost])  # type: ignore[list-item]


class TestLife:
    """A state must live as long as it matters, and a minute more."""

    @pytest.mark.parametrize(
        ("one", "seconds"),
        [
            (limit("smooth_bursty", rate=1, period=60, cost=1_000_000), 60_000_000),
            (limit("token_bucket", rate=1, period=86_400, capacity=1000, initial=500, cost=500), 86_400_000),
            (limit("leaky_bucket", rate=1, period=86_400, capacity=1000, cost=1000), 86_400_000),
            (limit("leaky_bucket", rate=100, period=1, cost=10), 60),
            (limit("calendar_window"), (MONTHS[2] - NOW) / SECOND),
            (limit("fixed_window", period=3600), 3600),
            (limit("sliding_window", period=3600), 3960),
            (limit("sliding_log", period=3600), 3600),
            (limit("concurrency", lease_ttl=3600), 3600),
            (limit("smooth_warming_up"), 400 * 86_400),
            (limit("token_bucket", initial="empty", cost=10), 400 * 86_400),
        ],
    )
    def test_a_state_outlasts_its_debt(self, redis_client: redis.Redis, one: Limit, seconds: float) -> None:
        ask(one, timeout=ANY)
        kept = [key for key in redis_client.keys("*") if not key.endswith(b"head")]
        lives = [redis_client.pttl(key) / 1000 for key in kept]
        assert kept
        assert all(seconds - 1 <= life <= max(seconds, 60) + 3 for life in lives)

    def test_a_string_lives_as_long_as_its_longest_entry(self, redis_client: redis.Redis) -> None:
        short, longer = limit(name="short"), limit("fixed_window", name="long", period=36_000)
        key = KEYS.state(shard_of("user:1", 64), "user:1")
        for limits in ((short,), (short, longer), (short,), (limit(name="other"),)):
            ask(*limits)
        assert redis_client.pttl(key) / 1000 == pytest.approx(36_000, abs=3)
        assert peek([longer], now=NOW).remaining == 9


def now_of_this_machine() -> int:
    return time.time_ns() // 1000


class TestTimeouts:
    @pytest.mark.parametrize("timeout", [0, -0.001, -1, -3600.0])
    def test_a_deadline_that_has_passed_lends_nothing(self, timeout: float) -> None:
        bucket = limit(capacity=1)
        ask(bucket)
        answer = ask(bucket, timeout=timeout)
        assert (answer.allowed, answer.retry_after) == (False, 1.0)

    @pytest.mark.parametrize(("timeout", "allowed"), [(0.999999, False), (1, True), (10**12, True), (ANY, True)])
    def test_a_request_waits_as_long_as_it_says_and_no_longer(self, timeout: float, allowed: bool) -> None:
        bucket = limit(capacity=1)
        ask(bucket)
        answer = ask(bucket, timeout=timeout)
        assert (answer.allowed, answer.wait) == (allowed, 1.0 if allowed else 0.0)

    def test_reserving_takes_any_wait_or_a_longest_one(self) -> None:
        bucket = limit(capacity=1)
        waits = [reserve([bucket], now=NOW).wait for _ in range(4)]
        assert waits == [0.0, 1.0, 2.0, 3.0]
        refused = reserve([bucket], max_wait=3.5, now=NOW)
        assert (refused.allowed, refused.retry_after) == (False, 0.5)
        assert not reserve([bucket], max_wait=-1, now=NOW).allowed


class TestReceiptsOfOlderParameters:
    """A receipt that was made under other numbers moves a limit by what it settles, and by nothing else."""

    BEFORE: dict[str, dict[str, Any]] = {
        "fixed_window": {"period": 1},
        "calendar_window": {"calendar_unit": "hour"},
        "sliding_window": {"period": 1},
        "sliding_log": {"period": 1},
        "token_bucket": {"rate": 100},
        "gcra": {"rate": 100},
        "leaky_bucket": {"rate": 100},
        "leaky_bucket_queue": {"rate": 100},
    }
    AFTER: dict[str, dict[str, Any]] = {
        "fixed_window": {"period": 10**9},
        "calendar_window": {"calendar_unit": "year"},
        "sliding_window": {"period": 10**9, "sub_windows": 5},
        "sliding_log": {"period": 10**9},
        "token_bucket": {"rate": "0.000001"},
        "gcra": {"rate": "0.000001"},
        "leaky_bucket": {"rate": "0.000001"},
        "leaky_bucket_queue": {"rate": "0.000001"},
    }

    @pytest.mark.parametrize("algorithm", BEFORE)
    @pytest.mark.parametrize(("true", "moves"), [(0, range(3)), (3, range(-1, 1)), (2, range(1))])
    def test_settling_an_older_receipt(self, algorithm: str, true: int, moves: range) -> None:
        # Two hours ago: all of it has ended by the old numbers, and none of it by the new ones.
        past = now_of_this_machine() - 7200 * SECOND
        old = limit(algorithm, capacity=20, cost=2, since=past - DAY, **self.BEFORE[algorithm])
        new = limit(algorithm, capacity=20, since=past, **self.AFTER[algorithm])
        receipt = ask(old, now=past, timeout=ANY).receipt
        for number in range(8):
            assert ask(new, now=past + number, timeout=ANY).allowed
        before = peek([new], now=now_of_this_machine(), timeout=ANY).remaining
        assert receipt is not None
        settle(receipt, [true])
        assert peek([new], now=now_of_this_machine(), timeout=ANY).remaining - before in moves

    @pytest.mark.parametrize("algorithm", ["smooth_bursty", "smooth_warming_up"])
    def test_settling_an_older_receipt_of_a_smooth_limit(self, algorithm: str) -> None:
        past = now_of_this_machine() - 30 * SECOND
        old = limit(algorithm, rate=100, cost=2, since=past - DAY)
        new = limit(algorithm, rate=1, period=1000, warm_up=2000, since=past)
        receipt = ask(old, now=past, timeout=ANY).receipt
        for number in range(8):
            ask(new, now=past + number, timeout=ANY)
        before = peek([new], now=now_of_this_machine()).reset_after
        assert receipt is not None
        settle(receipt, [3])
        moved = peek([new], now=now_of_this_machine()).reset_after - before
        assert 0 <= moved + 1 < 1 + 1001
