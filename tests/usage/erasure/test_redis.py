"""Test that no key and no value of Redis names an erased customer, whatever its limits were."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from django.db.models import Sum

from ratelimits.algorithms.limits import ALGORITHMS, Concurrency
from ratelimits.engine import Limit
from ratelimits.engine.decide import call_for, decide_call
from ratelimits.engine.server import current_server
from ratelimits.identity import Identity
from ratelimits.models import Rule
from ratelimits.quota import spending
from ratelimits.quota.checking import check
from ratelimits.usage.customers.move import move
from ratelimits.usage.erasure.everywhere import erase_everywhere
from ratelimits.usage.models import Line
from tests.support.entry_points import begin_afresh
from tests.support.rows import rule
from tests.support.selection import few
from tests.support.usage.traffic import flow
from tests.usage.erasure.books import customer

pytestmark = pytest.mark.django_db(transaction=True)

TEXT = "leaver"
LEAVER = Identity("user:leaver-u", None, f"account:{TEXT}")
OTHER = Identity("user:other-u", None, "account:other")


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "ACCOUNT": lambda request: TEXT, "DENY_CACHE_SECONDS": 0}
    begin_afresh(monkeypatch)


def naming(client: Any, name: str = TEXT) -> list[bytes]:
    """Return the Redis keys that have a name in them or in their values."""
    readers: dict[bytes, Any] = {
        b"string": client.get,
        b"hash": client.hgetall,
        b"list": lambda key: client.lrange(key, 0, -1),
        b"set": client.smembers,
        b"zset": lambda key: client.zrange(key, 0, -1, withscores=True),
    }
    return sorted(key for key in client.scan_iter() if name in f"{key} {readers[client.type(key)](key)}")


def limits_of(algorithm: str) -> None:
    """Count accounts and users by an algorithm; a calendar window also where it is restored from the ledger."""
    for kind in ("account", "user"):
        rule(f"limit-{kind}", algorithm, key_kind=kind)
    if algorithm == "calendar_window":
        rule("billed", algorithm, key_kind="account", bills=True)


@pytest.mark.parametrize("one_account", [False, True])
@pytest.mark.parametrize("algorithm", few(ALGORITHMS, "token_bucket", "calendar_window", "concurrency"))
def test_no_key_of_redis_names_an_erased_customer(
    algorithm: str, one_account: bool, settings: Any, redis_client: redis.Redis
) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "ONE_ACCOUNT_PER_KEY": one_account}
    limits_of(algorithm)
    for who in (LEAVER, OTHER):
        assert check(who).allowed
    flow()
    assert naming(redis_client)
    others = naming(redis_client, "other")
    done = erase_everywhere(customer(TEXT))
    assert naming(redis_client) == []
    assert naming(redis_client, "other") == others
    assert (done.keys > 1, done.error) == (True, "")
    assert check(LEAVER).allowed


def test_a_limit_that_has_no_state_gets_none(redis_client: redis.Redis) -> None:
    limits_of("calendar_window")
    assert check(LEAVER).allowed
    flow()
    redis_client.unlink(*(key for key in naming(redis_client) if b":s:" in key))
    erase_everywhere(customer(TEXT))
    assert naming(redis_client) == []


@pytest.mark.parametrize("algorithm", ["calendar_window", "sliding_log", "concurrency"])
def test_each_customer_of_a_text_loses_its_own_limits_alone(algorithm: str, redis_client: redis.Redis) -> None:
    limits_of(algorithm)
    check(LEAVER)
    flow()
    former = customer(TEXT)
    later = move(TEXT).customer
    check(LEAVER)
    flow()
    numbered = [key for key in naming(redis_client) if b"account@%d:" % later.pk in key]
    assert numbered
    erase_everywhere(later)
    left = naming(redis_client)
    assert not any(key in left for key in numbered)
    assert any(b":account:leaver" in key for key in left)
    erase_everywhere(former)
    assert [key for key in naming(redis_client) if b":account:" in key] == []


def test_the_limits_of_a_former_customer_without_the_text_go_with_the_last(redis_client: redis.Redis) -> None:
    limits_of("calendar_window")
    check(LEAVER)
    flow()
    first = customer(TEXT)
    move(TEXT)
    check(LEAVER)
    flow()
    move(TEXT, first, 0)
    erase_everywhere(first)
    assert [key for key in naming(redis_client) if b"account" in key] == []


def test_leases_waiting_callers_and_rules_that_are_gone_leave_nothing(redis_client: redis.Redis) -> None:
    rule("places", "concurrency", capacity=1, key_kind="account")
    rule("log", "sliding_log", key_kind="account")
    assert check(LEAVER).allowed
    flow()
    places = call_for([Limit(f"account:{TEXT}", Concurrency(capacity=1), name="places")])
    assert not decide_call(current_server(), places._replace(announces=True, timeout=1, at_once=False)).allowed
    assert any(key.endswith(b":a") for key in naming(redis_client))
    Rule.objects.all().delete()
    erase_everywhere(customer(TEXT))
    assert naming(redis_client) == []


def test_permits_that_were_taken_in_advance_are_given_back(redis_client: redis.Redis) -> None:
    rule("limit", "fixed_window", period=86_400, key_kind="account", prefetch=8)
    assert all(check(LEAVER).allowed for _number in range(5))
    flow()
    assert any(key.endswith(b":prefetched") for key in naming(redis_client))
    erased = customer(TEXT)
    erase_everywhere(erased)
    spending.send_and_give_back(everything=True)
    assert naming(redis_client) == []
    assert Line.objects.aggregate(Sum("admitted_requests"))["admitted_requests__sum"] == 5
    assert {line.account for line in Line.objects.all()} == {erased.names.get().identifier}
