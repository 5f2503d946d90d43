"""Test a request with more rules than one decision takes: all but the last ones are decided as usual."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import redis

from ratelimits.answers.answer import Answer
from ratelimits.embedded import free_port
from ratelimits.engine.program import MAX_LIMITS
from ratelimits.identity import Identity
from ratelimits.models import KeyOverride, Rule
from ratelimits.outbound import WaitTooLong, permits
from ratelimits.quota import checking
from ratelimits.quota.prepared import Prepared
from ratelimits.rules import AppliedRule
from tests.support.entry_points import Clock, away, begin_afresh, counted
from tests.support.rows import rule, unsaved

pytestmark = pytest.mark.django_db(transaction=True)

WHO = Identity("user:1", "api_key:9", "account:acme", "ip:203.0.113.9")
Check = Callable[..., Answer]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return begin_afresh(monkeypatch)


def fill(count: int = MAX_LIMITS, **fields: Any) -> None:
    """Make rules that come first by name and that limit little."""
    values = {"capacity": 1000, "period": 3600, "rate": 1} | fields
    Rule.objects.bulk_create(unsaved(f"a{n:03}", **values) for n in range(count))


def test_an_override_that_switches_on_one_rule_too_many_leaves_all_others_as_they_are(
    check: Check, redis_client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    fill(MAX_LIMITS - 1)
    tight = rule("b", "fixed_window", period=10**8, capacity=2)
    rule("c", mode="off", on_failure="allow")
    KeyOverride.objects.create(key="user:1", rule="c", mode="enforce")
    with caplog.at_level(logging.ERROR):
        answers = [check(WHO) for _ in range(4)]
    assert [one.allowed for one in answers] == [True, True, False, False]
    assert isinstance(answers[2].binding, AppliedRule)
    assert answers[2].binding.rule == tight.pk
    assert answers[0].headers()["RateLimit"].startswith('"b";r=1')
    assert counted(redis_client)["a requests 0 acme api_key:9 1"] == 2
    assert caplog.text.count("The failure policies answer for these rules: c") == 1


def test_shadow_rules_are_left_out_first_and_then_the_last_enforced_ones(check: Check, settings: Any) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "DENY_CACHE_SECONDS": 0}
    fill(MAX_LIMITS - 1)
    Rule.objects.bulk_create(unsaved(f"Shadow{n}", mode="shadow") for n in range(3))  # first by name
    rule_z = unsaved("z", "fixed_window", period=10**8, capacity=1, on_failure="deny")
    rule_z.save()
    answers = [check(WHO) for _ in range(2)]
    assert [(one.allowed, one.unavailable) for one in answers] == [(True, False), (False, False)]
    prepared = answers[0].prepared
    assert isinstance(prepared, Prepared)
    assert [one.name for one in prepared.rules if not one.name.startswith("a")] == ["z"]
    assert prepared.left_out == ()
    assert "Nothing is recorded under these shadow rules: Shadow0, Shadow1, Shadow2" in prepared.undecided
    Rule.objects.filter(name="a000").update(mode="shadow")
    prepared = check(WHO).prepared
    assert prepared is not None
    assert [one.name for one in prepared.rules if one.name[0] != "a"] == ["Shadow0", "z"]


def test_each_rule_that_is_left_out_is_answered_by_its_own_policy(check: Check, redis_client: redis.Redis) -> None:
    fill()
    row = unsaved("z", "fixed_window", capacity=2, on_failure="allow")
    row.save()
    assert [check(WHO).allowed for _ in range(4)] == [True] * 4
    Rule.objects.filter(name="z").update(on_failure="deny")
    assert [(one.allowed, one.unavailable) for one in [check(WHO) for _ in range(3)]] == [(False, True)] * 3
    assert check(WHO, costs={"tokens": 1}).allowed  # the rule limits another meter
    assert counted(redis_client)["a requests 0 acme api_key:9 1"] == 4
    Rule.objects.filter(name="z").update(on_failure="local")
    answers = [check(WHO) for _ in range(4)]
    assert [(one.allowed, one.unavailable) for one in answers] == [(True, False)] * 2 + [(False, False)] * 2
    assert 0 < (answers[2].retry_after or 0) <= 60
    assert "Retry-After" in answers[2].headers()
    assert counted(redis_client)["a requests 0 acme api_key:9 1"] == 6  # a refusal charged no other rule
    Rule.objects.filter(name="z").update(capacity=0, on_failure="allow")
    closed = check(WHO)
    assert (closed.allowed, closed.retry_after) == (False, None)


def test_a_refusal_by_redis_takes_nothing_from_a_rule_that_is_left_out(check: Check, settings: Any) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "DENY_CACHE_SECONDS": 0}
    fill(MAX_LIMITS - 1)
    rule("b", "fixed_window", period=10**8, capacity=1)
    unsaved("z", "fixed_window", period=10**8, capacity=3, on_failure="local").save()
    assert [check(WHO).allowed for _ in range(6)] == [True] + [False] * 5
    Rule.objects.filter(name="b").update(capacity=1000)
    assert [check(WHO).allowed for _ in range(4)] == [True, True, False, False]


def test_while_redis_is_away_all_rules_are_asked_once(check: Check, settings: Any) -> None:
    fill(on_failure="allow")
    unsaved("z", "fixed_window", period=10**8, capacity=3, on_failure="local").save()
    assert check(WHO).allowed
    away(settings, free_port())
    assert [check(WHO).allowed for _ in range(4)] == [True, True, False, False]


def test_a_burst_in_one_event_loop_passes_no_more_than_one_after_the_other() -> None:
    fill()
    unsaved("z", "fixed_window", period=10**8, capacity=3, on_failure="local").save()

    async def burst() -> list[Answer]:
        return await asyncio.gather(*(checking.acheck(WHO) for _ in range(20)))

    assert sum(answer.allowed for answer in asyncio.run(burst())) == 3


def test_a_rule_that_is_left_out_still_bills(check: Check, redis_client: redis.Redis) -> None:
    fill()
    billing = unsaved("z", "calendar_window", key_kind="account", bills=True, on_failure="allow")
    billing.save()
    assert check(WHO).allowed
    assert counted(redis_client) == {f"a requests {billing.pk} acme api_key:9 1": 1}


def test_permits_are_not_prefetched_past_a_rule_that_is_left_out(check: Check) -> None:
    window = {"period": 3600, "window_start": "epoch", "prefetch": 50}
    Rule.objects.bulk_create(unsaved(f"a{n:03}", "fixed_window", **window) for n in range(MAX_LIMITS))
    unsaved("z", "fixed_window", capacity=2, on_failure="local", **window | {"prefetch": 50}).save()
    assert [check(WHO).allowed for _ in range(4)] == [True, True, False, False]


def test_of_two_names_that_redis_would_not_tell_apart_the_first_is_decided(check: Check) -> None:
    # Both have the same crc32.
    Rule.objects.bulk_create(
        unsaved(name, "fixed_window", period=10**8, capacity=1, on_failure="allow") for name in ("plumless", "buckeroo")
    )
    answers = [check(WHO) for _ in range(2)]
    assert [one.allowed for one in answers] == [True, False]
    assert answers[1].binding is not None
    assert answers[1].binding.name == "buckeroo"


@pytest.mark.parametrize(
    ("on_failure", "capacity", "passed"), [("allow", 2, 5), ("deny", 2, 0), ("local", 2, 2), ("allow", 0, 0)]
)
@pytest.mark.parametrize("is_async", [False, True])
def test_outbound_calls_do_the_same(on_failure: str, capacity: int, passed: int, is_async: bool) -> None:
    fill(MAX_LIMITS - 1, scope="mailer")
    rule("b", "fixed_window", period=10**8, capacity=5, scope="mailer")
    unsaved("z", "fixed_window", period=10**8, capacity=capacity, scope="mailer", on_failure=on_failure).save()

    async def use() -> None:
        async with permits("mailer", max_wait=0):
            pass

    allowed = 0
    for _ in range(7):
        try:
            if is_async:
                asyncio.run(use())
            else:
                with permits("mailer", max_wait=0):
                    pass
            allowed += 1
        except WaitTooLong:
            pass
    assert allowed == passed
    Rule.objects.filter(name="z").update(capacity=5, on_failure="local")
    with permits("mailer", max_wait=0) if not passed else nullcontext():
        pass
