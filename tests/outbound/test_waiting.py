"""Test outbound calls: they wait their turn on every algorithm, and give up after their longest wait."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.urls import path

from ratelimits.algorithms.limits import Concurrency, FixedWindow
from ratelimits.answers import observing
from ratelimits.answers.observing import Observation
from ratelimits.decorators import limited
from ratelimits.identity import Identity
from ratelimits.outbound import Permit, WaitTooLong, permits
from ratelimits.quota.costs import WrongCost
from tests.support.entry_points import away, begin_afresh, counted, own_breaker
from tests.support.raw import RawRedis
from tests.support.rows import NEEDED, arule, rule

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls("tests.outbound.test_waiting")]

#: A limit of each algorithm that grants one call at once, and the next one after 0.1 s or less.
TIGHT: dict[str, dict[str, Any]] = {
    "token_bucket": {"capacity": 1, "rate": 10},
    "gcra": {"capacity": 1, "rate": 10},
    "leaky_bucket": {"capacity": 1, "rate": 10},
    "leaky_bucket_queue": {"capacity": 5, "rate": 10},
    "smooth_bursty": {"rate": 10, "max_burst_seconds": "0.1"},
    "smooth_warming_up": {"rate": 10, "warm_up": "0.1", "cold_factor": 1},
    "fixed_window": {"capacity": 1, "period": "0.1", "window_start": "first_hit"},
    "sliding_window": {"capacity": 1, "period": "0.1", "sub_windows": 2},
    "sliding_log": {"capacity": 1, "period": "0.1"},
    "calendar_window": {"capacity": 5, "calendar_unit": "hour"},
    "concurrency": {"capacity": 1},
}

working = threading.Event()
finish = threading.Event()


@limited("mailer-api")
def slow(request: HttpRequest) -> HttpResponse:
    working.set()
    assert finish.wait(10)
    return HttpResponse()


urlpatterns = [path("slow/", slow)]


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    begin_afresh(monkeypatch)


@pytest.fixture(params=["with", "async with"])
def call(request: pytest.FixtureRequest) -> Callable[..., Permit]:
    """Make one outbound call, in a `with` block and in an `async with` block; return its permit."""

    def make(*args: Any, **options: Any) -> Permit:
        if request.param == "with":
            with permits(*args, **options) as permit:
                return permit

        async def amake() -> Permit:
            async with permits(*args, **options) as permit:
                return permit

        return asyncio.run(amake())

    return make


def test_every_algorithm_is_tested() -> None:
    assert TIGHT.keys() == NEEDED.keys()


@pytest.mark.parametrize("algorithm", TIGHT)
def test_calls_wait_their_turn(algorithm: str, call: Callable[..., Permit]) -> None:
    rule("mail", algorithm, scope="mailer-api", **TIGHT[algorithm])
    started = time.monotonic()
    waited = [call("mailer-api", max_wait=5).waited for _ in range(3)]
    took = time.monotonic() - started
    if algorithm in ("calendar_window", "concurrency"):
        assert max(waited) < 5  # they are granted at once
    else:
        assert 0.1 < took < 3
        assert max(waited) > 0.05


def test_a_reserving_limit_needs_one_command_for_a_permit(redis_client: RawRedis) -> None:
    rule("mail", "token_bucket", scope="mailer-api", capacity=1, rate=100)
    with permits("mailer-api"):
        pass
    before = _evaluations(redis_client)
    for _ in range(10):
        with permits("mailer-api"):
            pass
    assert _evaluations(redis_client) - before == 10


def _evaluations(client: RawRedis) -> int:
    stats: Any = client.info("commandstats")
    return int(stats["cmdstat_evalsha"]["calls"])


def test_a_longest_wait_names_the_limit_and_when_to_try_again(
    call: Callable[..., Permit], redis_client: RawRedis
) -> None:
    rule("mail", "token_bucket", scope="mailer-api", capacity=1, rate=1, period=60)
    call("mailer-api")
    started = time.monotonic()
    with pytest.raises(WaitTooLong, match=r"mailer-api: the limit 'mail' .* within 30 s") as caught:
        call("mailer-api", max_wait=30)
    assert time.monotonic() - started < 5
    assert caught.value.limit == "mail"
    assert caught.value.retry_after is not None
    assert 50 < caught.value.retry_after <= 60
    # Nothing was charged, and a call is not the usage of an account.
    with pytest.raises(WaitTooLong) as again:
        call("mailer-api", max_wait=30)
    assert again.value.retry_after is not None
    assert again.value.retry_after < caught.value.retry_after
    assert counted(redis_client) == {}


def test_a_cost_above_the_capacity_is_never_granted(call: Callable[..., Permit]) -> None:
    rule("mail", "sliding_log", scope="mailer-api", capacity=5, period=1)
    with pytest.raises(WaitTooLong) as caught:
        call("mailer-api", cost=6)
    assert caught.value.retry_after is None


def test_a_full_queue_is_waited_for(call: Callable[..., Permit]) -> None:
    rule("mail", "leaky_bucket_queue", scope="mailer-api", capacity=1, rate=10, max_wait=1)
    calls = [threading.Thread(target=lambda: permits("mailer-api").__enter__()) for _ in range(3)]
    for thread in calls:
        thread.start()
    assert call("mailer-api", max_wait=5).waited < 5
    for thread in calls:
        thread.join()


def test_costs_are_given_by_meter_and_settled(call: Callable[..., Permit]) -> None:
    rule("tokens", "token_bucket", scope="llm", meter="tokens", capacity=3000, rate=3000, period=60)
    permit = call("llm", {"tokens": 2500})
    permit.settle({"tokens": 500})
    assert call("llm", {"tokens": 2500}, max_wait=0).waited < 1
    with pytest.raises(WaitTooLong):
        call("llm", {"tokens": 100}, max_wait=0)
    with pytest.raises(ValueError, match="only in tokens"):
        permit.settle(5)


async def test_a_call_is_settled_in_async_code() -> None:
    async with permits("llm", 60, rate=FixedWindow(100, Decimal(60))) as permit:
        await permit.asettle(10)
    async with permits("llm", 90, rate=FixedWindow(100, Decimal(60)), max_wait=0):
        pass


def test_only_rules_of_this_very_scope_apply(call: Callable[..., Permit]) -> None:
    rule("everything", "fixed_window", capacity=0, period=60, key_kind="global")
    rule("posts", "fixed_window", scope="mailer-api:POST", capacity=0, period=60)
    assert call("mailer-api", max_wait=0).receipt is None


def test_rules_of_a_user_apply_to_a_call_for_this_user(call: Callable[..., Permit]) -> None:
    rule("mail", "fixed_window", scope="mailer-api", key_kind="user", capacity=1, period=3600)
    ann, bob = Identity(user="user:1"), Identity(user="user:2")
    call("mailer-api", identity=ann)
    call("mailer-api", identity=bob, max_wait=0)
    with pytest.raises(WaitTooLong):
        call("mailer-api", identity=ann, max_wait=0)


def test_rules_of_a_network_apply_to_a_call_for_an_address_in_it(call: Callable[..., Permit]) -> None:
    rule("net", "fixed_window", scope="mailer-api", key_kind="ip", ipv4_prefix=24, capacity=1, period=3600)
    call("mailer-api", identity=Identity(address="ip:203.0.113.9"))
    call("mailer-api", identity=Identity(address="ip:198.51.100.9"), max_wait=0)
    with pytest.raises(WaitTooLong):
        call("mailer-api", identity=Identity(address="ip:203.0.113.7"), max_wait=0)


def test_a_rate_given_in_code_needs_no_rule(call: Callable[..., Permit]) -> None:
    started = time.monotonic()
    for _ in range(4):
        call("other-api", rate="10/s")
    assert 0.3 <= time.monotonic() - started < 3
    with pytest.raises(ValueError, match="is not a rate"):
        call("other-api", rate="ten")
    with pytest.raises(ValueError, match="one meter"):
        call("other-api", {"tokens": 1, "requests": 1}, rate="10/s")


def test_a_wrong_cost_is_refused(call: Callable[..., Permit]) -> None:
    with pytest.raises(WrongCost):
        call("mailer-api", -1)


def test_an_edit_applies_to_the_next_call(call: Callable[..., Permit]) -> None:
    row = rule("mail", "fixed_window", scope="mailer-api", capacity=1, period=3600)
    call("mailer-api")
    row.capacity = 2
    row.save()
    call("mailer-api", max_wait=0)
    with pytest.raises(WaitTooLong):
        call("mailer-api", max_wait=0)


class TestInterrupted:
    async def test_a_cancelled_wait_gives_its_permits_back(self) -> None:
        await arule("mail", "token_bucket", scope="mailer-api", capacity=1, rate=1, period=3600)
        async with permits("mailer-api"):
            pass
        waiting = asyncio.ensure_future(permits("mailer-api").__aenter__())
        await asyncio.sleep(0.2)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        with pytest.raises(WaitTooLong) as caught:
            await permits("mailer-api", max_wait=0).__aenter__()
        assert caught.value.retry_after is not None
        assert caught.value.retry_after < 3600


class TestConcurrency:
    def test_a_call_waits_for_the_release_of_another(self, call: Callable[..., Permit]) -> None:
        rule("mail", "concurrency", scope="mailer-api", capacity=1, lease_ttl=3600)
        held = permits("mailer-api")
        held.__enter__()
        threading.Timer(0.3, held.__exit__).start()
        assert 0.1 < call("mailer-api", max_wait=60).waited < 30

    def test_each_release_wakes_one_of_many(self) -> None:
        at_once, most, lock = [0], [0], threading.Lock()

        def work() -> None:
            with permits("jobs", rate=Concurrency(2, Decimal(3600)), max_wait=60):
                with lock:
                    at_once[0] += 1
                    most[0] = max(most[0], at_once[0])
                time.sleep(0.01)
                with lock:
                    at_once[0] -= 1

        threads = [threading.Thread(target=work) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        assert most == [2]

    def test_the_end_of_a_request_wakes_a_waiting_call(self, call: Callable[..., Permit]) -> None:
        rule("mail", "concurrency", scope="mailer-api", key_kind="global", capacity=1, lease_ttl=3600)
        working.clear()
        finish.clear()
        request = threading.Thread(target=lambda: Client().get("/slow/"))
        request.start()
        assert working.wait(10)
        threading.Timer(0.3, finish.set).start()
        assert 0.1 < call("mailer-api", max_wait=60).waited < 30
        request.join()

    def test_a_lease_that_nobody_releases_expires(self, call: Callable[..., Permit]) -> None:
        limit = Concurrency(1, Decimal("0.3"))
        permits("jobs", rate=limit).__enter__()
        assert call("jobs", rate=limit, max_wait=60).waited < 30

    def test_nothing_stays_in_redis_for_callers_that_have_gone(
        self, call: Callable[..., Permit], redis_client: RawRedis
    ) -> None:
        limit = Concurrency(1, Decimal(3600))
        with permits("jobs", rate=limit), pytest.raises(WaitTooLong):
            call("jobs", rate=limit, max_wait=0)
        assert all(redis_client.pttl(key) > 0 for key in redis_client.keys("*:c:*"))
        call("jobs", rate=limit, max_wait=0)


class TestWithoutRedis:
    @pytest.fixture(autouse=True)
    def _away(self, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        away(settings, 1)
        own_breaker(monkeypatch)

    def test_the_policy_allow_lets_calls_pass(self, call: Callable[..., Permit]) -> None:
        rule("mail", "fixed_window", scope="mailer-api", capacity=1, period=60, on_failure="allow")
        for _ in range(3):
            assert call("mailer-api").receipt is None

    def test_the_policy_deny_makes_calls_wait(self, call: Callable[..., Permit]) -> None:
        rule("mail", "fixed_window", scope="mailer-api", capacity=1, period=60, on_failure="deny")
        with pytest.raises(WaitTooLong) as caught:
            call("mailer-api", max_wait=0.5)
        assert caught.value.retry_after == 1

    def test_the_policy_local_limits_each_process(self, call: Callable[..., Permit]) -> None:
        rule("mail", "fixed_window", scope="mailer-api", capacity=1, period=3600, on_failure="local")
        call("mailer-api", max_wait=0)
        with pytest.raises(WaitTooLong, match="Redis does not answer"):
            call("mailer-api", max_wait=0)

    def test_metrics_get_the_same_outcomes_as_for_http_requests(
        self, call: Callable[..., Permit], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[Observation] = []
        monkeypatch.setattr(observing, "observers", [seen.append])
        rule("mail", "fixed_window", scope="mailer-api", capacity=1, period=3600, on_failure="local")
        rule("text", "fixed_window", scope="sms-api", capacity=1, period=3600, on_failure="deny")
        call("mailer-api", max_wait=0)
        for name in ("mailer-api", "sms-api"):
            with pytest.raises(WaitTooLong):
                call(name, max_wait=0)
        assert [one.outcome for one in seen] == ["unmetered", "refused", "unavailable"]
