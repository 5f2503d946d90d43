"""Test limits that outlive Redis, of users and API keys that have several accounts."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection

from ratelimits import rules
from ratelimits.identity import Identity
from ratelimits.quota import checking
from ratelimits.usage.counting.from_ledger import LedgerQuery, lines_of
from ratelimits.usage.ledger.drain import drain
from ratelimits.usage.ledger.seal import seal
from ratelimits.usage.models import Line, ShardState
from tests.support.entry_points import begin_afresh
from tests.support.raw import RawRedis
from tests.support.rows import rule
from tests.support.selection import few
from tests.support.usage.traffic import at, use

pytestmark = pytest.mark.django_db(transaction=True)

Check = Callable[..., Any]
#: The identities of one user with one API key, whose account is another one in each request.
IN_ACCOUNTS = [Identity("user:1", "api_key:7", f"account:{name}") for name in "abcdefg"]


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch, settings: Any, fsync_at_once: None) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "ACCOUNT": lambda request: "acme", "DENY_CACHE_SECONDS": 0}
    begin_afresh(monkeypatch)


def has(settings: Any, **values: Any) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, **values}


def lose(client: RawRedis) -> None:
    """Let the server lose its data, and this process what it knows. The usage is in the ledger, but not tallied yet."""
    seal()
    drain(at("2100-01-01"))
    assert ShardState.objects.filter(tallied=0, position__gt=0).exists()
    client.flushall()
    rules.forget()


@pytest.mark.parametrize("kind", ["user", "api_key"])
@pytest.mark.parametrize("shards", [4, 64])
def test_each_further_account_of_a_key_finds_its_one_count(kind: str, shards: int, settings: Any) -> None:
    has(settings, SHARDS=shards)
    rule("monthly", "calendar_window", capacity=1, key_kind=kind)
    accounts = [Identity("user:1", "api_key:7", f"account:{name}") for name in "aabcdefg"]
    answers = [checking.check(who) for who in accounts]
    assert [answer.allowed for answer in answers] == [True] + [False] * 7
    assert all(answer.decision is not None for answer in answers)


@pytest.mark.parametrize("start", few(["after a loss", "of a new rule"], "after a loss"))
@pytest.mark.parametrize(
    ("kind", "api_key"), [("user", None), ("caller", None), ("api_key", "api_key:7"), ("caller", "api_key:7")]
)
def test_a_key_goes_on_with_its_usage_of_all_its_accounts(
    check: Check, redis_client: RawRedis, kind: str, api_key: str | None, start: str
) -> None:
    user = None if api_key and kind == "caller" else "user:1"
    of_key = [who._replace(user=user, api_key=api_key) for who in IN_ACCOUNTS]
    new = start == "of a new rule"
    monthly = {"capacity": 5, "key_kind": kind, "start_from_ledger": new}
    if not new:
        rule("monthly", "calendar_window", **monthly)
    assert [check(who).allowed for who in of_key[:3]] == [True] * 3
    assert check(Identity("user:2", "api_key:8", "account:a")).allowed
    lose(redis_client)
    if new:
        rule("monthly", "calendar_window", **monthly)
    assert [check(who).allowed for who in of_key[2:6]] == [True, True, False, False]
    lose(redis_client)
    assert not check(of_key[6]).allowed


def test_an_account_goes_on_with_the_usage_of_all_its_keys_and_no_other(check: Check, redis_client: RawRedis) -> None:
    rule("monthly", "calendar_window", capacity=5, key_kind="account")
    for number in range(3):
        assert check(Identity(f"user:{number}", f"api_key:{number}", "account:a")).allowed
        assert check(Identity(f"user:{number}", f"api_key:{number}", "account:b")).allowed
    lose(redis_client)
    assert [check(IN_ACCOUNTS[0]).allowed for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize("first", ["itself", "another"])
def test_a_user_who_is_one_of_the_accounts_has_the_usage_of_both(
    check: Check, redis_client: RawRedis, first: str
) -> None:
    rule("monthly", "calendar_window", capacity=5, key_kind="user")
    itself, another = Identity("user:1", None, "account:user:1"), Identity("user:1", None, "account:a")
    for who in (itself, itself, another, another, Identity("user:2", None, "account:a")):
        assert check(who).allowed
    lose(redis_client)
    assert [check(itself if first == "itself" else another).allowed for _ in range(2)] == [True, False]


def test_api_keys_of_a_user_who_is_the_account_count_for_the_user(check: Check, redis_client: RawRedis) -> None:
    rule("monthly", "calendar_window", capacity=5, key_kind="user")
    itself = Identity("user:1", "api_key:7", "account:user:1")
    for who in (itself, itself._replace(api_key=None), itself._replace(account="account:a", api_key=None)):
        assert check(who).allowed
    lose(redis_client)
    assert [check(itself).allowed for _ in range(3)] == [True, True, False]


def test_an_api_key_whose_users_are_the_accounts_has_one_count(
    check: Check, redis_client: RawRedis, settings: Any
) -> None:
    has(settings, ACCOUNT=None)
    rule("monthly", "calendar_window", capacity=3, key_kind="api_key")
    for number in (1, 2):
        assert check(Identity(f"user:{number}", "api_key:7", f"account:{number}")).allowed
    lose(redis_client)
    assert [check(Identity("user:3", "api_key:7", "account:3")).allowed for _ in range(2)] == [True, False]


def test_a_request_whose_account_cannot_be_read_goes_on_with_the_count_of_its_user(
    check: Check, redis_client: RawRedis
) -> None:
    rule("monthly", "calendar_window", capacity=3, key_kind="user")
    assert [check(who).allowed for who in IN_ACCOUNTS[:2]] == [True] * 2
    of_user = [who._replace(api_key=None) for who in IN_ACCOUNTS]
    assert check(of_user[0]).allowed
    lose(redis_client)
    unreadable = Identity("user:1", unreadable=("account",))
    # The requests with an API key are in the ledger under this key, so one permit of three is known to be used.
    assert [check(unreadable).allowed for _ in range(3)] == [True, True, False]
    assert not check(of_user[5]).allowed


def test_one_account_per_key_keeps_one_count_in_each_account(
    check: Check, redis_client: RawRedis, settings: Any
) -> None:
    has(settings, ONE_ACCOUNT_PER_KEY=True)
    rule("monthly", "calendar_window", capacity=3, key_kind="user")
    a, b = (who._replace(api_key=None) for who in IN_ACCOUNTS[:2])
    assert [check(who).allowed for who in (a, a, b)] == [True] * 3
    lose(redis_client)
    assert [check(a).allowed for _ in range(2)] == [True, False]
    assert [check(b).allowed for _ in range(3)] == [True, True, False]


def test_the_ledger_finds_usage_by_an_index() -> None:
    for account in "12":
        for key in "12":
            use(account, f"user:{key}", cost=10)
            use(account, f"user:{key}", cost=100, meter="tokens")
            use(account, f"user:{key}", cost=1_000, now=at("2026-10-15T00:00"))
    seal()
    drain(at("2100-01-01"))
    rows = list(Line.objects.values())
    # So many lines that the database's planner chooses as it does for a real ledger.
    more = [
        Line(**row | {"id": row["id"] + 1_000 * copy, "account": f"{copy}", "key": f"user:{copy}"})
        for copy in range(3, 500)
        for row in rows
    ]
    Line.objects.bulk_create(more)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")
    span = LedgerQuery("requests", at("2026-11-01T00:00"), at("2026-12-01T00:00"))
    of_account = span._replace(account="1")
    for query, units, indexes in (
        (span._replace(key="user:1"), 20, {"key"}),
        (span._replace(account="1", key="user:1"), 10, {"key"}),
        (of_account, 20, {"account"}),
        (of_account._replace(key="user:1", is_either=True), 30, {"key", "account"}),
    ):
        lines = lines_of(query)
        assert sum(lines.values_list("admitted_units", flat=True)) == units
        plan = lines.explain()
        assert set(re.findall(r"ratelimits_line_(\w+)", plan)) >= indexes, plan
        assert not re.search(r"SCAN ratelimits_usage_line|Seq Scan", plan), plan
