"""Test decisions while the memory of Redis is short or full: new addresses share a count, known ones keep theirs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ratelimits import rules
from ratelimits.answers.answer import Answer
from ratelimits.engine import memory
from ratelimits.engine.memory import Shortage
from ratelimits.engine.memory_watch import look
from ratelimits.engine.server import breaker
from ratelimits.engine.transport.breaker import FAILURES, PAUSE
from ratelimits.identity import Identity
from ratelimits.models import KeyOverride
from ratelimits.models.keys import key_name
from ratelimits.quota import checking, from_memory
from tests.support.engine.memory import FULL, NEAR, SHORT, looking_by_hand, notice, shortage, use_share
from tests.support.engine.proxy import Proxy
from tests.support.entry_points import Clock, away, begin_afresh, short_timeout
from tests.support.raw import RawRedis
from tests.support.rows import rule
from tests.support.servers import TestServers

pytestmark = pytest.mark.django_db(transaction=True)

Check = Callable[..., Answer]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch, redis_client: RawRedis, settings: object) -> Iterator[Clock]:
    """Let only the test ask how much memory is used, and move the clock of the breaker."""
    made = begin_afresh(monkeypatch)
    with looking_by_hand(monkeypatch, redis_client):
        yield made


@pytest.fixture
def hourly() -> None:
    """Limit each address to two requests an hour. Without a decision, a request would pass."""
    rule("hourly", "fixed_window", capacity=2, period=3600, key_kind="ip", on_failure="allow")


def at(address: str) -> Identity:
    return Identity(address=f"ip:{address}")


def short(client: RawRedis, share: float, level: Shortage) -> None:
    """Let the server use this share of its memory, and let this process notice it."""
    use_share(client, share)
    look()
    assert memory.level is level
    if level < Shortage.FULL:
        client.config_set("maxmemory", 0)  # what the test itself needs must not change the level


def answers(check: Check, *addresses: str) -> list[bool]:
    """Return whether a request of each address is admitted. Redis must decide each of them."""
    found = [check(at(address)) for address in addresses]
    assert all(answer.decision is not None for answer in found)
    return [answer.allowed for answer in found]


def states(client: RawRedis) -> list[str]:
    return sorted(key.decode().partition("}:s:")[2] for key in client.keys("*}:s:*"))


@pytest.fixture
def proxy(servers: TestServers, settings: Any) -> Iterator[Proxy]:
    """Put a proxy in front of the server of the limits."""
    with Proxy(servers.redis.port) as running:
        away(settings, running.port)
        yield running


async def test_requests_of_a_new_address_at_the_same_time_share_the_count_too(
    hourly: None, redis_client: RawRedis, proxy: Proxy
) -> None:
    """The second one must not use the address's own command while the first one asks whether it may."""
    assert (await checking.acheck(at("198.51.100.1"))).allowed
    notice(NEAR)
    proxy.hold()
    both = []
    for _ in range(2):
        both.append(asyncio.ensure_future(checking.acheck(at("203.0.113.1"))))
        await asyncio.to_thread(proxy.wait_for, b"EXISTS", len(both))
    proxy.let_go()
    assert [(await one).allowed for one in both] == [True, True]
    assert states(redis_client) == ["ip:198.51.100.1", "ip:203.0.113.0/24"]


async def test_what_was_found_before_the_level_changed_is_not_used_again(
    hourly: None, redis_client: RawRedis, proxy: Proxy
) -> None:
    assert (await checking.acheck(at("198.51.100.1"))).allowed
    notice(NEAR)
    proxy.hold()
    one = asyncio.ensure_future(checking.acheck(at("203.0.113.1")))
    await asyncio.to_thread(proxy.wait_for, b"EXISTS")
    notice(0.5)
    proxy.let_go()
    assert (await one).allowed
    assert (await checking.acheck(at("203.0.113.1"))).allowed
    assert states(redis_client) == ["ip:198.51.100.1", "ip:203.0.113.0/24", "ip:203.0.113.1"]


def test_threads_forget_what_they_found_before_the_level_changed_too(
    hourly: None, redis_client: RawRedis, proxy: Proxy
) -> None:
    assert answers(checking.check, "198.51.100.1") == [True]
    notice(NEAR)
    proxy.hold()
    with ThreadPoolExecutor() as threads:
        one = threads.submit(checking.check, at("203.0.113.1"))
        try:
            proxy.wait_for(b"EXISTS")
            notice(0.5)
        finally:
            proxy.let_go()
        assert one.result().allowed
    assert answers(checking.check, "203.0.113.1") == [True]
    assert states(redis_client) == ["ip:198.51.100.1", "ip:203.0.113.0/24", "ip:203.0.113.1"]


def test_near_the_budget_new_addresses_share_the_count_of_their_network(
    check: Check, hourly: None, redis_client: RawRedis
) -> None:
    assert answers(check, "203.0.113.1", "2001:db8:1:1::/64") == [True, True]
    short(redis_client, NEAR, Shortage.NEAR)
    assert answers(check, "203.0.113.2", "203.0.113.3", "203.0.113.4") == [True, True, False]
    assert answers(check, "203.0.113.2", "203.0.113.99") == [False, False]
    assert answers(check, "198.51.100.1", "2001:db8:1:2::/64", "2001:db8:1:3::/64") == [True, True, True]
    assert answers(check, "2001:db8:1:4::/64") == [False]
    # What has a count keeps it.
    assert answers(check, "203.0.113.1", "203.0.113.1") == [True, False]
    assert answers(check, "2001:db8:1:1::/64", "2001:db8:1:1::/64") == [True, False]
    assert states(redis_client) == [
        "ip:198.51.100.0/24",
        "ip:2001:db8:1:1::/64",
        "ip:2001:db8:1::/48",
        "ip:203.0.113.0/24",
        "ip:203.0.113.1",
    ]


def test_when_memory_is_short_all_new_addresses_share_one_count(
    check: Check, hourly: None, redis_client: RawRedis
) -> None:
    assert answers(check, "203.0.113.1") == [True]
    short(redis_client, NEAR, Shortage.NEAR)
    assert answers(check, "198.51.100.1") == [True]
    short(redis_client, SHORT, Shortage.SHORT)
    assert answers(check, "192.0.2.1", "192.0.2.2", "192.0.3.1", "2001:db8::/64") == [True, True, False, False]
    assert answers(check, "198.51.100.2", "198.51.100.3") == [True, False], "this network has a count"
    assert answers(check, "203.0.113.1", "203.0.113.1") == [True, False], "this address has a count"
    assert states(redis_client) == ["ip:198.51.100.0/24", "ip:203.0.113.1", "ip:shared"]


def test_a_full_server_decides_although_this_process_did_not_know_that_it_is_full(
    check: Check, hourly: None, redis_client: RawRedis, caplog: pytest.LogCaptureFixture
) -> None:
    rule("users", "fixed_window", capacity=1, period=3600, key_kind="user", on_failure="allow")
    known, new = Identity("user:1"), Identity("user:2")
    assert answers(check, "203.0.113.1") == [True]
    assert check(known).decision is not None
    use_share(redis_client, FULL)
    with caplog.at_level(logging.ERROR, "ratelimits"):
        assert answers(check, "203.0.113.1", "203.0.113.1") == [True, False]
        assert answers(check, "192.0.2.1", "198.51.100.1", "192.0.3.1") == [True, True, False]
    assert memory.level is Shortage.FULL
    assert [record.message[:28] for record in caplog.records] == ["The memory of Redis is full."]
    assert [check(one).allowed for one in (known, new, new)] == [False, True, False]
    assert states(redis_client) == ["ip:203.0.113.1", "ip:shared", "user:1", "user:2"]


def test_views_keys_of_anonymous_callers_share_a_count_when_memory_is_full(
    check: Check, redis_client: RawRedis
) -> None:
    rule("tenant", "fixed_window", view_key="header:X-Tenant", capacity=1, period=3600, key_kind="view_key")
    names = [key_name(f"header:X-Tenant={tenant}") for tenant in ("known", "new", "newer")]

    def admitted(user: str | None = None) -> list[bool]:
        return [check(Identity(user, view_keys=(name,))).allowed for name in names]

    assert check(Identity(view_keys=(names[0],))).allowed
    notice(1.0)
    assert admitted() == [False, True, False]
    assert admitted("user:1") == [False, True, True], "this caller is no stranger"


def test_when_there_is_memory_again_each_address_has_its_own_count(
    check: Check, hourly: None, redis_client: RawRedis
) -> None:
    short(redis_client, SHORT, Shortage.SHORT)
    assert answers(check, "192.0.2.1", "192.0.2.2", "192.0.2.3") == [True, True, False]
    short(redis_client, 0.5, Shortage.NONE)
    from_memory.denials.clear()
    assert answers(check, "192.0.2.3", "192.0.2.3", "192.0.2.3") == [True, True, False]


def test_however_often_the_level_changes_an_address_has_three_counts(
    check: Check, hourly: None, redis_client: RawRedis
) -> None:
    """They are those of all, of its network, and its own. The page on scaling says so."""
    admitted = []
    for share in (SHORT, NEAR, 0.5, SHORT, NEAR, 0.5, NEAR, SHORT):
        notice(share)
        from_memory.denials.clear()
        admitted.append(sum(answers(check, *["203.0.113.1"] * 3)))
    assert admitted == [2, 2, 2, 0, 0, 0, 0, 0]


def test_a_level_does_not_change_to_and_fro(redis_client: RawRedis) -> None:
    for share, level in [(0.81, 1), (0.79, 1), (0.77, 0), (0.79, 0), (0.91, 2), (0.89, 2), (0.87, 1), (1.2, 4)]:
        notice(share)
        assert memory.level == level, share
    notice(1.0)
    assert memory.level is Shortage.FULL


def test_while_redis_does_not_answer_nobody_asks_whether_a_new_address_has_a_count(
    check: Check, hourly: None, proxy: Proxy, settings: Any
) -> None:
    assert answers(check, "198.51.100.1") == [True]
    notice(NEAR)
    with short_timeout(settings):
        proxy.lose.set()
        for number in range(FAILURES):
            assert check(at(f"203.0.113.{number}")).decision is None
        sent = proxy.count(b"EXISTS") + proxy.connections
        for number in range(20):
            assert check(at(f"192.0.2.{number}")).decision is None
        assert proxy.count(b"EXISTS") + proxy.connections == sent
    proxy.lose.clear()


def test_the_request_that_tries_again_is_decided_also_if_its_address_is_new(
    check: Check, hourly: None, redis_client: RawRedis, clock: Clock
) -> None:
    """Without a thread that asks for it, the breaker lets one request in a second try."""
    assert answers(check, "198.51.100.1") == [True]
    notice(NEAR)
    for _ in range(FAILURES):
        breaker.failed()
    assert check(at("203.0.113.1")).decision is None
    clock.now += PAUSE
    assert answers(check, "203.0.113.1", "192.0.2.1") == [True, True]


def test_an_address_with_an_override_keeps_it(check: Check, hourly: None, redis_client: RawRedis) -> None:
    KeyOverride.objects.create(key="ip:192.0.2.1", rule="hourly", capacity=3)
    rules.forget()
    short(redis_client, SHORT, Shortage.SHORT)
    assert answers(check, "192.0.2.2", "192.0.2.3", "192.0.2.4") == [True, True, False]
    assert answers(check, *["192.0.2.1"] * 4) == [True, True, True, False]


def test_beyond_the_reserve_the_failure_policy_decides(check: Check, hourly: None, redis_client: RawRedis) -> None:
    assert answers(check, "203.0.113.1") == [True]
    redis_client.config_set("maxmemory", 1)
    notice(2.0)
    assert memory.level is Shortage.BEYOND
    answer = check(at("203.0.113.1"))
    assert (answer.allowed, answer.decision) == (True, None)


def test_a_server_that_names_no_maximum_gets_nothing_beyond_it(redis_client: RawRedis) -> None:
    look()
    assert shortage() is Shortage.NONE
    assert not memory.note_refusal()
    assert shortage() is Shortage.BEYOND


def test_a_flood_of_addresses_leaves_no_request_undecided(hourly: None, redis_client: RawRedis) -> None:
    """Send more new addresses than there is memory for. A process learns only by the refusals that memory is full."""
    check = checking.check
    assert answers(check, "203.0.113.1") == [True]
    redis_client.config_set("maxmemory", redis_client.info("memory")["used_memory"] + 100_000)
    # Far more than fit: what earlier tests left on the server, such as buffers, is perhaps freed meanwhile.
    addresses = [f"10.0.{number // 250}.{number % 250}" for number in range(4000)]
    admitted = sum(answers(check, *addresses))
    assert 100 < admitted < 3900
    assert memory.level is Shortage.FULL
    assert answers(check, "203.0.113.1", "203.0.113.1") == [True, False]
