"""Test that what a process keeps of refused requests is bounded, and that what it could not count is declared."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from ratelimits.billing.reports.gaps import describe
from ratelimits.embedded import free_port
from ratelimits.engine.server import current_server
from ratelimits.identity import Identity
from ratelimits.models import Access
from ratelimits.quota import checking, from_memory
from ratelimits.quota.deny_cache import DenyCache, Sender
from ratelimits.usage.counting import access, process_totals
from ratelimits.usage.ledger.process_totals import write as write_totals
from ratelimits.usage.models import DurabilityGap
from tests.support.engine.proxy import Proxy
from tests.support.entry_points import Clock, away, begin_afresh, counted, short_timeout
from tests.support.raw import RawRedis
from tests.support.rows import rule
from tests.support.servers import TestServers

pytestmark = pytest.mark.django_db(transaction=True)

WHO = Identity("user:1", "api_key:9", "account:acme", "ip:203.0.113.9")


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    access.clear()
    from_memory.denials.clear()
    return begin_afresh(monkeypatch)


@pytest.fixture
def nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let no thread take the counts, not even one that an earlier test of this process has started."""
    monkeypatch.setattr(from_memory.sender, "start", lambda: None)
    with from_memory.sender._background._working:
        yield


def test_many_meters_of_a_stored_refusal_count_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ratelimits.quota.deny_cache.MAX_REFUSALS", 50)
    rule("burst", capacity=1, rate="0.001")
    checking.check(WHO)
    costs = {"requests": 1, **{f"m{number}": 1 for number in range(9)}}
    for number in range(2, 60):
        assert not checking.check(WHO, costs={**costs, "m0": number}).allowed
        assert 10 * len(from_memory.denials.refusals) <= 50


@pytest.mark.usefixtures("nothing_is_sent")
def test_costs_that_blocked_clients_choose_are_bounded_and_what_has_no_room_is_declared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(access, "MAX_SUBJECTS", 20)
    monkeypatch.setattr(access, "_MAX_DECIDED", 10)
    Access.objects.create(target="account:acme", reason="abuse")
    for number in range(100):
        assert not checking.check(WHO, costs={"tokens": number + 2}).allowed
        assert len(access._unsent) <= 20
        assert len(access._untotalled) <= 30
    kept = sum(one.requests for one in access.take())
    totals = {total.kind: requests for total, (requests, _units) in process_totals.totals().items()}
    assert kept + totals["uncounted"] == 100
    assert totals["blocked"] == 100


def test_what_waits_for_the_end_of_an_outage_is_bounded(
    monkeypatch: pytest.MonkeyPatch, settings: Any, redis_client: RawRedis
) -> None:
    monkeypatch.setattr("ratelimits.quota.deny_cache.MAX_COUNTERS", 50)
    rule("burst", capacity=0)
    caches = settings.CACHES
    checking.check(WHO)
    from_memory.sender.flush()
    away(settings, free_port())
    for number in range(100):
        for _ in range(2):
            assert not checking.check(WHO, costs={"requests": 1, "tokens": number + 2}).allowed
        from_memory.sender.flush()
        assert len(from_memory.denials._waiting) <= 50
    settings.CACHES = caches
    from_memory.sender.flush()
    by_meter = {total.meter: n for total, (n, _units) in process_totals.totals().items() if total.kind == "uncounted"}
    assert by_meter == {"requests": 150, "tokens": 150}
    requests = [n for name, n in counted(redis_client).items() if name.startswith("d requests") and name[-1] == "1"]
    assert sum(requests) == 1 + 50


@pytest.mark.usefixtures("nothing_is_sent")
def test_decided_refusals_are_added_up_before_they_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ratelimits.quota.deny_cache._MAX_DECIDED", 10)
    rule("burst", capacity=0)
    for _ in range(95):
        assert not checking.check(WHO).allowed
        assert len(from_memory.denials._decided) < 10
    assert len(from_memory.denials._waiting) == 1
    assert sum(one.requests for one in from_memory.denials.take()) == 95


def test_a_thread_that_could_not_start_is_started_by_the_next_blocked_request(monkeypatch: pytest.MonkeyPatch) -> None:
    Access.objects.create(target="account:acme", reason="abuse")
    cache = DenyCache()
    sender = Sender(cache, current_server)
    monkeypatch.setattr(from_memory, "denials", cache)
    monkeypatch.setattr(from_memory, "sender", sender)
    start = threading.Thread.start

    def too_many(thread: threading.Thread) -> None:
        if thread.name == "ratelimits-denied":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", too_many)
        assert not checking.check(WHO).allowed
        assert not sender._background.running
    assert not checking.check(WHO).allowed
    assert sender._background.running


def test_counts_whose_reply_was_lost_are_declared_as_a_gap(servers: TestServers, settings: Any) -> None:
    rule("burst", capacity=0)
    checking.check(WHO)
    from_memory.sender.flush()
    with Proxy(servers.redis.port) as proxy, short_timeout(settings):
        away(settings, proxy.port)
        checking.check(WHO)
        from_memory.sender.flush()
        for cost in (2, 3):
            checking.check(WHO, costs={"requests": cost})
        proxy.lose.set()
        from_memory.sender.flush()
    assert from_memory.denials.take() == []
    write_totals("p", process_totals.totals())
    (gap,) = DurabilityGap.objects.all()
    assert (gap.kind, gap.account, gap.units, gap.detail) == ("uncounted", "acme", 5, "2 requests")
    assert describe(gap).startswith("uncounted ")
    assert describe(gap).endswith(" at-most=5")


def test_a_slow_server_is_told_the_rest_at_the_next_sending(
    monkeypatch: pytest.MonkeyPatch, redis_client: RawRedis
) -> None:
    monkeypatch.setattr("ratelimits.engine.counting.MAX_COUNTERS", 1)
    monkeypatch.setattr("ratelimits.quota.deny_cache.LONGEST_SENDING", -1.0)
    rule("burst", capacity=0)
    for cost in (2, 3):
        checking.check(WHO, costs={"requests": cost})
    from_memory.sender.flush()
    assert counted(redis_client) == {}
    assert len(from_memory.denials._waiting) == 2
    monkeypatch.setattr("ratelimits.quota.deny_cache.LONGEST_SENDING", 5.0)
    from_memory.sender.flush()
    assert sorted(counted(redis_client).values()) == [2, 5]
