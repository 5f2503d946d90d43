"""Test blocks and allows: decided before any rule, without a command, and counted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import redis
from django.test import AsyncRequestFactory, RequestFactory
from django.utils import timezone

from ratelimits import rules
from ratelimits.answers.answer import Answer
from ratelimits.decorators import limited
from ratelimits.embedded import free_port
from ratelimits.engine.counting import Count
from ratelimits.engine.server import publications
from ratelimits.identity import Identity
from ratelimits.middleware import QuotaMiddleware
from ratelimits.models import Access, Account, Rule
from ratelimits.quota import checking, from_memory, prepared
from ratelimits.rules import AccessRow
from ratelimits.usage.counting import access, process_totals
from ratelimits.usage.ledger.process_totals import fold
from ratelimits.usage.ledger.process_totals import write as write_totals
from ratelimits.usage.models import DurabilityGap, ProcessTotal
from tests.end_to_end.test_round_trips import commands_of_clients
from tests.support.entry_points import Clock, away, begin_afresh, counted
from tests.support.rows import rule

pytestmark = pytest.mark.django_db(transaction=True)

WHO = Identity("user:1", "api_key:9", "account:acme", "ip:203.0.113.9")
Check = Callable[..., Answer]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    access.clear()
    return begin_afresh(monkeypatch)


def block(target: str = "account:acme", **fields: Any) -> Access:
    return Access.objects.create(**{"target": target, "reason": "abuse", **fields})


def allow(target: str = "account:acme", **fields: Any) -> Access:
    return block(target, effect="allow", **fields)


def of_another_process(edit: Callable[[], object]) -> None:
    """Make an edit of which this process gets no notice, as if another process had made it."""
    known, published = rules.current(), publications()
    edit()
    prepared.commands_by(known).publications = published + 1


class TestDeciding:
    @pytest.mark.parametrize("target", ["account:acme", "user:1", "api_key:9", "203.0.113.9", "203.0.0.0/16"])
    def test_a_block_refuses_before_any_rule_without_a_command(
        self, check: Check, target: str, redis_client: redis.Redis, redis_url: str
    ) -> None:
        rule(capacity=5)
        row = block(target)
        with commands_of_clients(redis_url) as commands:
            answers = [check(WHO) for _ in range(6)]
        assert {(one.allowed, one.unavailable, one.retry_after, one.decision) for one in answers} == {
            (False, False, None, None)
        }
        assert isinstance(answers[0].access, AccessRow)
        assert (answers[0].access.pk, answers[0].access.status) == (row.pk, 403)
        # The thread that sends the counts may have run meanwhile; but nothing asks for a decision.
        counting = f"EVALSHA {Count.script.sha.decode()}"
        assert [one for one in commands if "EVALSHA" in one and not one.startswith(counting)] == []
        from_memory.sender.flush()
        assert counted(redis_client) == {"d requests 0 acme api_key:9 1": 6}

    def test_an_allow_exempts_from_every_rule_and_is_not_counted_as_usage(
        self, check: Check, redis_client: redis.Redis
    ) -> None:
        rule(capacity=0)
        assert not check(WHO).allowed
        row = allow()
        answers = [check(WHO, costs={"requests": 1, "tokens": 50}) for _ in range(3)]
        assert [(one.allowed, one.headers(), one.wait) for one in answers] == [(True, {}, 0.0)] * 3
        from_memory.sender.flush()
        assert not [name for name in counted(redis_client) if name.startswith("a")]
        row.end("over")
        assert not check(WHO).allowed

    def test_other_keys_are_decided_by_the_rules(self, check: Check) -> None:
        rule(capacity=1, rate="0.000001")
        block("user:2")
        assert [check(WHO).allowed for _ in range(2)] == [True, False]

    def test_both_hold_while_redis_is_away(self, check: Check, settings: Any) -> None:
        rule(capacity=5, on_failure="deny")
        block("user:2")
        allow("user:3")
        away(settings, free_port())
        assert [check(Identity(f"user:{n}")).allowed for n in (2, 3)] == [False, True]
        assert check(Identity("user:1")).unavailable

    def test_a_burst_of_tasks_passes_nothing(self) -> None:
        block()

        async def burst() -> list[Answer]:
            return await asyncio.gather(*(checking.acheck(WHO) for _ in range(500)))

        assert not any(answer.allowed for answer in asyncio.run(burst()))


class TestEdits:
    def test_an_edit_is_in_force_at_the_next_request(self, check: Check) -> None:
        rule(capacity=50)
        assert check(WHO).allowed
        row = block()
        assert not check(WHO).allowed
        Access.objects.update(target="user:2")
        assert check(WHO).allowed
        row.refresh_from_db()
        Access.objects.update(target="203.0.113.0/24")
        assert not check(WHO).allowed
        Access.objects.all().delete()
        assert check(WHO).allowed

    def test_a_block_is_in_force_at_the_first_request_of_a_key(self, check: Check) -> None:
        rule("a", capacity=5)
        # The process knows the rules, but it has not read the rows about this key yet. It reads the edit with them.
        rules.current()
        Access.objects.create(target="api_key:9", reason="r")
        assert not check(WHO).allowed

    def test_a_block_of_another_process_is_in_force_at_the_next_request(self, check: Check) -> None:
        rule(capacity=50)
        assert check(WHO).allowed
        of_another_process(block)
        assert not check(WHO).allowed

    @pytest.mark.parametrize("effect", ["block", "allow"])
    def test_its_end_by_another_process_is_known_with_the_next_sending_of_counts(
        self, check: Check, effect: str
    ) -> None:
        rule(capacity=50)
        row = block(effect=effect)
        assert check(WHO).access is not None
        with from_memory.sender._background._working:  # The thread sends no counts meanwhile.
            of_another_process(lambda: row.end("over"))
            assert check(WHO).access is not None
        from_memory.sender.flush()
        answer = check(WHO)
        assert (answer.allowed, answer.access) == (True, None)

    def test_one_that_begins_and_ends_later_needs_no_edit(self, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
        rule(capacity=50)
        now = timezone.now()
        block(valid_from=now + timedelta(hours=1), valid_until=now + timedelta(hours=2))
        moment, real = [0.0], time.time_ns
        monkeypatch.setattr(rules._loader, "_clock", lambda: real() // 1000 + int(moment[0] * 3600e6))
        rules.forget()
        allowed = []
        for hours in (0, 1.01, 1.99, 2.01):
            moment[0] = hours
            allowed.append(check(WHO).allowed)
        assert allowed == [True, False, False, True]

    def test_a_new_process_reads_what_is_in_force(self, check: Check) -> None:
        block("user:1", valid_until=timezone.now() + timedelta(hours=1))
        block("user:2").end("over")
        rules.forget()
        assert [check(Identity(f"user:{n}")).access is None for n in (1, 2)] == [False, True]
        assert len(rules.current().rows.access) == 1


class TestCounting:
    def test_refusals_are_counted_in_the_billing_period_of_their_account(
        self, check: Check, redis_client: redis.Redis
    ) -> None:
        Account.objects.create(identifier="acme", timezone="Asia/Tokyo")
        block("203.0.113.0/24")
        for who in (WHO, Identity(address="ip:203.0.113.7"), Identity(address="ip:203.0.113.8")):
            check(who, costs={"tokens": 20})
        from_memory.sender.flush()
        assert counted(redis_client) == {
            "d tokens 0 acme api_key:9 n": 1,
            "d tokens 0 acme api_key:9 u": 20,
            "d tokens 0 - anonymous n": 2,
            "d tokens 0 - anonymous u": 40,
        }

    def test_totals_say_what_each_row_refused_or_exempted_and_no_gap_is_declared(self, check: Check) -> None:
        block("203.0.113.0/24")
        allow("user:3")
        for _ in range(3):
            check(WHO)
        check(Identity("user:3", account="account:three"), costs={"tokens": 7})
        write_totals("p", process_totals.totals())
        write_totals("p", process_totals.totals())
        rows = ProcessTotal.objects.order_by("kind").values_list("kind", "account", "key", "meter", "requests", "units")
        assert list(rows) == [
            ("blocked", "acme", "ip:203.0.113.0/24", "requests", 3, 3),
            ("exempt", "three", "user:3", "tokens", 1, 7),
        ]
        assert not DurabilityGap.objects.exists()
        ProcessTotal.objects.update(bin=0)
        write_totals("q", {key._replace(bin=0): value for key, value in process_totals.totals().items()})
        assert (fold(10**9), ProcessTotal.objects.count()) == (2, 2)
        assert ProcessTotal.objects.get(kind="blocked").requests == 6

    def test_many_refusals_are_added_up_before_they_are_sent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(access, "_MAX_DECIDED", 10)
        block("203.0.113.0/24")
        for n in range(25):
            checking.check(Identity(address=f"ip:203.0.113.{n}"))
        assert len(access._decided) == 5
        assert [one.requests for one in access.take()] == [25]
        assert access.take() == []

    def test_what_the_server_could_not_be_told_is_told_later(
        self, settings: Any, redis_client: redis.Redis, caplog: pytest.LogCaptureFixture
    ) -> None:
        block()
        caches = settings.CACHES
        away(settings, free_port())
        checking.check(WHO)
        from_memory.sender.flush()
        settings.CACHES = caches
        from_memory.sender.flush()
        assert counted(redis_client) == {"d requests 0 acme api_key:9 1": 1}


class TestResponses:
    def sync_response(self, request: Any) -> Any:
        @limited()
        def view(request: Any) -> Any:
            raise AssertionError("the view must not run")

        return view(request)

    def test_the_decorator_says_the_status_and_the_reason_for_the_client(self) -> None:
        block("203.0.113.0/24", message="Write to abuse@example.com.")
        response = self.sync_response(RequestFactory().get("/", REMOTE_ADDR="203.0.113.7"))
        assert (response.status_code, response["Content-Type"]) == (403, "application/problem+json")
        assert b'"detail": "Write to abuse@example.com."' in response.content
        assert b"abuse@example.com" in response.content
        assert "Retry-After" not in response

    def test_429_says_when_the_block_ends(self) -> None:
        block("203.0.113.0/24", status=429, valid_until=timezone.now() + timedelta(minutes=2))
        response = self.sync_response(RequestFactory().get("/", REMOTE_ADDR="203.0.113.7"))
        assert response.status_code == 429
        assert 110 <= int(response["Retry-After"]) <= 120
        assert b'"title": "Too Many Requests"' in response.content
        assert b"detail" not in response.content

    def test_one_without_an_end_says_no_time(self) -> None:
        block("203.0.113.0/24", status=429)
        assert "Retry-After" not in self.sync_response(RequestFactory().get("/", REMOTE_ADDR="203.0.113.7"))

    def test_async_views_and_the_middleware_too(self, settings: Any) -> None:
        block("203.0.113.0/24")
        settings.RATELIMITS = {**settings.RATELIMITS, "PATHS": ["/files/"]}

        async def view(request: Any) -> Any:
            raise AssertionError("the view must not run")

        request = AsyncRequestFactory().get("/files/x", REMOTE_ADDR="203.0.113.7")
        request.META["REMOTE_ADDR"] = "203.0.113.7"

        async def both() -> list[int]:
            middleware: Any = QuotaMiddleware(view)
            return [(await limited()(view)(request)).status_code, (await middleware(request)).status_code]

        assert asyncio.run(both()) == [403, 403]
        sync: Any = QuotaMiddleware(self.sync_response)
        assert sync(RequestFactory().get("/files/x", REMOTE_ADDR="203.0.113.7")).status_code == 403

    def test_an_exempted_request_runs_its_view_and_has_no_limits_in_its_response(self) -> None:
        from django.http import HttpResponse

        Rule.objects.all().delete()
        rule(capacity=0, key_kind="ip")
        allow("203.0.113.7")
        response = limited()(lambda request: HttpResponse("hello"))(
            RequestFactory().get("/", REMOTE_ADDR="203.0.113.7")
        )
        assert (response.content, "RateLimit" in response) == (b"hello", False)
