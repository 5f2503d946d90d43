"""Test that requests with prefetched permits are counted: each once, in its bin, and within a second."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from ratelimits import rules
from ratelimits.answers.answer import Answer
from ratelimits.billing.reports.gaps import describe
from ratelimits.conf import conf
from ratelimits.engine.call import new_nonce
from ratelimits.engine.counting import MAX_SPENT_COUNTERS, CountSpent, Spent, uncounted
from ratelimits.engine.decide import decide_call
from ratelimits.engine.server import current_server
from ratelimits.identity import Identity
from ratelimits.models import Rule
from ratelimits.quota import checking, prefetch, prepared, spending
from ratelimits.quota.prefetch import PrefetchedPermits
from ratelimits.usage.counting import process_totals
from ratelimits.usage.ledger import process_totals as declaring
from ratelimits.usage.ledger.drain import drain
from ratelimits.usage.ledger.process_totals import declare_unreported
from ratelimits.usage.ledger.seal import seal
from ratelimits.usage.models import DurabilityGap, Line, ProcessTotal
from tests.support.engine.asking import NOW, SECOND, home
from tests.support.engine.asking import counted as fields
from tests.support.engine.proxy import Proxy
from tests.support.entry_points import away, begin_afresh, counted
from tests.support.eventually import until
from tests.support.quota.prefetching import Process, call
from tests.support.raw import RawRedis
from tests.support.rows import arule, rule
from tests.support.servers import TestServers

pytestmark = pytest.mark.django_db(transaction=True)

WHO = Identity("user:1", "api_key:9", "account:acme", "ip:203.0.113.9")
#: A window of this length began in 2014 and ends in 2036.
LONG = 700_000_000
Check = Callable[..., Answer]


@pytest.fixture(autouse=True)
def _begin_afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    begin_afresh(monkeypatch)
    yield
    spending.clear()


@pytest.fixture
def proxy(servers: TestServers, settings: Any) -> Iterator[Proxy]:
    """Put a proxy in front of the server of the limits."""
    with Proxy(servers.redis.port) as running:
        away(settings, running.port)
        yield running


@pytest.fixture
def lasting(settings: Any) -> None:
    """Let prefetched permits last longer than a test, so that only the test ends them."""
    settings.RATELIMITS = {**settings.RATELIMITS, "PREFETCH_SECONDS": 600}


def ahead(**more: Any) -> Rule:
    """Add a rule whose permits are prefetched, and do not come back during a test."""
    return rule("ahead", "fixed_window", **{"capacity": 1000, "period": LONG, "prefetch": 50, **more})


def admitted(client: redis.Redis) -> int:
    """Return the number of admitted requests in the open batches."""
    return sum(count for name, count in counted(client).items() if name.startswith("a "))


def records(client: RawRedis) -> dict[bytes, bytes]:
    """Return the records of all prefetches of the account."""
    found: dict[bytes, bytes] = client.hgetall(current_server().keyspace.prefetched(home("acme")))
    return found


def totals() -> dict[str, int]:
    """Return the number of requests in the process totals, by kind."""
    out: dict[str, int] = {}
    for total_key, (requests, _units) in process_totals.totals().items():
        out[total_key.kind] = out.get(total_key.kind, 0) + requests
    return out


@hypothesis_settings(max_examples=40, deadline=None)
@given(
    capacity=st.integers(1, 200),
    most=st.integers(1, 70),
    steps=st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0, 0.3, 1.1]), st.integers(1, 40)), max_size=20),
    counters=st.sampled_from([1, 2, MAX_SPENT_COUNTERS]),
)
def test_each_admitted_request_is_counted_once(
    capacity: int, most: int, steps: list[tuple[int, float, int]], counters: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for module in (prefetch, spending):
            patch.setattr(module, "MAX_SPENT_COUNTERS", counters)
        _requests_are_counted_once(capacity, most, steps)


def _requests_are_counted_once(capacity: int, most: int, steps: list[tuple[int, float, int]]) -> None:
    redis_client = current_server().wire.client
    redis_client.flushall()
    spending.clear()
    processes = [Process(call(capacity, 3600, key="user:1"), most, 10) for _ in range(3)]
    expected = 0
    for number, seconds, requests in steps:
        for process in processes:
            process.clock.now += seconds
        if seconds > 1:
            spending.send_and_give_back()
            assert admitted(redis_client) == expected
        expected += sum(processes[number].request() for _ in range(requests))
        # Each process has fewer than `most` requests that are not counted.
        assert expected - 3 * (most - 1) <= admitted(redis_client) <= expected
    spending.send_and_give_back(everything=True)
    assert admitted(redis_client) == expected <= capacity
    assert records(redis_client) == {}
    assert totals().get("unreported", 0) == 0


def test_a_fetch_counts_the_requests_before_it(check: Check, redis_client: redis.Redis, lasting: None) -> None:
    ahead()
    for number in (1, 2, 2, 4, 4, 4, 4, 8):
        assert check(WHO).allowed
        assert admitted(redis_client) == number


def test_a_thread_counts_them_every_second(
    check: Check, redis_client: redis.Redis, lasting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead()
    for _ in range(6):
        assert check(WHO).allowed
    assert admitted(redis_client) == 4
    monkeypatch.setattr(spending._background, "_work", spending.send_and_give_back)
    until(lambda: admitted(redis_client) == 6, "the thread counts two requests")
    assert spending.INTERVAL == 1
    # The permits that are left can still be spent.
    assert check(WHO).allowed
    until(lambda: admitted(redis_client) == 7, "the thread counts one more")


def test_costs_in_several_meters_are_counted(check: Check, redis_client: redis.Redis) -> None:
    ahead(meter="tokens", capacity=10_000)
    for _ in range(20):
        assert check(WHO, costs={"requests": 1, "tokens": 7, "images": 0}).allowed
    spending.send_and_give_back(everything=True)
    assert counted(redis_client) == {
        "a requests 0 acme api_key:9 1": 20,
        "a tokens 0 acme api_key:9 n": 20,
        "a tokens 0 acme api_key:9 u": 140,
        "a images 0 acme api_key:9 n": 20,
    }


def test_requests_without_an_account_are_counted(check: Check, redis_client: redis.Redis) -> None:
    ahead(key_kind="ip")
    for _ in range(20):
        assert check(Identity(address="ip:203.0.113.9")).allowed
    spending.send_and_give_back(everything=True)
    assert counted(redis_client) == {"a requests 0 - anonymous 1": 20}


def test_an_edit_does_not_change_where_earlier_requests_are_counted(
    check: Check, redis_client: redis.Redis, lasting: None
) -> None:
    row = ahead(bills=True)
    version = row.version
    for _ in range(6):
        assert check(WHO).allowed
    row.capacity = 2000
    row.save()
    rules.reload()
    for _ in range(3):
        assert check(WHO).allowed
    spending.send_and_give_back(everything=True)
    by_version = {name.split("|")[4]: count for name, count in fields(redis_client).items()}
    assert by_version == {str(version): 6, str(row.version): 3}
    assert row.version > version


def test_a_lost_reply_counts_nothing_twice(
    check: Check, redis_client: redis.Redis, proxy: Proxy, lasting: None, settings: Any
) -> None:
    ahead(on_failure="deny")
    for _ in range(6):
        assert check(WHO).allowed
    proxy.cut.set()
    spending.send_and_give_back()
    proxy.cut.clear()
    for _ in range(3):
        spending.send_and_give_back()
    assert admitted(redis_client) == 6
    spending.send_and_give_back(everything=True)
    assert admitted(redis_client) == 6
    assert totals() == {"admitted": 6}


def test_a_command_that_arrives_late_counts_nothing(redis_client: redis.Redis) -> None:
    process = Process(call())
    for _ in range(8):
        assert process.request()
    (recorded,) = process.permits._recorded
    name, keyspace = recorded.receipt.nonce, current_server().keyspace
    late = CountSpent(keyspace, home("acme"), [Spent(name, 5, is_all=False)])
    spending.send_and_give_back(everything=True)
    before = fields(redis_client)
    assert current_server().wire.call(late, new_nonce()) == [0]
    assert fields(redis_client) == before


def test_requests_that_could_not_be_reported_are_counted_later(
    check: Check, redis_client: redis.Redis, servers: TestServers, settings: Any, lasting: None
) -> None:
    ahead(on_failure="deny")
    for _ in range(6):
        assert check(WHO).allowed
    (ready,) = prepared._commands.by_key.values()
    assert ready.permits is not None
    away(settings, 1)
    ready.permits.server, server = current_server(), ready.permits.server
    spending.send_and_give_back()
    assert admitted(redis_client) == 4
    ready.permits.server = server
    spending.send_and_give_back()
    assert admitted(redis_client) == 6


def test_permits_that_redis_did_not_record_are_not_spent(redis_client: redis.Redis) -> None:
    process = Process(call())
    for _ in range(3):
        assert process.request()
    assert process.permits.spend() is None
    fetch = process.permits.next_fetch()
    decision = decide_call(current_server(), fetch.command.call, fetch.command)
    taken = process.permits.take(fetch, decision)
    assert taken is not None
    assert taken[1] is not None
    assert process.permits.spend() is None
    report = spending._begin(process.permits, taken[1])
    assert report is not None
    process.permits.fail_sending(report, sent=True)
    assert process.permits.spend() is None
    spending.send_and_give_back()
    assert process.left() == 1000 - 4
    assert sum(fields(redis_client).values()) == 4


def test_requests_whose_record_redis_has_lost_are_declared(
    check: Check, redis_client: redis.Redis, lasting: None
) -> None:
    ahead()
    for _ in range(6):
        assert check(WHO).allowed
    redis_client.delete(current_server().keyspace.prefetched(home("acme")))
    spending.send_and_give_back()
    assert admitted(redis_client) == 4
    assert totals() == {"admitted": 4, "unreported": 2}
    assert check(WHO).allowed
    spending.send_and_give_back(everything=True)
    assert totals() == {"admitted": 5, "unreported": 2}


def test_permits_end_with_their_bin_and_its_requests_are_counted_there(redis_client: redis.Redis) -> None:
    # A bin begins at NOW, and ends after 900 s.
    process = Process(call(period=LONG), seconds=3600)
    for _ in range(6):
        assert process.request()
    process.clock.now += 900
    assert process.permits.spend() is None
    spending.send_and_give_back()
    for _ in range(3):
        assert process.request()
    spending.send_and_give_back(everything=True)
    by_bin = {int(name.split("|")[1]): count for name, count in fields(redis_client).items()}
    assert by_bin == {NOW // SECOND: 6, NOW // SECOND + 900: 3}


def test_a_forked_child_counts_nothing_of_its_parent(check: Check, redis_client: redis.Redis, lasting: None) -> None:
    ahead()
    for _ in range(6):
        assert check(WHO).allowed
    child = os.fork()
    if child == 0:
        spending.send_and_give_back(everything=True)
        os._exit(0)
    os.waitpid(child, 0)
    assert admitted(redis_client) == 4
    spending.send_and_give_back(everything=True)
    assert admitted(redis_client) == 6


def test_threads_are_counted_exactly(redis_client: redis.Redis, lasting: None) -> None:
    ahead(capacity=5000)
    admissions: list[int] = []

    def ask() -> None:
        admissions.append(sum(checking.check(WHO).allowed for _ in range(300)))

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spending.send_and_give_back(everything=True)
    assert admitted(redis_client) == sum(admissions) == 1800


async def test_tasks_are_counted_exactly(redis_client: redis.Redis, lasting: None) -> None:
    await arule("ahead", "fixed_window", capacity=5000, period=LONG, prefetch=50)

    async def ask() -> int:
        return sum([(await checking.acheck(WHO)).allowed for _ in range(50)])

    assert sum(await asyncio.gather(*[ask() for _ in range(20)])) == 1000
    await asyncio.to_thread(spending.send_and_give_back, everything=True)
    assert admitted(redis_client) == 1000


async def test_a_task_that_is_cancelled_while_it_reports_is_refunded(
    redis_client: redis.Redis, proxy: Proxy, lasting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    await arule("ahead", "fixed_window", capacity=100, period=LONG, prefetch=50)
    for _ in range(3):
        assert (await checking.acheck(WHO)).allowed
    to_bytes = CountSpent.to_bytes

    def held(self: CountSpent, run: str, nonce: bytes) -> bytes:
        proxy.hold()
        return to_bytes(self, run, nonce)

    before = proxy.count(b"EVALSHA")
    with monkeypatch.context() as patch:
        patch.setattr(CountSpent, "to_bytes", held)
        task = asyncio.ensure_future(checking.acheck(WHO))
        await asyncio.to_thread(proxy.wait_for, b"EVALSHA", before + 2)
        task.cancel()
        await asyncio.sleep(0)
        proxy.let_go()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(spending.send_and_give_back, everything=True)
    assert counted(redis_client) == {"a requests 0 acme api_key:9 1": 4, "r requests 0 acme api_key:9 1": 1}
    assert len(records(redis_client)) == 0


class TestKilled:
    """A process that was killed leaves a record."""

    def kill(self, check: Check) -> None:
        """Spend permits, and forget everything as a process does that is killed."""
        for _ in range(6):
            assert check(WHO, costs={"requests": 3}).allowed
        spending.clear()

    def test_its_last_requests_are_declared_on_the_report(
        self, check: Check, redis_client: redis.Redis, lasting: None
    ) -> None:
        ahead(bills=True)
        self.kill(check)
        ((text,),) = [records(redis_client).values()]
        (one,) = uncounted(text)
        # 3 of 4 requests with prefetched permits are not counted. Two of them were made.
        assert (one.requests, one.account, one.key, one.meter, one.cost) == (3, "acme", "api_key:9", "requests", 3)
        server = current_server()
        assert declare_unreported(server, range(conf.SHARDS)) == 0
        later = one.until + (declaring.LATE_SECONDS + 1) * SECOND
        assert declare_unreported(server, range(conf.SHARDS), later) == 1
        assert declare_unreported(server, range(conf.SHARDS), later) == 0
        gap = DurabilityGap.objects.get()
        assert (gap.kind, gap.account, gap.units, gap.since) == ("unreported", "acme", 9, one.bin * SECOND)
        assert describe(gap).endswith("at-most=9")
        assert ProcessTotal.objects.get().requests == 3
        seal()
        drain()
        (line,) = Line.objects.all()
        assert (line.admitted_requests, line.admitted_units) == (4, 12)

    def test_a_drain_that_dies_after_the_declaration_declares_it_once(
        self, check: Check, redis_client: redis.Redis, lasting: None
    ) -> None:
        ahead()
        self.kill(check)
        before, far = records(redis_client), 2**53
        for _ in range(2):
            declare_unreported(current_server(), range(conf.SHARDS), far)
            redis_client.hset(current_server().keyspace.prefetched(home("acme")), mapping=before)  # type: ignore[arg-type]
        assert DurabilityGap.objects.get().units == 9

    def test_a_process_that_was_only_late_is_counted_or_declared_and_never_billed_twice(
        self, check: Check, redis_client: redis.Redis, lasting: None
    ) -> None:
        ahead()
        for _ in range(6):
            assert check(WHO).allowed
        declare_unreported(current_server(), range(conf.SHARDS), 2**53)
        spending.send_and_give_back(everything=True)
        assert admitted(redis_client) == 4
        assert totals() == {"admitted": 4, "unreported": 2}

    def test_a_text_that_is_not_a_record_stops_nothing(
        self, check: Check, redis_client: redis.Redis, lasting: None
    ) -> None:
        ahead()
        self.kill(check)
        key = current_server().keyspace.prefetched(home("acme"))
        redis_client.hset(key, mapping={"x": "nonsense", "y": b"\xff 1 2", "z": "0 1 2 a|b 1"})
        redis_client.set(current_server().keyspace.prefetched(home("acme") + 1), "no hash")
        assert declare_unreported(current_server(), range(conf.SHARDS), 2**53) == 1


def test_permits_are_those_of_one_kind_of_request(check: Check) -> None:
    ahead()
    assert check(WHO).allowed
    assert check(WHO, costs={"requests": 2}).allowed
    permits = [ready.permits for ready in prepared._commands.by_key.values()]
    assert [isinstance(one, PrefetchedPermits) for one in permits] == [True, True]
