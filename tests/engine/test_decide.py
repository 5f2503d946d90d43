"""Test decisions under limits, on the real scripts."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from fractions import Fraction
from math import ceil
from random import Random
from typing import Any

import pytest

from ratelimits.algorithms.limits import ALGORITHMS, Gcra, LeakyBucket, Mode, SmoothWarmingUp, TokenBucket
from ratelimits.engine import (
    ANY,
    AlreadySettled,
    Decision,
    Limit,
    adecide,
    apeek,
    arefund,
    arelease,
    areserve,
    areset,
    asettle,
    decide,
    peek,
    refund,
    reserve,
    reset,
    settle,
)
from ratelimits.engine.call import Call
from ratelimits.engine.decide import call_for
from ratelimits.engine.decide import decide_call as steps
from ratelimits.engine.keys import shard_of
from ratelimits.engine.program import Term, program
from ratelimits.engine.server import current_server
from tests.support.engine.asking import DAY, KEYS, MONTHS, NOW, SECOND, ask, everything, limit, usage
from tests.support.raw import RawRedis


class TestChangedRates:
    """Spent permits stay spent, whatever the old and the new rate are."""

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
    """Return Guava's maxPermits."""
    cold, interval = Fraction(algorithm.cold_factor), algorithm.interval / SECOND
    threshold = Fraction(algorithm.warm_up) / 2 / interval
    warming: Fraction = threshold + 2 * Fraction(algorithm.warm_up) / (interval * (1 + cold))
    return warming


class TestVanishedStates:
    """A log and leases have keys beside the packed string. These may vanish first: by expiry or by eviction."""

    @pytest.mark.parametrize("algorithm", ["sliding_log", "concurrency"])
    @pytest.mark.parametrize("later", [2 * SECOND, 300 * SECOND])
    def test_a_limit_whose_own_key_is_gone_starts_afresh(
        self, redis_client: RawRedis, algorithm: str, later: int
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
        self, redis_client: RawRedis, algorithm: str
    ) -> None:
        short = limit(algorithm, name="short", capacity=3, period=10, lease_ttl=10)
        ask(short, limit("calendar_window", name="month"), lease="one")
        assert ask(short, now=NOW + 300 * SECOND).remaining == 2

    @pytest.mark.parametrize("algorithm", ["sliding_log", "concurrency"])
    def test_own_keys_whose_state_is_gone_count_no_more(self, redis_client: RawRedis, algorithm: str) -> None:
        one = limit(algorithm, capacity=3, period=10, lease_ttl=10)
        for _ in range(2):
            ask(one)
        redis_client.delete(*redis_client.keys("*}:s:*"))
        assert [ask(one).remaining for _ in range(3)] == [2, 1, 0]
        assert not ask(one).allowed

    def test_a_charge_finds_that_the_list_is_gone(self, redis_client: RawRedis) -> None:
        log = limit("sliding_log", capacity=10, period=10)
        for number in range(3):
            ask(log, now=NOW + number)
        redis_client.delete(*own_keys(redis_client))
        assert [ask(log, now=NOW + number).remaining for number in (5, 6, 6)] == [9, 8, 7]

    @pytest.mark.parametrize("charges", [0, 1, 200])
    def test_a_log_goes_on_without_its_tree(self, redis_client: RawRedis, charges: int) -> None:
        """With 200 charges a new tree begins before anything looks for the old one."""
        log = limit("sliding_log", capacity=1000, period=10)
        for number in range(300):
            ask(log, now=NOW + number)
        (tree,) = redis_client.keys("*:b")
        in_list = sum(redis_client.llen(key) for key in own_keys(redis_client) if key != tree)
        redis_client.delete(tree)
        for number in range(300, 300 + charges):
            assert ask(log, now=NOW + number).allowed
        assert peek([log], now=NOW + 600).remaining == 1000 - in_list - charges
        assert peek([log], now=NOW + 11 * SECOND).remaining == 1000

    def test_a_log_without_its_tree_refuses_only_what_the_list_refuses(self, redis_client: RawRedis) -> None:
        log = limit("sliding_log", capacity=300, period=10)
        for number in range(300):
            ask(log, now=NOW + number)
        assert not ask(log, now=NOW + 300).allowed
        redis_client.delete(*redis_client.keys("*:b"))
        answer = ask(log, now=NOW + 300)
        assert answer.allowed
        assert answer.remaining > 100

    @pytest.mark.parametrize(("algorithm", "number"), [("sliding_log", 2), ("concurrency", 2)])
    def test_a_second_own_key_exists_only_where_a_cluster_needs_it(
        self, redis_client: RawRedis, algorithm: str, number: int
    ) -> None:
        server, one = current_server(), limit(algorithm)
        assert ask(one).allowed
        assert len(own_keys(redis_client)) == number - 1
        reset([one])
        on_cluster = replace(server, keyspace=replace(server.keyspace, slots_move=True))
        assert steps(on_cluster, call_for([one])).allowed
        assert len(own_keys(redis_client)) == number
        assert all(redis_client.pttl(key) > 0 for key in own_keys(redis_client))

    def test_the_keys_of_leases_expire_also_if_the_second_comes_later(self, redis_client: RawRedis) -> None:
        one = limit("concurrency", capacity=9)
        ask(one, now=None)
        ask(limit("concurrency", capacity=9, cost=3), now=None)
        assert len(own_keys(redis_client)) == 2
        assert all(redis_client.pttl(key) > 0 for key in own_keys(redis_client))

    def test_the_keys_of_a_log_expire_also_if_the_tree_comes_later(self, redis_client: RawRedis) -> None:
        log = limit("sliding_log", capacity=1000, period=3600)
        for _ in range(200):
            ask(log, now=None)
        assert len(own_keys(redis_client)) == 2
        assert all(redis_client.pttl(key) > 0 for key in own_keys(redis_client))


class TestRecordsOfOneKey:
    def test_limits_that_are_decided_apart_keep_each_others_records(self, redis_client: RawRedis) -> None:
        """A call's records may be the first of the packed state, or be behind others, or be mixed with others."""
        draw, spent = Random("records"), dict.fromkeys("abcde", 0)
        kinds = {"a": ("fixed_window", 60), "b": ("fixed_window", 3600), "c": ("gcra", 1), "d": ("fixed_window", 9)}
        limits = {
            name: limit(kind, name=name, capacity=1000, period=period, rate="0.000001")
            for name, (kind, period) in {**kinds, "e": ("token_bucket", 1)}.items()
        }
        groups = ["ab", "cd", "e", "cde", "bc", "ab", "cd", "d", "ea"]
        for number in range(200):
            group = groups[number % len(groups)] if number < 40 else draw.choice(groups)
            answer = ask(*(limits[name] for name in group), now=NOW + number)
            for name in group:
                spent[name] += 1
            assert [one.remaining for one in answer.standings] == [1000 - spent[name] for name in group]
        answer = peek([limits[name] for name in "edcba"], now=NOW + 200)
        assert [one.remaining for one in answer.standings] == [1000 - spent[name] for name in "edcba"]

    def test_a_state_lives_as_long_as_its_longest_record(self, redis_client: RawRedis) -> None:
        now = now_of_this_machine()
        long, short = limit("fixed_window", name="long", period=86_400), limit("gcra", name="short")
        ask(limit("fixed_window", name="first", period=60), now=now)
        ask(long, now=now)
        (key,) = redis_client.keys("*}:s:*")
        lives = redis_client.pttl(key)
        for _ in range(3):
            ask(short, now=now)
            ask(long, now=now)
            ask(short, now=now)
        assert abs(redis_client.pttl(key) - lives) < 5000


def own_keys(client: RawRedis) -> list[bytes]:
    """Return the keys of states that are not packed."""
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
def test_a_reset_leaves_nothing_of_a_limit_behind(redis_client: RawRedis, algorithm: str) -> None:
    ask(limit(algorithm), timeout=ANY)
    reset([limit(algorithm)])
    assert [key for key in redis_client.keys("*") if not key.endswith(b"head")] == []


class TestHugeCosts:
    @pytest.mark.parametrize("algorithm", ["smooth_bursty", "smooth_warming_up"])
    def test_a_cost_that_would_take_more_than_142_years_never_passes_and_charges_nothing(
        self, redis_client: RawRedis, algorithm: str
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
        with pytest.raises(
            ValueError, match=r"^settle with one whole number from 0 to 2\*\*40 for each of the 1 charged"
        ):
            settle(receipt, [cost])  # type: ignore[list-item]


class TestLife:
    """A state must live for as long as it matters, and one minute more."""

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
    def test_a_state_outlasts_its_debt(self, redis_client: RawRedis, one: Limit, seconds: float) -> None:
        ask(one, timeout=ANY)
        kept = [key for key in redis_client.keys("*") if not key.endswith(b"head")]
        lives = [redis_client.pttl(key) / 1000 for key in kept]
        assert kept
        assert all(seconds - 1 <= life <= max(seconds, 60) + 3 for life in lives)

    def test_a_string_lives_as_long_as_its_longest_entry(self, redis_client: RawRedis) -> None:
        short, longer = limit(name="short"), limit("fixed_window", name="long", period=36_000)
        key = KEYS.state(shard_of("user:1", KEYS.shards), "user:1")
        for limits in ((short,), (short, longer), (short,), (limit(name="other"),)):
            ask(*limits)
        assert redis_client.pttl(key) / 1000 == pytest.approx(36_000, abs=3)
        assert peek([longer], now=NOW).remaining == 9

    def test_only_a_moment_of_the_server_keeps_an_expiry_that_has_not_changed(self, redis_client: RawRedis) -> None:
        window, key = limit("fixed_window", period=86_400), KEYS.state(shard_of("user:1", KEYS.shards), "user:1")
        ask(window, now=None)
        redis_client.pexpire(key, 30_000)
        assert ask(window, now=None).remaining == 8
        assert redis_client.pttl(key) <= 30_000
        assert ask(window, now=now_of_this_machine()).remaining == 7
        assert redis_client.pttl(key) > 30_000
        redis_client.pexpire(key, 30_000)
        assert ask(window, limit("fixed_window", name="longer", period=10 * 86_400), now=None).allowed
        assert redis_client.pttl(key) > 30_000


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
    """A receipt made under other parameters changes a limit only by what it settles."""

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
        # Two hours ago: under the old parameters all of it has ended, under the new ones none.
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


#: For each algorithm a limit that admits ten at once, and then nothing for a long time.
TENS: dict[str, dict[str, Any]] = {
    name: {"rate": 1, "period": 1000, "warm_up": 1000, "lease_ttl": 1000, "delay_after": 9, "calendar_unit": "month"}
    | ({"capacity": 9} if name == "leaky_bucket_queue" else {})
    for name in ALGORITHMS
    if not name.startswith("smooth")
}


@pytest.mark.parametrize("algorithm", TENS)
class TestCosts:
    def test_ten_pass_and_the_eleventh_does_not(self, algorithm: str) -> None:
        one = limit(algorithm, **TENS[algorithm])
        answers = [ask(one) for _ in range(11)]
        assert [answer.allowed for answer in answers] == [True] * 10 + [False]
        assert [answer.remaining for answer in answers] == [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 0]
        assert {answer.retry_after for answer in answers[:10]} == {0.0}
        assert answers[10].retry_after is not None
        assert answers[10].retry_after > 0

    def test_a_cost_of_nothing_always_passes_and_changes_nothing(self, redis_client: RawRedis, algorithm: str) -> None:
        one = limit(algorithm, **TENS[algorithm])
        assert ask(replace(one, cost=0)).allowed
        assert [key for key in redis_client.keys("*") if not key.endswith(b"head")] == []
        ask(replace(one, cost=10))
        before = everything(redis_client)
        answer = ask(replace(one, cost=0))
        assert (answer.allowed, answer.remaining) == (True, 0)
        assert everything(redis_client) == before

    def test_many_at_once_cost_as_many_as_one_by_one(self, algorithm: str) -> None:
        one = limit(algorithm, **TENS[algorithm])
        assert ask(replace(one, cost=7)).remaining == 3
        assert not ask(replace(one, cost=4)).allowed
        assert ask(replace(one, cost=3)).remaining == 0

    def test_more_than_the_capacity_never_passes_and_makes_no_state(
        self, redis_client: RawRedis, algorithm: str
    ) -> None:
        one = limit(algorithm, cost=11, **TENS[algorithm])
        answer = ask(one, timeout=ANY)
        assert (answer.allowed, answer.retry_after, answer.wait) == (False, None, 0.0)
        assert [key for key in redis_client.keys("*") if not key.endswith(b"head")] == []

    def test_a_peek_answers_what_a_try_would_and_changes_nothing(self, redis_client: RawRedis, algorithm: str) -> None:
        one = limit(algorithm, **TENS[algorithm])
        for cost in (3, 5, 4, 2, 1):
            asked = replace(one, cost=cost)
            before = everything(redis_client)
            told = peek([asked], now=NOW)
            if before:
                assert everything(redis_client) == before
            answer = ask(asked)
            assert (told.allowed, told.retry_after) == (answer.allowed, answer.retry_after)
            assert told.remaining == answer.remaining + (cost if answer.allowed else 0)
            assert told.receipt is None

    def test_a_refusal_tells_the_moment_from_which_it_passes(self, algorithm: str) -> None:
        one = limit(algorithm, **TENS[algorithm])
        ask(replace(one, cost=10))
        retry = ask(replace(one, cost=4)).retry_after
        assert retry is not None
        assert not peek([replace(one, cost=4)], now=NOW + micros(retry) - 2).allowed
        assert peek([replace(one, cost=4)], now=NOW + micros(retry)).allowed


class TestSeveral:
    """Several limits are decided together."""

    @pytest.mark.parametrize("algorithm", ["token_bucket", "fixed_window", "sliding_log", "concurrency"])
    def test_a_refund_gives_nothing_back_to_a_shadow_limit_that_took_nothing(self, algorithm: str) -> None:
        long: dict[str, Any] = {"period": 700_000_000, "lease_ttl": 700_000}
        shadow = limit(algorithm, name="shadow", capacity=3, cost=2, mode=Mode.SHADOW, **long)
        both = [shadow, limit("fixed_window", name="wide", capacity=100, cost=2, **long)]
        first, second = decide(both), decide(both)
        assert [first.standings[0].allowed, second.standings[0].allowed] == [True, False]
        assert second.receipt is not None
        refund(second.receipt)
        assert [one.remaining for one in peek(both).standings] == [1, 98]
        assert first.receipt is not None
        refund(first.receipt)
        assert [one.remaining for one in peek(both).standings] == [3, 100]

    def test_the_least_binds_where_all_admit(self) -> None:
        answer = ask(limit(name="a"), limit(name="b", capacity=3), limit(name="c", capacity=3), cost_of_none())
        assert (answer.allowed, answer.binding, answer.limit, answer.remaining) == (True, 1, 3, 2)
        assert [standing.remaining for standing in answer.standings] == [9, 2, 2, 99]
        assert answer.reset_after == max(standing.reset_after for standing in answer.standings) == 1.0

    def test_the_one_that_refuses_longest_binds_where_some_refuse(self) -> None:
        quick, slow = limit(name="quick", capacity=1), limit(name="slow", capacity=1, period=100)
        wide = limit(name="wide")
        ask(quick, slow, wide)
        answer = ask(wide, quick, slow)
        assert (answer.allowed, answer.binding, answer.limit, answer.retry_after) == (False, 2, 1, 100.0)
        assert [standing.allowed for standing in answer.standings] == [True, False, False]
        assert [standing.remaining for standing in answer.standings] == [9, 0, 0]

    def test_never_is_longer_than_any_time(self) -> None:
        tight, small = limit(name="tight", capacity=2, period=10**6, cost=2), limit(name="small", capacity=1, cost=2)
        ask(replace(tight, cost=2))
        answer = ask(tight, small)
        assert (answer.binding, answer.retry_after) == (1, None)

    def test_the_longest_wait_is_the_wait(self) -> None:
        queue = limit("leaky_bucket_queue", name="queue", rate=2)
        bucket = limit(name="bucket", capacity=1)
        for _ in range(2):
            answer = ask(queue, bucket, timeout=60)
        assert (answer.allowed, answer.wait) == (True, 1.0)

    def test_what_is_refused_by_one_is_charged_by_none(self, redis_client: RawRedis) -> None:
        others = [limit(name, name=name, **TENS[name]) for name in TENS]
        full = limit(name="full", capacity=1, period=1000)
        assert ask(*others, full).allowed
        before = everything(redis_client)
        for _ in range(3):
            assert not ask(*others, full).allowed
        assert everything(redis_client) == before

    def test_each_limit_has_a_cost_of_its_own(self) -> None:
        answer = ask(limit(name="requests"), limit(name="tokens", capacity=1000, cost=250))
        assert [standing.remaining for standing in answer.standings] == [9, 750]

    def test_limits_of_several_keys(self) -> None:
        for number in range(3):
            answer = ask(limit(key="global", capacity=5), limit(key=f"user:{number}"), account="acme")
        assert [standing.remaining for standing in answer.standings] == [2, 9]

    def test_two_limits_of_one_key_and_name_are_a_mistake(self) -> None:
        with pytest.raises(ValueError, match=r"^two limits of one key are named 'default': rename one$"):
            ask(limit(), limit("gcra"))
        with pytest.raises(ValueError, match=r"^name at least one limit$"):
            ask()

    @pytest.mark.parametrize("usual", [True, False])
    def test_entries_of_other_rules_are_copied_as_they_are(self, redis_client: RawRedis, usual: bool) -> None:
        others = [limit(name, name=name, **TENS[name]) for name in TENS if name != "sliding_window"]
        ask(*others)
        key = KEYS.state(shard_of("user:1", KEYS.shards), "user:1")
        before = redis_client.get(key)
        mine = limit("token_bucket" if usual else "smooth_bursty", name="mine")
        for _ in range(3):
            ask(mine)
        # After the second at which all of it may be dropped, before this request's own.
        assert redis_client.get(key)[4:].startswith(before[4:])
        assert [ask(other).standings[0].remaining for other in others] == [8] * len(others)


def cost_of_none() -> Limit:
    return limit("fixed_window", name="d", capacity=100, period=1)


class TestWaiting:
    """Each rule's limit has its own longest wait; with at_once no request waits."""

    def decided(self, waits: dict[str, int], at_once: bool = False) -> Decision:
        algorithm = limit("leaky_bucket_queue").algorithm
        terms = tuple(
            Term(algorithm, name, 0, 0, max_wait=seconds * SECOND if seconds >= 0 else -1)
            for name, seconds in waits.items()
        )
        call = Call(program(terms), ("user:1",), (1,), now=NOW, at_once=at_once)
        return steps(current_server(), call)

    def test_the_least_patient_limit_refuses_first(self) -> None:
        waits = {"patient": 5, "hasty": 2}
        answers = [self.decided(waits) for _ in range(5)]
        assert [answer.wait for answer in answers] == [0.0, 1.0, 2.0, 0.0, 0.0]
        assert [answer.allowed for answer in answers] == [True, True, True, False, False]
        assert (answers[3].binding, answers[3].retry_after) == (1, 1.0)

    def test_at_once_refuses_what_would_have_to_wait_and_charges_nothing(self) -> None:
        waits = {"patient": 5}
        self.decided(waits)
        for _ in range(3):
            refused = self.decided(waits, at_once=True)
            assert (refused.allowed, refused.retry_after) == (False, 1.0)
        assert self.decided(waits).wait == 1.0

    def test_at_once_admits_what_need_not_wait(self) -> None:
        assert self.decided({"patient": 5}, at_once=True).allowed


class TestOddRates:
    """Rates with six places do not drift: after thousands of decisions the bucket is exactly as defined."""

    @pytest.mark.parametrize("algorithm", ["token_bucket", "gcra", "leaky_bucket"])
    @pytest.mark.parametrize(
        ("rate", "period"),
        [
            ("0.9", 1),
            (3, 7),
            ("33.333333", 1),
            (10**6, 2_592_000),
            ("0.123457", "0.3"),
            ("999999.999999", 13),
            (3, 9999),
        ],
    )
    def test_a_bucket_is_where_fractions_have_it(self, algorithm: str, rate: Any, period: Any) -> None:
        one = limit(algorithm, rate=rate, period=period, capacity=5)
        assert isinstance(one.algorithm, TokenBucket | Gcra | LeakyBucket)
        interval, random, now, debt = one.algorithm.interval, Random(7), NOW, Fraction(0)
        for _ in range(400):
            elapsed = random.choice([0, 1, int(interval * random.randint(0, 300) / 100)])
            now, debt, cost = now + elapsed, max(debt - elapsed, Fraction(0)), random.choice([1, 1, 2, 5])
            allowed = debt + cost * interval <= 5 * interval
            over = debt + cost * interval - 5 * interval
            debt += cost * interval if allowed else 0
            answer = ask(replace(one, cost=cost), now=now)
            assert answer.allowed == allowed
            assert answer.remaining == int((5 * interval - debt) / interval)
            assert micros(answer.retry_after or 0) == (0 if allowed else ceil(over))
            assert micros(answer.reset_after) == ceil(debt)

    @pytest.mark.parametrize("algorithm", ["token_bucket", "gcra", "leaky_bucket", "fixed_window", "calendar_window"])
    @pytest.mark.parametrize("rate", [1, "0.9", "33.333333"])
    def test_a_call_that_may_wait_and_one_that_may_not_decide_alike(self, algorithm: str, rate: Any) -> None:
        one = limit(algorithm, rate=rate, period=3, capacity=7, calendar_unit="hour")
        terms, random, now = (Term(one.algorithm, "a", 0, 0), Term(limit(rate=5).algorithm, "b", 0, 1)), Random(3), NOW
        for _ in range(300):
            now += random.choice([0, 1, 333_333, 1_000_000, 7_000_000, -5_000_000, 3_600_000_000, -90_000_000])
            costs = random.choice([1, 1, 2, 8]), random.choice([0, 1, 3])
            usual, general = (
                steps(current_server(), Call(program(terms), (key,), costs, now=now, at_once=at_once))
                for key, at_once in (("user:1", False), ("user:2", True))
            )
            assert usual.reply == general.reply

    def test_scopes_that_take_turns_read_their_states_at_once(self, redis_client: RawRedis) -> None:
        rates = {"a": 1, "b": "0.9", "c": 5}
        algorithms = {name: limit("gcra", rate=rate, capacity=200).algorithm for name, rate in rates.items()}
        algorithms["d"] = limit("calendar_window", capacity=900, calendar_unit="hour").algorithm
        now, order = NOW, Random(5)
        for turn in range(120):
            names = order.choice(["ab", "cd", "da", "bdc", "c"]) if turn > 4 else ["ab", "cd", "da", "bdc", "c"][turn]
            terms = tuple(Term(algorithms[name], name, 0, 0) for name in names)
            now += order.choice([1, 333_333, 1_000_000])
            if turn == 5:
                redis_client.config_resetstat()
            usual, general = (
                steps(current_server(), Call(program(terms), (key,), (1,), "acme", now=now, at_once=at_once))
                for key, at_once in (("user:1", False), ("user:2", True))
            )
            assert usual.reply == general.reply
        stats: Any = redis_client.info("commandstats")
        # One command reads the head and the state, wherever the records are in the state.
        assert (stats["cmdstat_mget"]["calls"], stats["cmdstat_set"]["calls"]) == (2 * 115, 2 * 115)
        shard = shard_of("account:acme", KEYS.shards)
        assert redis_client.get(KEYS.state(shard, "user:1")) == redis_client.get(KEYS.state(shard, "user:2"))


class TestClocks:
    """A clock that steps back gives no extra permits; one that was ahead and is corrected locks nobody out."""

    @pytest.mark.parametrize("algorithm", TENS)
    def test_a_step_back_of_a_minute_mints_nothing(self, algorithm: str) -> None:
        one = limit(algorithm, **TENS[algorithm])
        ask(replace(one, cost=10))
        for back in (1, SECOND, 60 * SECOND):
            assert not ask(one, now=NOW - back).allowed

    @pytest.mark.parametrize("algorithm", TENS)
    def test_a_clock_put_right_by_a_day_keeps_what_is_spent_and_lets_it_come_back_in_time(self, algorithm: str) -> None:
        one = limit(algorithm, **TENS[algorithm])
        ask(replace(one, cost=10), now=NOW + DAY)
        refused = ask(one, now=NOW)
        assert (refused.allowed, refused.remaining) == (False, 0)
        assert refused.retry_after is not None
        assert refused.retry_after <= (1000 if algorithm != "calendar_window" else 31 * 86_400)
        assert ask(one, now=NOW + micros(refused.retry_after)).allowed

    def test_a_decision_says_the_moment_that_it_was_made_as_at(self) -> None:
        assert ask(limit()).at == NOW
        assert ask(limit(), now=NOW - SECOND).at == NOW
        assert ask(limit(), now=NOW - 61 * SECOND).at == NOW - 61 * SECOND

    def test_the_clock_is_the_servers_to_the_microsecond(self, redis_client: RawRedis) -> None:
        before = redis_client.time()
        at = ask(limit(), now=None).at
        after = redis_client.time()
        assert before[0] * SECOND + before[1] <= at <= after[0] * SECOND + after[1]

    def test_this_machines_clock_may_be_any(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The command carries the periods of this machine's clock; if they are wrong, the script asks for others."""
        real = time.time_ns
        for wrong in (-40 * DAY, 400 * DAY, 0):
            monkeypatch.setattr(time, "time_ns", lambda wrong=wrong: real() + wrong * 1000)
            answers = [
                decide([limit("calendar_window", capacity=100, calendar_unit="hour")], account="acme", usage=usage())
                for _ in range(3)
            ]
            assert all(answer.allowed for answer in answers)
            assert abs(answers[0].at - real() // 1000) < 5 * SECOND


class TestAsync:
    async def test_every_function_has_a_version_that_is_awaited(self) -> None:
        one = limit("concurrency")
        first = await adecide([one])
        assert (first.allowed, first.remaining) == (True, 9)
        assert (await apeek([one])).remaining == 9
        assert (await areserve([one], max_wait=1)).remaining == 8
        assert first.receipt is not None
        assert (await arelease(first.receipt)).remaining == 9
        second = (await adecide([replace(one, cost=5)])).receipt
        assert second is not None
        assert (await asettle(second, [2])).remaining == 7
        with pytest.raises(AlreadySettled):
            await arefund(second)
        third = (await adecide([one])).receipt
        assert third is not None
        assert (await arefund(third)).remaining == 7
        assert (await areset([one])).remaining == 10

    async def test_many_at_once_on_one_loop_are_admitted_exactly(self, settings: Any) -> None:
        # All connect at the same moment: a busy machine may take longer than a request should wait.
        settings.RATELIMITS = {**settings.RATELIMITS, "TIMEOUT": 5}
        one = limit("fixed_window", capacity=40, period=10**6, window_start="first_hit")
        answers = await asyncio.gather(*(adecide([one]) for _ in range(100)))
        assert sum(answer.allowed for answer in answers) == 40

    def test_two_loops_and_plain_calls_share_one_limit(self) -> None:
        one = limit("fixed_window", capacity=100, period=10**6, window_start="first_hit")
        remaining = [
            asyncio.run(adecide([one])).remaining,
            decide([one]).remaining,
            asyncio.run(adecide([one])).remaining,
        ]
        assert remaining == [99, 98, 97]
