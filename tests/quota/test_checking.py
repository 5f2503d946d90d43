"""Test the function that every entry point calls: identity in, answer out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from django.db import connection

from ratelimits import rules
from ratelimits.answers.answer import Answer
from ratelimits.conf import conf
from ratelimits.embedded import free_port
from ratelimits.engine.keys import Keyspace, shard_of
from ratelimits.engine.server import breaker
from ratelimits.engine.transport.breaker import FAILURES, PAUSE
from ratelimits.identity import Identity
from ratelimits.models import ConfigVersion, KeyOverride, Rule
from ratelimits.quota import checking, from_memory, prepared
from ratelimits.usage.counting import process_totals
from tests.end_to_end.test_round_trips import commands_of_clients
from tests.support.engine.proxy import Proxy
from tests.support.entry_points import Clock, away, begin_afresh, counted, queries, short_timeout
from tests.support.raw import RawRedis
from tests.support.rows import rule
from tests.support.servers import TestServers

pytestmark = pytest.mark.django_db(transaction=True)

WHO = Identity("user:1", "api_key:9", "account:acme", "ip:203.0.113.9")
KEYS = Keyspace("test", conf.SHARDS)
Check = Callable[..., Answer]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return begin_afresh(monkeypatch)


@pytest.fixture
def proxy(servers: TestServers, settings: Any) -> Iterator[Proxy]:
    """Put a proxy in front of the server of the limits."""
    with Proxy(servers.redis.port) as running:
        away(settings, running.port)
        yield running


def no_repeats(settings: Any, **more: Any) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "DENY_CACHE_SECONDS": 0, **more}


def slow(name: str = "slow", capacity: int = 2, **more: Any) -> Rule:
    """Add a rule whose permits do not come back during a test."""
    return rule(name, capacity=capacity, rate="0.000001", **more)


class TestDecisions:
    def test_without_a_rule_a_request_passes_and_is_counted(self, check: Check, redis_client: RawRedis) -> None:
        answer = check(WHO)
        assert (answer.allowed, answer.binding, answer.wait, answer.retry_after) == (True, None, 0.0, 0.0)
        assert answer.headers() == {}
        assert counted(redis_client) == {"a requests 0 acme api_key:9 1": 1}

    def test_a_rule_admits_and_refuses(self, check: Check, settings: Any, redis_client: RawRedis) -> None:
        no_repeats(settings)
        row = slow(bills=True)
        answers = [check(WHO) for _ in range(4)]
        assert [answer.allowed for answer in answers] == [True, True, False, False]
        assert answers[2].decision is not None
        assert answers[2].retry_after == answers[2].decision.retry_after
        assert answers[2].binding is not None
        assert answers[2].binding.name == "slow"
        assert not answers[2].unavailable
        assert counted(redis_client) == {
            f"a requests {row.pk} acme api_key:9 1": 2,
            f"d requests {row.pk} acme api_key:9 1": 2,
        }

    def test_rules_of_several_kinds_apply_together(self, check: Check) -> None:
        for number, kind in enumerate(("user", "api_key", "account", "ip", "global")):
            slow(kind, key_kind=kind, capacity=10 + number)
        answer = check(WHO)
        assert answer.prepared is not None
        assert {one.name for one in answer.prepared.rules} == {"user", "api_key", "account", "ip", "global"}
        assert answer.decision is not None
        assert (answer.decision.limit, answer.decision.remaining) == (10, 9)
        other = Identity("user:2", "api_key:8", "account:acme", "ip:203.0.113.8")
        assert check(other).decision.standings[0].remaining == 10  # type: ignore[union-attr]

    def test_a_scope_and_its_methods(self, check: Check) -> None:
        slow("everywhere", scope="*")
        slow("search", scope="search")
        slow("writes", scope="search:POST,PUT")

        def applied(scope: str, method: str) -> set[str]:
            applied = check(Identity(user=f"user:{scope}{method}"), scope, method).prepared
            assert applied is not None
            return {one.name for one in applied.rules}

        assert applied("other", "GET") == {"everywhere"}
        assert applied("search", "GET") == {"everywhere", "search"}
        assert applied("search", "POST") == {"everywhere", "search", "writes"}
        assert applied("search", "\r\nNONSENSE") == {"everywhere", "search"}

    def test_each_meter_has_rules_and_a_cost_of_its_own(
        self, check: Check, settings: Any, redis_client: RawRedis
    ) -> None:
        no_repeats(settings)
        calls, tokens = slow("calls", capacity=10, bills=True), slow("words", meter="tokens", capacity=1000, bills=True)
        slow("other", meter="bytes", capacity=1)
        costs = {"requests": 1, "tokens": 400}
        answers = [check(WHO, costs=costs) for _ in range(3)]
        assert [answer.allowed for answer in answers] == [True, True, False]
        assert answers[0].decision is not None
        assert [standing.remaining for standing in answers[0].decision.standings] == [9, 600]
        assert counted(redis_client) == {
            f"a requests {calls.pk} acme api_key:9 1": 2,
            f"a tokens {tokens.pk} acme api_key:9 n": 2,
            f"a tokens {tokens.pk} acme api_key:9 u": 800,
            f"d requests {tokens.pk} acme api_key:9 1": 1,
            f"d tokens {tokens.pk} acme api_key:9 n": 1,
            f"d tokens {tokens.pk} acme api_key:9 u": 400,
        }

    def test_a_cost_of_nothing_passes_and_one_that_never_can_never_does(self, check: Check) -> None:
        slow()
        assert check(WHO, costs={"requests": 0}).allowed
        answer = check(WHO, costs={"requests": 3})
        assert (answer.allowed, answer.retry_after) == (False, None)
        assert "Retry-After" not in answer.headers()

    @pytest.mark.parametrize(
        "costs",
        [{}, {"requests": -1}, {"requests": 1.5}, {"requests": True}, {"requests": 2**40 + 1}, {"n": float("inf")}],
    )
    def test_costs_that_make_no_sense_are_a_mistake(self, check: Check, costs: Mapping[str, Any]) -> None:
        with pytest.raises(ValueError):
            check(WHO, costs=costs)

    def test_a_shadow_rule_never_refuses_and_is_told_in_the_usage(self, check: Check, redis_client: RawRedis) -> None:
        row = slow(mode="shadow")
        answers = [check(WHO) for _ in range(4)]
        assert all(answer.allowed for answer in answers)
        assert answers[3].headers() == {}
        assert counted(redis_client) == {
            "a requests 0 acme api_key:9 1": 4,
            f"s requests {row.pk} acme api_key:9 1": 2,
        }

    def test_without_an_account_usage_is_counted_in_aggregate(self, check: Check, redis_client: RawRedis) -> None:
        for number in range(3):
            check(Identity(address=f"ip:203.0.113.{number}"))
            check(Identity(user=f"user:{number}"))
        assert counted(redis_client) == {"a requests 0 - anonymous 1": 6}

    def test_an_account_of_a_user_is_counted_under_the_user(self, check: Check, redis_client: RawRedis) -> None:
        check(Identity(user="user:1", account="account:acme"))
        assert counted(redis_client) == {"a requests 0 acme user:1 1": 1}

    def test_a_request_that_would_have_to_wait_is_refused_at_once(self, check: Check) -> None:
        rule("queue", "leaky_bucket_queue", capacity=10, rate="0.001", max_wait=100_000)
        assert [check(WHO).wait > 0 for _ in range(3)] == [False, True, True]
        assert not check(WHO, at_once=True).allowed

    def test_a_receipt_of_an_answer_can_be_given_back(self, check: Check) -> None:
        from ratelimits.engine import refund

        slow()
        answer = check(WHO)
        assert answer.decision is not None
        assert answer.decision.receipt is not None
        assert refund(answer.decision.receipt).remaining == 2


class TestHotPath:
    @pytest.mark.parametrize("refused", [False, True])
    def test_a_known_request_is_one_round_trip_and_no_query(
        self, check: Check, settings: Any, redis_url: str, monkeypatch: pytest.MonkeyPatch, refused: bool
    ) -> None:
        no_repeats(settings)
        for kind in ("user", "account", "global"):
            slow(f"per-{kind}", key_kind=kind, capacity=3 if refused else 100)
        for _ in range(3):
            check(WHO)
        if check is not checking.check:
            # Another event loop has its own connections.
            monkeypatch.setattr(checking, "acheck", _twice(checking.acheck, redis_url, monkeypatch))
            assert check(WHO).allowed is not refused
            return
        with queries(monkeypatch) as asked, commands_of_clients(redis_url) as commands:
            assert check(WHO).allowed is not refused
        assert [command.split()[0] for command in commands] == ["EVALSHA"]
        assert asked == []

    def test_keys_that_were_invented_cost_no_query(self, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
        slow(key_kind="ip")
        for number in range(300):
            check(Identity(address=f"ip:198.51.100.{number}"))
        with queries(monkeypatch) as asked:
            for number in range(50):
                assert check(Identity(address=f"ip:203.0.113.{number}")).allowed
        assert asked == []

    def test_what_is_remembered_of_requests_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(prepared, "MAX_COMMANDS", 10)
        slow(key_kind="ip")
        for number in range(100):
            assert checking.check(Identity(address=f"ip:203.0.113.{number}")).allowed
        assert len(prepared._commands.by_key) <= 10


def _twice(acheck: Any, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    async def counting(*args: Any, **more: Any) -> Answer:
        await acheck(*args, **more)
        with queries(monkeypatch) as asked, commands_of_clients(redis_url) as commands:
            answer: Answer = await acheck(*args, **more)
        assert [command.split()[0] for command in commands] == ["EVALSHA"]
        assert asked == []
        return answer

    return counting


class TestEdits:
    def test_an_edit_holds_from_the_next_decision_on(self, check: Check, settings: Any) -> None:
        no_repeats(settings)
        slow()
        assert [check(WHO).allowed for _ in range(3)] == [True, True, False]
        Rule.objects.update(capacity=5)
        assert [check(WHO).allowed for _ in range(4)] == [True, True, True, False]
        KeyOverride.objects.create(key="api_key:9", rule="slow", mode="off")
        answer = check(WHO)
        assert (answer.allowed, answer.binding) == (True, None)
        Rule.objects.all().delete()
        assert check(WHO).prepared.rules == ()  # type: ignore[union-attr]

    def test_a_refusal_is_repeated_for_a_moment_at_most(
        self, check: Check, clock: Clock, redis_url: str, redis_client: RawRedis
    ) -> None:
        row = slow(capacity=1)
        check(WHO)
        first = check(WHO)
        with commands_of_clients(redis_url) as commands:
            clock.now += 0.5
            again = check(WHO)
        assert commands == []
        assert (first.allowed, again.allowed) == (False, False)
        assert first.retry_after is not None
        assert again.retry_after is not None
        assert first.retry_after - again.retry_after == pytest.approx(0.5)
        assert again.headers().keys() == first.headers().keys()
        Rule.objects.update(capacity=100)
        clock.now += 0.6
        assert check(WHO).allowed
        from_memory.sender.flush()
        assert counted(redis_client)[f"d requests {row.pk} acme api_key:9 1"] == 2

    def test_a_version_that_the_database_does_not_have_is_decided_by_the_rules_that_it_has(
        self, check: Check, settings: Any, redis_client: RawRedis, redis_url: str
    ) -> None:
        no_repeats(settings)
        slow(capacity=100, on_failure="deny")
        check(WHO)
        for shard in range(conf.SHARDS):
            head = redis_client.get(KEYS.head(shard))
            redis_client.set(KEYS.head(shard), b"1000000 " + head.split()[1])
        with commands_of_clients(redis_url) as commands:
            answer = check(WHO)
        assert answer.allowed
        assert answer.decision is not None
        assert answer.decision.remaining == 98
        assert [command.split()[0] for command in commands].count("EVALSHA") == 2


class TestFailures:
    """The API must stay up while Redis is away, slow or answers wrongly."""

    @pytest.mark.parametrize(
        ("on_failure", "allowed"),
        [(("allow",), True), (("deny",), False), (("allow", "deny"), False), (("local",), True), ((), True)],
    )
    def test_each_rule_says_what_happens_while_the_server_is_away(
        self, check: Check, settings: Any, on_failure: tuple[str, ...], allowed: bool
    ) -> None:
        for choice in on_failure:
            slow(choice, on_failure=choice)
        away(settings, free_port())
        answer = check(WHO)
        assert (answer.allowed, answer.decision, answer.unavailable) == (allowed, None, not allowed)
        assert answer.headers() == ({} if allowed else {"Retry-After": "1", "Cache-Control": "no-store, private"})

    @pytest.mark.parametrize(("policy", "allowed"), [("allow", True), ("deny", False)])
    def test_a_rule_that_says_nothing_leaves_it_to_the_project(
        self, check: Check, settings: Any, policy: str, allowed: bool
    ) -> None:
        no_repeats(settings, FAILURE_POLICY=policy)
        slow()
        away(settings, free_port())
        assert check(WHO).allowed is allowed

    def test_shadow_rules_say_nothing_about_failures(self, check: Check, settings: Any) -> None:
        slow(mode="shadow", on_failure="deny")
        away(settings, free_port())
        assert check(WHO).allowed

    def test_a_local_rule_limits_in_this_process(self, check: Check, settings: Any) -> None:
        slow(on_failure="local", capacity=3)
        away(settings, free_port())
        assert [check(WHO).allowed for _ in range(5)] == [True] * 3 + [False] * 2
        assert check(Identity(user="user:2")).allowed

    @pytest.mark.parametrize(("policy", "allowed"), [("allow", True), ("deny", False)])
    def test_rules_that_cannot_be_had_leave_it_to_the_project(
        self, check: Check, settings: Any, policy: str, allowed: bool, no_rules: None
    ) -> None:
        no_repeats(settings, FAILURE_POLICY=policy)
        answer = check(WHO)
        assert (answer.allowed, answer.prepared, answer.unavailable) == (allowed, None, not allowed)

    def test_rules_that_are_held_stay_in_force_while_the_database_is_away(
        self, check: Check, settings: Any, request: pytest.FixtureRequest
    ) -> None:
        no_repeats(settings)
        slow()
        check(WHO)
        request.getfixturevalue("no_rules")
        assert [check(WHO).allowed for _ in range(2)] == [True, False]

    def test_a_corrupt_state_is_logged_and_falls_to_the_policy(
        self, check: Check, redis_client: RawRedis, caplog: pytest.LogCaptureFixture
    ) -> None:
        slow(on_failure="deny")
        redis_client.set(KEYS.state(shard_of("user:1", conf.SHARDS), "user:1"), b"garbage of no kind at all")
        answer = check(WHO)
        assert (answer.allowed, answer.unavailable) == (False, True)
        assert "CORRUPT the state at" in caplog.text

    def test_after_some_failures_the_server_is_left_alone_and_then_tried_again(
        self, check: Check, clock: Clock, proxy: Proxy, settings: Any
    ) -> None:
        slow(capacity=100)
        assert check(WHO).decision is not None
        with short_timeout(settings):
            proxy.lose.set()
            for _ in range(FAILURES):
                assert check(WHO).decision is None
            sent = proxy.count(b"EVALSHA") + proxy.connections
            started = time.monotonic()
            for _ in range(100):
                assert check(WHO).decision is None
            assert time.monotonic() - started < 1, "nobody waits for it"
        assert proxy.count(b"EVALSHA") + proxy.connections == sent
        proxy.lose.clear()
        clock.now += PAUSE
        assert check(WHO).decision is not None
        assert check(WHO).decision is not None

    def test_a_server_that_calls_the_rules_stale_is_there(self, check: Check, clock: Clock, settings: Any) -> None:
        slow(capacity=100)
        check(WHO)
        for _ in range(FAILURES):
            breaker.failed()
        clock.now += PAUSE
        Rule.objects.update(capacity=50)
        answer = check(WHO)
        assert answer.decision is not None
        assert answer.decision.limit == 50

    def test_a_lost_reply_is_declared_and_the_request_sent_once(
        self, check: Check, proxy: Proxy, redis_client: RawRedis, settings: Any
    ) -> None:
        slow(capacity=100)
        check(WHO)
        before = counted(redis_client)
        with short_timeout(settings):
            assert (_lost if check is checking.check else _lost_to_a_task)(proxy) == 1
        proxy.lose.clear()
        assert counted(redis_client) != before
        kinds = {(place.kind, place.account, place.key): units for place, units in process_totals.totals().items()}
        assert kinds["unanswered", "acme", "api_key:9"] == (1, 1)

    def test_what_was_let_through_unmetered_is_declared(self, check: Check, settings: Any) -> None:
        slow(capacity=100)
        away(settings, free_port())
        check(WHO, costs={"requests": 1, "tokens": 30})
        check(Identity(), costs={"requests": 1})
        kinds = {
            (place.kind, place.account, place.key, place.meter): units
            for place, units in process_totals.totals().items()
        }
        assert kinds == {
            ("unmetered", "acme", "api_key:9", "requests"): (1, 1),
            ("unmetered", "acme", "api_key:9", "tokens"): (1, 30),
            ("unmetered", "", "anonymous", "requests"): (1, 1),
        }

    def test_what_was_refused_is_not_declared(self, check: Check, settings: Any) -> None:
        slow(on_failure="deny")
        away(settings, free_port())
        assert not check(WHO).allowed
        assert {total.kind for total in process_totals.totals()} == {"undecided"}

    def test_the_server_comes_back_with_nothing_lost(self, check: Check, proxy: Proxy, settings: Any) -> None:
        no_repeats(settings)
        slow(capacity=3)
        assert check(WHO).allowed
        proxy.cut.set()
        assert check(WHO).allowed
        proxy.cut.clear()
        decisions = [check(WHO).decision for _ in range(3)]
        assert decisions[-1] is not None
        assert not decisions[-1].allowed


def _lost(proxy: Proxy) -> int:
    """Lose the reply to a request on a connection that is there, and return how often the request was sent."""
    assert any(checking.check(WHO).decision is not None for _ in range(FAILURES))
    sent = proxy.count(b"EVALSHA")
    proxy.lose.set()
    assert checking.check(WHO).allowed
    return proxy.count(b"EVALSHA") - sent


def _lost_to_a_task(proxy: Proxy) -> int:
    async def lose() -> int:
        assert any([(await checking.acheck(WHO)).decision is not None for _ in range(FAILURES)])
        sent = proxy.count(b"EVALSHA")
        proxy.lose.set()
        assert (await checking.acheck(WHO)).allowed
        return proxy.count(b"EVALSHA") - sent

    return asyncio.run(lose())


@pytest.fixture
def no_rules() -> Iterator[None]:
    """Use a database that was never migrated: its first table is missing."""
    table = ConfigVersion._meta.db_table
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE {table} RENAME TO somewhere_else")
    logging.getLogger("ratelimits").debug("the configuration's table is away")
    yield
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE somewhere_else RENAME TO {table}")
    rules.forget()


class TestHeaders:
    def test_an_admitted_request_is_told_where_it_stands(self, check: Check) -> None:
        rule("burst", "fixed_window", capacity=100, period=60)
        slow("tight", capacity=10)
        slow("unseen", mode="shadow")
        fields = check(WHO).headers()
        assert fields == {
            "RateLimit-Policy": '"burst";q=100;w=60, "tight";q=10;w=10000000',
            "RateLimit": '"tight";r=9;t=1000000',
        }

    def test_a_refused_one_is_told_when_to_come_again_and_never_too_early(self, check: Check) -> None:
        slow("tight", capacity=1)
        check(WHO)
        answer = check(WHO)
        fields = answer.headers()
        assert answer.retry_after is not None
        assert int(fields["Retry-After"]) >= answer.retry_after
        assert fields["RateLimit"] == f'"tight";r=0;t={fields["Retry-After"]}'

    def test_the_fields_that_many_clients_know_are_a_setting(self, check: Check, settings: Any) -> None:
        no_repeats(settings, X_RATELIMIT_HEADERS=True)
        rule("month", "calendar_window", capacity=1_000_000)
        fields = check(WHO).headers()
        assert (fields["X-RateLimit-Limit"], fields["X-RateLimit-Remaining"]) == ("1000000", "999999")
        assert int(fields["X-RateLimit-Reset"]) <= 31 * 86_400
