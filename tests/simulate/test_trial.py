"""Test what a rule admits under the loads of the rule form's chart, on a real server."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
import redis

from ratelimits.algorithms.limits import ALGORITHMS, algorithm_from_json
from ratelimits.engine.server import current_server
from ratelimits.simulate.trial import MAX_LINES, MIN_SLOTS, SLOTS, TrialResult, try_rule
from tests.support.rows import NEEDED

NOW = 1_800_000_000_123_456


def tried(max_wait: Any = None, **rule: Any) -> tuple[TrialResult, TrialResult]:
    waits = None if max_wait is None else Decimal(max_wait)
    bursts, overload = try_rule(current_server().wire, algorithm_from_json(rule), waits, NOW)
    assert (bursts.kind, overload.kind) == ("bursts", "overload")
    return bursts, overload


def test_a_token_bucket_admits_its_burst_and_then_its_rate() -> None:
    bursts, overload = tried(algorithm="token_bucket", capacity=10, rate=5, period=1)
    # All tokens come back in 2 s: the loads last 6 s.
    assert [bursts.length, bursts.permits, bursts.interval] == [6, 20, 1]
    assert (bursts.requested, bursts.admitted) == (120, 10 + 5 * 5)
    assert bursts.slots[0].admitted == 10
    assert bursts.slots[0].refused == 10
    # 10 a second come; 10 tokens and 5 a second are there.
    assert (overload.requested, overload.admitted) == (60, 10 + 29)
    assert overload.longest_wait == 0
    # A steady load looks steady.
    assert {slot.requested for slot in overload.slots} == {2}


def test_a_fixed_window_admits_its_capacity_in_each_window() -> None:
    bursts, overload = tried(algorithm="fixed_window", capacity=100, period=60)
    assert bursts.admitted == 300
    assert [slot.admitted for slot in bursts.slots if slot.requested] == [100, 0, 100, 0, 100, 0]
    assert overload.admitted == 300


def test_a_calendar_window_begins_at_its_start_and_large_numbers_stay_few_requests() -> None:
    bursts, overload = tried(algorithm="calendar_window", capacity=100_000, calendar_unit="day", timezone="Asia/Tokyo")
    assert bursts.length == 3 * 86_400
    assert bursts.admitted == overload.admitted == 300_000
    assert overload.requested == 600_000


def test_a_queue_lets_requests_proceed_evenly_after_a_wait() -> None:
    bursts, _overload = tried("2", algorithm="leaky_bucket_queue", capacity=10, rate=5, period=1)
    assert bursts.longest_wait == 2
    busy = [slot.admitted for slot in bursts.slots[:40]]
    assert max(busy) <= 2
    assert sum(slot.refused for slot in bursts.slots) == bursts.requested - bursts.admitted


def test_concurrency_is_tried_with_requests_that_take_a_second() -> None:
    bursts, _overload = tried(algorithm="concurrency", capacity=4)
    assert bursts.duration == 1
    assert [slot.admitted for slot in bursts.slots if slot.requested] == [4, 0, 4, 0, 4, 0]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("scale", [1, 10**6])
def test_every_algorithm_is_tried_with_bounded_work_and_leaves_nothing(
    algorithm: str, scale: int, redis_client: redis.Redis
) -> None:
    numbers = dict(NEEDED[algorithm])
    max_wait = numbers.pop("max_wait", None)
    for name in ("capacity", "rate"):
        if name in numbers:
            numbers[name] *= scale
    before = redis_client.info("commandstats")
    for one in tried(max_wait, algorithm=algorithm, **numbers):
        assert MIN_SLOTS <= len(one.slots) <= SLOTS
        assert sum(slot.requested for slot in one.slots) == one.requested
        assert 0 < one.admitted < one.requested
    assert redis_client.keys() == []
    after = redis_client.info("commandstats")
    calls = sum(after[name]["calls"] - before.get(name, {}).get("calls", 0) for name in after if "eval" in name)
    assert 0 < calls <= 4 * MAX_LINES
