"""Test who gets the lease that is released while outbound calls wait for it."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from decimal import Decimal
from typing import Any

import pytest

from ratelimits.algorithms.limits import Concurrency
from ratelimits.answers import observing
from ratelimits.answers.observing import Observation
from ratelimits.engine import Limit, peek, reset
from ratelimits.identity import Identity
from ratelimits.outbound import Permit, WaitTooLong, permits
from ratelimits.outbound.deciding import PROJECT
from ratelimits.quota import finishing
from tests.support.entry_points import begin_afresh
from tests.support.eventually import until
from tests.support.raw import RawRedis
from tests.support.rows import arule, rule

pytestmark = pytest.mark.django_db(transaction=True)

#: A limit in code. Its leases end only when they are released.
ONE = Concurrency(1, Decimal(3600))


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    begin_afresh(monkeypatch)


@pytest.fixture
def blocked(redis_client: RawRedis) -> Callable[[int], None]:
    """Return a function that waits until this number of calls wait at the server."""

    def wait(count: int) -> None:
        until(lambda: blocked_clients(redis_client) == count, f"{count} calls wait")

    return wait


def blocked_clients(client: RawRedis) -> int:
    clients: Any = client.info("clients")
    return int(clients["blocked_clients"])


@contextmanager
def waiting(*args: Any, **options: Any) -> Iterator[Any]:
    """Start a call in another thread; yield the future of its context manager. End its lease at last."""
    call = permits(*args, **options)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(lambda: (call.__enter__(), call))
        try:
            yield future
        finally:
            if future.exception(30) is None:
                call.__exit__()


def commands(client: RawRedis) -> int:
    """Return the number of commands that decide or wait."""
    stats: Any = client.info("commandstats")
    return sum(int(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"]) for name in ("evalsha", "blpop"))


def test_a_call_that_waited_needs_three_commands(blocked: Callable[[int], None], redis_client: RawRedis) -> None:
    with permits("jobs", rate=ONE):
        pass
    before = commands(redis_client)
    held = permits("jobs", rate=ONE)
    held.__enter__()
    with waiting("jobs", rate=ONE) as second:
        blocked(1)
        held.__exit__()
        assert second.result(30)[0].waited > 0
    # The first call takes and releases. The second one asks, waits and releases.
    assert commands(redis_client) - before == 2 + 3


def test_calls_get_leases_in_the_order_in_which_they_wait(blocked: Callable[[int], None]) -> None:
    order: list[int] = []

    def work(number: int) -> None:
        with permits("jobs", rate=ONE):
            order.append(number)

    held = permits("jobs", rate=ONE)
    held.__enter__()
    threads = [threading.Thread(target=work, args=(number,)) for number in range(5)]
    for number, thread in enumerate(threads):
        thread.start()
        blocked(number + 1)
    held.__exit__()
    for thread in threads:
        thread.join(30)
    assert order == [0, 1, 2, 3, 4]


def test_a_call_with_a_lease_can_be_settled_and_is_released_once(blocked: Callable[[int], None]) -> None:
    held = permits("jobs", rate=ONE)
    first = held.__enter__()
    with waiting("jobs", rate=ONE) as second:
        blocked(1)
        held.__exit__()
        permit: Permit = second.result(30)[0]
        assert first.receipt is not None
        # Releasing again changes nothing: the lease of the second call has another name.
        finishing.end_leases(first.receipt)
        with pytest.raises(WaitTooLong):
            permits("jobs", rate=ONE, max_wait=0).__enter__()
        permit.settle(1)
    permits("jobs", rate=ONE, max_wait=0).__enter__()


def test_a_lease_that_a_call_is_given_counts_as_an_admission(
    blocked: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Observation] = []
    monkeypatch.setattr(observing, "observers", [seen.append])
    held = permits("jobs", rate=ONE)
    held.__enter__()
    with waiting("jobs", rate=ONE) as second:
        blocked(1)
        held.__exit__()
        second.result(30)
    assert [one.outcome for one in seen] == ["admitted", "refused", "admitted"]
    assert {one.rule for one in seen} == {"in code"}


async def test_async_calls_wait_and_get_leases_too() -> None:
    await arule("mail", "concurrency", scope="mailer-api", capacity=2, lease_ttl=3600)
    at_once = most = 0

    async def work() -> None:
        nonlocal at_once, most
        async with permits("mailer-api", max_wait=60):
            at_once += 1
            most = max(most, at_once)
            await asyncio.sleep(0)
            at_once -= 1

    await asyncio.gather(*(work() for _ in range(12)))
    assert most <= 2


class TestCallersThatHaveGone:
    @pytest.fixture
    def unclaimed(self, redis_client: RawRedis) -> Limit:
        """Make a lease for a caller that does not wait any more; return its limit."""
        held = permits("jobs", rate=ONE)
        held.__enter__()
        with pytest.raises(WaitTooLong):
            permits("jobs", rate=ONE, max_wait=0.01).__enter__()
        held.__exit__()
        assert any(redis_client.type(key) == b"list" for key in redis_client.keys("*:c:*"))
        return Limit("outbound:jobs", ONE, "in code")

    def test_their_lease_goes_to_the_next_one_who_asks(self, unclaimed: Limit) -> None:
        assert peek([unclaimed]).allowed
        assert peek([unclaimed]).remaining == 1
        permits("jobs", rate=ONE, max_wait=0).__enter__()
        assert not peek([unclaimed]).allowed
        with pytest.raises(WaitTooLong):
            permits("jobs", rate=ONE, max_wait=0).__enter__()

    @pytest.mark.usefixtures("unclaimed")
    def test_the_call_for_which_it_was_made_is_not_forgotten(self, blocked: Callable[[int], None]) -> None:
        taken = permits("jobs", rate=ONE, max_wait=0)
        taken.__enter__()
        with waiting("jobs", rate=ONE) as first, waiting("jobs", rate=ONE) as second:
            blocked(2)
            taken.__exit__()
            until(lambda: first.done() or second.done(), "one of them has the lease")
            done = first if first.done() else second
            done.result()[1].__exit__()

    def test_a_reset_ends_it(self, unclaimed: Limit, redis_client: RawRedis) -> None:
        reset([unclaimed])
        assert not any(redis_client.type(key) == b"list" for key in redis_client.keys("*:c:*"))
        permits("jobs", rate=ONE, max_wait=0).__enter__()
        with pytest.raises(WaitTooLong):
            permits("jobs", rate=ONE, max_wait=0).__enter__()


class TestOtherTerms:
    def test_a_call_under_edited_rules_asks_again(self, blocked: Callable[[int], None]) -> None:
        rule("mail", "concurrency", scope="mailer-api", capacity=1, lease_ttl=3600)
        held = permits("mailer-api")
        held.__enter__()
        with waiting("mailer-api", max_wait=60) as second:
            blocked(1)
            rule("stop", "fixed_window", scope="mailer-api", capacity=0, period=60)
            held.__exit__()
            with pytest.raises(WaitTooLong, match="the limit 'stop'"):
                second.result(30)

    def test_a_lowered_capacity_gives_no_lease_above_it(self, blocked: Callable[[int], None]) -> None:
        row = rule("mail", "concurrency", scope="mailer-api", capacity=2, lease_ttl=3600)
        held = [permits("mailer-api") for _ in range(2)]
        for one in held:
            one.__enter__()
        row.capacity = 1
        row.save()
        with waiting("mailer-api") as third:
            blocked(1)
            held[0].__exit__()
            with pytest.raises(WaitTooLong):
                permits("mailer-api", max_wait=0).__enter__()
            assert not third.done()
            held[1].__exit__()
            third.result(30)

    def test_calls_with_several_limits_or_permits_never_exceed_a_limit(self) -> None:
        rule("all", "concurrency", scope="mailer-api", capacity=4, lease_ttl=3600, key_kind="global")
        rule("each", "concurrency", scope="mailer-api", capacity=2, lease_ttl=3600, key_kind="user")
        lock, at_once, most = threading.Lock(), {"all": 0, "user:1": 0}, {"all": 0, "user:1": 0}

        def work(number: int) -> None:
            cost, of_user = random.Random(number).choice((1, 1, 2)), number % 3 == 0
            names = ("all", "user:1") if of_user else ("all",)
            with permits("mailer-api", cost, identity=Identity(user="user:1") if of_user else PROJECT):
                with lock:
                    for name in names:
                        at_once[name] += cost
                        most[name] = max(most[name], at_once[name])
                time.sleep(0.005)
                with lock:
                    for name in names:
                        at_once[name] -= cost

        with ThreadPoolExecutor(12) as pool:
            list(pool.map(work, range(60)))
        assert most["all"] <= 4
        assert most["user:1"] <= 2

    def test_a_call_of_two_permits_gives_back_a_lease_that_was_meant_for_a_call_of_one(
        self, blocked: Callable[[int], None]
    ) -> None:
        limit = Concurrency(2, Decimal(3600))
        first, second = permits("jobs", rate=limit), permits("jobs", rate=limit)
        first.__enter__()
        second.__enter__()
        with pytest.raises(WaitTooLong):
            permits("jobs", rate=limit, max_wait=0.01).__enter__()
        first.__exit__()  # This makes a lease for the call that has gone.
        with waiting("jobs", 2, rate=limit) as both:
            blocked(1)
            second.__exit__()
            both.result(30)
            assert not peek([Limit("outbound:jobs", limit, "in code")]).allowed
        assert peek([Limit("outbound:jobs", limit, "in code", cost=2)]).allowed
