"""Test the tools of `ratelimits.testing` in this process: rules, clock and switch, at every entry point."""

from __future__ import annotations

import asyncio
import re
import unittest
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Group
from django.core.checks import CheckMessage
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory, override_settings
from rest_framework.test import APIRequestFactory
from rest_framework.views import APIView

from ratelimits import rules
from ratelimits.algorithms.limits import FixedWindow
from ratelimits.answers.answer import Answer
from ratelimits.checks.settings import check_enabled
from ratelimits.decorators import limited
from ratelimits.engine import Limit
from ratelimits.engine.clock import clock as engine_clock
from ratelimits.engine.server import test_suffix as suffix
from ratelimits.identity import Identity
from ratelimits.middleware import QuotaMiddleware
from ratelimits.models import Plan, PlanMembership, Rule
from ratelimits.outbound import permits
from ratelimits.quota import from_memory, without_decision
from ratelimits.testing import FrozenClock, frozen_quota_clock, no_rate_limits, override_rules
from ratelimits.throttling import QuotaThrottle
from ratelimits.throttling.by_rates import check_limits
from tests.support.raw import RawRedis

pytestmark = pytest.mark.django_db

Check = Callable[..., Answer]
BURST: dict[str, Any] = {
    "name": "burst", "algorithm": "fixed_window", "capacity": 2, "period": 60, "window_start": "first_hit",
    "key_kind": "ip",
}  # fmt: skip
ADA = Identity(address="ip:192.0.2.1")


def allowed(check: Check, times: int = 3, who: Identity = ADA) -> list[bool]:
    return [check(who).allowed for _time in range(times)]


def test_only_the_given_rules_apply_within_the_block(check: Check) -> None:
    Rule.objects.create(**{**BURST, "name": "stored", "capacity": 0})
    assert allowed(check) == [False] * 3
    with override_rules([BURST]):
        assert allowed(check) == [True, True, False]
    with override_rules():
        assert allowed(check) == [True] * 3
    assert allowed(check) == [False] * 3


def test_each_block_begins_with_all_permits_and_ends_with_those_from_before(check: Check) -> None:
    with override_rules([BURST]):
        assert allowed(check, 1) == [True]
        with override_rules([{**BURST, "capacity": 1}]):
            assert allowed(check, 2) == [True, False]
        assert allowed(check, 2) == [True, False]


def test_members_of_plans_and_overrides_are_those_of_the_database(check: Check) -> None:
    user = Identity(user="user:7")
    with override_rules([{"name": "r", "rate": "1/h"}, {"name": "r", "rate": "3/h", "plan": "pro"}]):
        assert allowed(check, 2, user) == [True, False]
        PlanMembership.objects.create(key="user:7", plan=Plan.objects.create(name="Pro", slug="pro"))
        assert allowed(check, 3, user) == [True, True, False]


@pytest.mark.django_db(transaction=True)
def test_committed_members_count_at_once(check: Check) -> None:
    user = Identity(user="user:7")
    with override_rules([{"name": "r", "rate": "1/h"}, {"name": "r", "rate": "3/h", "plan": "pro"}]):
        assert allowed(check, 2, user) == [True, False]
        PlanMembership.objects.create(key="user:7", plan=Plan.objects.create(name="Pro", slug="pro"))
        assert allowed(check, 3, user) == [True, True, False]


def test_members_of_groups_are_those_of_the_database(check: Check) -> None:
    user, group = get_user_model().objects.create(username="ada"), Group.objects.create(name="beta")
    who = Identity(user=f"user:{user.pk}")
    with override_rules([{"name": "r", "rate": "1/h", "group": "beta"}]):
        assert allowed(check, 2, who) == [True, True]
        user.groups.add(group)
        assert allowed(check, 2, who) == [True, False]
        user.groups.clear()
        assert allowed(check, 2, who) == [True, True]


def test_a_rule_may_be_an_unsaved_row(check: Check) -> None:
    with override_rules([Rule(**BURST)]):
        assert allowed(check) == [True, True, False]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"name": "no numbers"}, "The rule 'no numbers' is not valid: "),
        ({"rate": "10 apples"}, "The rule 'rule-1' is not valid: “10 apples” is not a rate: write a number, a slash"),
        ({**BURST, "period": "1 mo"}, "“1 mo” is not a length of time: write seconds"),
        ({**BURST, "mode": "perhaps"}, "mode must be one of 'enforce', 'shadow', 'off', not 'perhaps'"),
        (
            {**BURST, "algorithm": "token_buckt", "rate": "1/s"},
            "algorithm must be one of 'token_bucket', 'fixed_window', ",
        ),
        ({**BURST, "capacity": "ten"}, "capacity: “ten” value must be an integer"),
        ({**BURST, "capacity": -1}, "capacity must be at least 0"),
        ({"name": "r", "capcity": 1}, "a rule has no field 'capcity': do you mean 'capacity'?"),
        ({"name": "r", "xyz": 1}, "a rule has no field 'xyz': write one of "),
        ({"name": "r", 3: 1}, "a rule has no field 3: write one of "),
        ({**BURST, "plan": 3}, "plan must be the slug of a plan, such as 'pro', not 3"),
        ("burst", "Rule 1 is 'burst': write a list of rules, each a dict such as {\"name\": "),
    ],
)
def test_a_rule_that_is_not_valid_says_why(rule: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        override_rules([rule])


@override_rules([BURST])
def test_as_a_decorator_of_a_function() -> None:
    from ratelimits.quota.checking import check

    assert allowed(check) == [True, True, False]


@override_rules([BURST])
async def test_as_a_decorator_of_an_async_function() -> None:
    from ratelimits.quota.checking import acheck

    assert [(await acheck(ADA)).allowed for _time in range(3)] == [True, True, False]


def test_as_a_decorator_of_a_class_it_begins_anew_in_each_test() -> None:
    from ratelimits.quota.checking import check

    @override_rules([BURST])
    @frozen_quota_clock(attr_name="clock")
    class Tests(unittest.TestCase):
        clock: FrozenClock

        def test_one(self) -> None:
            assert allowed(check) == [True, True, False]
            self.clock.tick(60)
            assert allowed(check) == [True, True, False]

        test_two = test_one

    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(Tests).run(result)
    assert (result.testsRun, result.failures, result.errors) == (2, [], [])


def test_nothing_stays_behind(redis_client: RawRedis) -> None:
    from ratelimits.quota.checking import check

    allowed(check)
    before = suffix()
    with override_rules([BURST]), frozen_quota_clock(), no_rate_limits():
        pass
    with override_rules([BURST]):
        allowed(check)
        own = suffix()
    assert suffix() == before
    assert [key for key in redis_client.keys(f"*{own}*") if redis_client.ttl(key) < 0] == []
    assert engine_clock.frozen is None
    assert allowed(check) == [True] * 3


class TestTheClock:
    def test_it_moves_only_by_hand(self, check: Check) -> None:
        with override_rules([BURST]), frozen_quota_clock(datetime(2030, 1, 1, tzinfo=UTC)) as clock:
            assert allowed(check) == [True, True, False]
            answer = check(ADA)
            assert answer.retry_after == 60
            assert answer.headers()["Retry-After"] == "60"
            assert clock.tick(59.999_999) == datetime(2030, 1, 1, 0, 0, 59, 999_999, UTC)
            assert allowed(check, 1) == [False]
            clock.tick(timedelta(microseconds=1))
            assert allowed(check) == [True, True, False]

    def test_the_fallback_forgets_what_was_spent_in_its_time(self) -> None:
        limits: list[Any] = [("ip:192.0.2.1", "burst", FixedWindow(1, Decimal(60)), 1)]
        with frozen_quota_clock(datetime(2030, 1, 1, tzinfo=UTC)):
            assert [without_decision.local.charge(limits) for _time in range(2)] == [0, 60]
        assert without_decision.local.charge(limits) == 0

    @pytest.mark.parametrize("algorithm", ["token_bucket", "gcra", "sliding_log", "leaky_bucket"])
    def test_every_algorithm_follows_it(self, check: Check, algorithm: str) -> None:
        numbers = {"capacity": 2, "period": 60} | ({} if algorithm == "sliding_log" else {"rate": 2})
        rule = {"name": "r", "algorithm": algorithm, "key_kind": "ip", **numbers}
        with override_rules([rule]), frozen_quota_clock() as clock:
            for _minute in range(3):
                assert allowed(check) == [True, True, False]
                clock.tick(60)

    def test_calendar_days_begin_when_it_says_so(self, check: Check) -> None:
        day = {"name": "daily", "algorithm": "calendar_window", "capacity": 1, "calendar_unit": "day", "key_kind": "ip"}
        with override_rules([day]), frozen_quota_clock(datetime(2026, 2, 28, 23, 59, tzinfo=UTC)) as clock:
            assert allowed(check, 2) == [True, False]
            clock.move_to(datetime(2026, 3, 1, tzinfo=UTC))
            assert allowed(check, 2) == [True, False]

    def test_prefetched_permits_end_with_their_window(self, check: Check) -> None:
        with override_rules([{**BURST, "window_start": "epoch", "prefetch": 2}]), frozen_quota_clock() as clock:
            for _minute in range(3):
                assert allowed(check) == [True, True, False]
                clock.tick(60)

    def test_a_request_that_waits_moves_it(self, check: Check) -> None:
        from ratelimits.quota.waiting import acheck_and_wait, check_and_wait

        queue = {"name": "q", "algorithm": "leaky_bucket_queue", "rate": "1/h", "max_wait": 7200, "key_kind": "ip"}
        with override_rules([queue]), frozen_quota_clock() as clock:
            start = clock.now
            for _request in range(2):
                assert check_and_wait(ADA, "*", "GET", {"requests": 1}).allowed
            assert clock.now - start == timedelta(hours=1)
            assert asyncio.run(acheck_and_wait(ADA, "*", "GET", {"requests": 1})).allowed
            assert clock.now - start == timedelta(hours=2)

    def test_the_moment_in_a_header_is_its_own(self, check: Check, settings: Any) -> None:
        settings.RATELIMITS = {**settings.RATELIMITS, "X_RATELIMIT_HEADERS": True, "X_RATELIMIT_RESET": "epoch"}
        start = datetime(2030, 3, 1, tzinfo=UTC)
        with override_rules([{**BURST, "window_start": "epoch"}]), frozen_quota_clock(start) as clock:
            fields = check(ADA).headers()
            assert 0 <= int(fields["X-RateLimit-Reset"]) - start.timestamp() <= 60
            clock.tick(3600)
            assert 3600 <= int(check(ADA).headers()["X-RateLimit-Reset"]) - start.timestamp() <= 3660

    def test_an_outbound_call_that_waits_moves_it(self) -> None:
        async def call() -> None:
            async with permits("mailer", rate="1/h"):
                pass

        with frozen_quota_clock() as clock:
            start = clock.now
            for _call in range(2):
                with permits("mailer", rate="1/h"):
                    pass
            asyncio.run(call())
            assert clock.now - start == timedelta(hours=2)

    def test_memberships_begin_when_it_says_so(self, check: Check) -> None:
        user, noon = Identity(user="user:7"), datetime(2026, 6, 1, 12, tzinfo=UTC)
        pro = Plan.objects.create(name="Pro", slug="pro")
        PlanMembership.objects.create(key="user:7", plan=pro, valid_from=noon)
        rules_of_plans = [{"name": "r", "rate": "1/h"}, {"name": "r", "rate": "3/h", "plan": "pro"}]
        with override_rules(rules_of_plans), frozen_quota_clock(noon - timedelta(seconds=1)) as clock:
            assert allowed(check, 2, user) == [True, False]
            clock.tick()
            assert allowed(check, 3, user) == [True, True, False]

    def test_limits_in_code_follow_it(self) -> None:
        limits = [Limit("ip:192.0.2.1", FixedWindow(1, Decimal(60), "first_hit"))]
        with frozen_quota_clock() as clock:
            assert [check_limits(limits).allowed for _time in range(2)] == [True, False]
            clock.tick(60)
            assert check_limits(limits).allowed

    def test_it_does_not_go_back(self) -> None:
        with frozen_quota_clock() as clock:
            with pytest.raises(ValueError, match="only forward"):
                clock.tick(-1)
            with pytest.raises(ValueError, match="only forward"):
                clock.move_to(clock.now - timedelta(seconds=1))
        with pytest.raises(ValueError, match="no time zone"):
            frozen_quota_clock(datetime(2026, 1, 1))

    @pytest.mark.django_db(transaction=True)
    def test_edits_of_rules_still_take_effect(self, check: Check) -> None:
        Rule.objects.create(**BURST)
        with frozen_quota_clock() as clock:
            assert allowed(check) == [True, True, False]
            Rule.objects.update(capacity=3)
            clock.tick(60)
            assert allowed(check, 4) == [True] * 3 + [False]


class Hello(APIView):
    authentication_classes = ()
    permission_classes = ()
    throttle_classes = (QuotaThrottle,)

    def get(self, request: Any) -> HttpResponse:
        return HttpResponse("hello")


@limited()
def plain(request: HttpRequest) -> HttpResponse:
    return HttpResponse("hello")


def by_middleware(request: HttpRequest) -> Any:
    return QuotaMiddleware(lambda _request: HttpResponse("hello"))(request)


VIEWS = [
    pytest.param(Hello.as_view(), APIRequestFactory(), id="throttle"),
    pytest.param(plain, RequestFactory(), id="decorator"),
    pytest.param(by_middleware, RequestFactory(), id="middleware"),
]


@pytest.fixture
def paths() -> Any:
    from django.conf import settings

    with override_settings(RATELIMITS={**settings.RATELIMITS, "PATHS": ["/anywhere/"]}):
        yield


@pytest.mark.parametrize(("view", "factory"), VIEWS)
@pytest.mark.usefixtures("paths")
class TestTheEntryPoints:
    def test_each_follows_rules_and_clock(self, view: Any, factory: Any) -> None:
        with override_rules([BURST]), frozen_quota_clock() as clock:
            for _minute in range(2):
                answers = [view(factory.get("/anywhere/")) for _time in range(3)]
                assert [answer.status_code for answer in answers] == [200, 200, 429]
                assert answers[2]["Retry-After"] == "60"
                clock.tick(60)

    def test_each_passes_everything_without_limits(self, view: Any, factory: Any, redis_client: RawRedis) -> None:
        with override_rules([{**BURST, "capacity": 0}]):
            assert view(factory.get("/anywhere/")).status_code == 429
            with no_rate_limits():
                from_memory.sender.flush()  # Otherwise its thread can send the refusal's count after `flushall`.
                redis_client.flushall()
                assert view(factory.get("/anywhere/")).status_code == 200
                assert redis_client.keys("*") == []
            assert view(factory.get("/anywhere/")).status_code == 429


def test_switched_off_nothing_in_code_is_limited(check: Check) -> None:
    with no_rate_limits():
        assert check_limits([Limit("ip:192.0.2.1", FixedWindow(0, Decimal(60)))]).allowed
        with permits("mailer", cost=100, rate="1/h", max_wait=0):
            pass
        assert check(ADA, costs={"no such meter": 3}) == Answer(True)


def test_a_check_warns_in_production_only() -> None:
    def warned() -> list[CheckMessage]:
        return check_enabled(None)

    assert warned() == []
    with no_rate_limits():
        [warning] = warned()
        assert warning.id == "ratelimits.W004"
        with override_settings(DEBUG=True):
            assert warned() == []


def test_the_rules_of_the_database_are_read_again_afterwards(check: Check) -> None:
    with override_rules([BURST]):
        assert [row.name for row in rules.current().rows.rules.values()] == ["burst"]
        Rule.objects.create(**{**BURST, "name": "stored"})
    assert [row.name for row in rules.current().rows.rules.values()] == ["stored"]
