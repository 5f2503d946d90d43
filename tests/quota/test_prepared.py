"""Test prepared commands for requests that are alike, and the permits that a process prefetches for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from ratelimits import rules
from ratelimits.answers.answer import Answer
from ratelimits.engine import AlreadySettled, Unanswered
from ratelimits.engine.call import Op
from ratelimits.engine.counting import Count, CountSpent
from ratelimits.engine.decide import decide_call
from ratelimits.engine.decision import Decision
from ratelimits.engine.server import current_server
from ratelimits.identity import Identity
from ratelimits.models import KeyOverride, Rule
from ratelimits.quota import checking, from_memory, prepared, receipts, spending
from ratelimits.quota.prefetch import Fetch, PrefetchedPermits
from ratelimits.usage.counting import process_totals
from tests.end_to_end.test_round_trips import commands_of_clients
from tests.support.entry_points import Clock, away, begin_afresh, counted
from tests.support.rows import rule

pytestmark = pytest.mark.django_db(transaction=True)

WHO = Identity("user:1", "api_key:9", "account:acme", "ip:203.0.113.9")
#: A window of this length began in 2014 and ends in 2036.
LONG = 700_000_000
Check = Callable[..., Answer]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return begin_afresh(monkeypatch)


def ahead(name: str = "ahead", **more: Any) -> Rule:
    """Add a rule whose permits are prefetched, and do not come back during a test."""
    return rule(name, "fixed_window", **{"capacity": 1000, "period": LONG, "prefetch": 50, **more})


def prefetched() -> PrefetchedPermits:
    """Return the prefetched permits of the only prepared command."""
    (ready,) = prepared._commands.by_key.values()
    assert ready.permits is not None
    return ready.permits


def left() -> int:
    """Return how many permits Redis has left."""
    return decide_call(current_server(), prefetched().call._replace(op=Op.PEEK)).remaining


class TestPrefetch:
    def test_requests_are_admitted_to_the_limit_and_few_are_asked_for(
        self, check: Check, redis_url: str, settings: Any
    ) -> None:
        # So that they last however long the requests take.
        settings.RATELIMITS = {**settings.RATELIMITS, "PREFETCH_SECONDS": 600}
        ahead()
        check(WHO)
        with commands_of_clients(redis_url) as commands:
            admitted = 1 + sum(check(WHO).allowed for _ in range(1500))
        assert admitted == 1000
        calls = [command for command in commands if command.startswith("EVALSHA")]
        reports = [command for command in calls if CountSpent.script.sha.decode() in command]
        assert len(reports) <= len(calls) - len(reports) < 150

    def test_an_admitted_request_is_told_where_it_stands(self, check: Check) -> None:
        ahead()
        answer = check(WHO)
        assert answer.headers()["RateLimit"].startswith('"ahead";r=999;t=')
        assert answer.wait == 0.0

    def test_each_request_is_counted_under_the_rule_that_bills(self, check: Check, redis_client: redis.Redis) -> None:
        row = ahead(capacity=50, bills=True)
        assert sum(check(WHO).allowed for _ in range(60)) == 50
        spending.send_and_give_back(everything=True)
        from_memory.sender.flush()
        assert counted(redis_client) == {
            f"a requests {row.pk} acme api_key:9 1": 50,
            f"d requests {row.pk} acme api_key:9 1": 10,
        }
        assert {(each.kind, *counts) for each, counts in process_totals.totals().items()} == {("admitted", 50, 50)}

    def test_a_refusal_is_repeated_without_asking(self, check: Check, redis_url: str) -> None:
        ahead(capacity=1)
        assert [check(WHO).allowed for _ in range(2)] == [True, False]
        with commands_of_clients(redis_url) as commands:
            assert not any(check(WHO).allowed for _ in range(100))
        # A thread counts the refusals every second.
        assert [command for command in commands if Count.script.sha.decode() not in command] == []

    def test_beside_another_rule_each_request_is_decided_and_counted(
        self, check: Check, redis_client: redis.Redis
    ) -> None:
        ahead()
        rule("burst", capacity=3, rate="0.000001")
        assert [check(WHO).allowed for _ in range(4)] == [True] * 3 + [False]
        assert counted(redis_client)["a requests 0 acme api_key:9 1"] == 3

    @pytest.mark.parametrize("numbers", [{"mode": "shadow"}, {"prefetch": None}])
    def test_what_is_shadowed_or_has_none_is_decided_and_counted(
        self, check: Check, redis_client: redis.Redis, numbers: dict[str, Any]
    ) -> None:
        ahead("first")
        ahead("second", **numbers)
        for _ in range(3):
            assert check(WHO).allowed
        assert counted(redis_client)["a requests 0 acme api_key:9 1"] == 3

    def test_two_rules_that_lend_themselves_are_taken_together(self, check: Check, redis_url: str) -> None:
        ahead("day", capacity=20)
        ahead("all", capacity=10, key_kind="global", prefetch=4)
        assert sum(check(WHO).allowed for _ in range(30)) == 10
        other = WHO._replace(user="user:2", api_key="api_key:8")
        assert not check(other).allowed

    def test_a_used_up_limit_refuses_however_many_others_ask_for_meanwhile(
        self, check: Check, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ahead(capacity=10, prefetch=8)
        assert sum(check(WHO).allowed for _ in range(12)) == 10
        take = PrefetchedPermits.take

        def beside_others(self: PrefetchedPermits, fetch: Fetch, decision: Decision) -> object:
            taken = take(self, fetch, decision)
            self._size = self._room = 8  # another thread's prefetch was admitted just now
            return taken

        monkeypatch.setattr(PrefetchedPermits, "take", beside_others)
        for _ in range(3):
            from_memory.denials.clear()
            answer = check(WHO)
            assert (answer.allowed, answer.unavailable) == (False, False)

    def test_an_override_s_numbers_hold(self, check: Check) -> None:
        ahead()
        KeyOverride.objects.create(key=str(WHO.user), rule="ahead", capacity=7)
        assert sum(check(WHO).allowed for _ in range(30)) == 7

    def test_each_request_can_be_refunded_once(self, check: Check, redis_client: redis.Redis) -> None:
        ahead()
        answers = [check(WHO) for _ in range(10)]
        for answer in answers:
            request: Any = SimpleNamespace(quota=answer)
            assert receipts.refund(request) is not None
            with pytest.raises(AlreadySettled):
                receipts.refund(request)
        spending.send_and_give_back(everything=True)
        assert counted(redis_client) == {"a requests 0 acme api_key:9 1": 10, "r requests 0 acme api_key:9 1": 10}
        assert left() == 1000

    def test_each_request_can_be_settled(self, check: Check, redis_client: redis.Redis) -> None:
        ahead(meter="tokens")
        costs = {"tokens": 10}
        for used in (12, 3, 10, 10, 15):
            request: Any = SimpleNamespace(quota=check(WHO, costs=costs))
            decision = receipts.settle(request, {"tokens": used})
            assert decision is not None
        spending.send_and_give_back(everything=True)
        assert left() == 1000 - 50
        assert counted(redis_client) == {
            "a tokens 0 acme api_key:9 n": 5,
            "a tokens 0 acme api_key:9 u": 57,
            "r tokens 0 acme api_key:9 u": 7,
        }

    def test_costs_are_taken_as_often_as_requests(self, check: Check) -> None:
        ahead(capacity=100, meter="tokens")
        assert sum(check(WHO, costs={"requests": 1, "tokens": 7}).allowed for _ in range(40)) == 14

    def test_an_edit_that_this_process_knows_of_ends_what_is_held(self, check: Check) -> None:
        from ratelimits import rules

        row = ahead()
        for _ in range(5):
            assert check(WHO).allowed
        row.capacity = 5
        row.save()
        rules.reload()
        assert not check(WHO).allowed

    def test_what_is_held_is_spent_while_the_server_is_away(self, check: Check, settings: Any) -> None:
        ahead(on_failure="deny", prefetch=64)
        answers = [check(WHO) for _ in range(4)]
        away(settings, 1)
        answers += [check(WHO) for _ in range(6)]
        assert [answer.allowed for answer in answers] == [True] * 7 + [False] * 3
        assert answers[-1].unavailable

    def test_what_a_failure_policy_admits_is_declared(self, check: Check, settings: Any) -> None:
        ahead()
        away(settings, 1)
        assert check(WHO).allowed
        assert [each.kind for each in process_totals.totals()] == ["unmetered"]

    def test_a_refused_fetch_for_several_requests_is_not_counted_as_denied(
        self, check: Check, redis_client: redis.Redis
    ) -> None:
        ahead(capacity=100, key_kind="account", prefetch=8)
        assert all(check(WHO).allowed for _ in range(7))
        other = WHO._replace(api_key="api_key:8")
        permits = prefetched()
        assert sum(check(other, costs={"requests": 91}).allowed for _ in range(2)) == 1
        permits._size = 8
        from_memory.denials.clear()
        assert sum(check(WHO).allowed for _ in range(2)) == 2
        spending.send_and_give_back(everything=True)
        fields = {name: count for name, count in counted(redis_client).items() if "api_key:9" in name}
        assert fields == {"a requests 0 acme api_key:9 1": 9}

    def test_no_time_at_all_takes_nothing_ahead(self, check: Check, settings: Any, redis_client: redis.Redis) -> None:
        settings.RATELIMITS = {**settings.RATELIMITS, "PREFETCH_SECONDS": 0}
        ahead()
        for _ in range(3):
            assert check(WHO).allowed
        assert counted(redis_client) == {"a requests 0 acme api_key:9 1": 3}

    @pytest.mark.parametrize("name", ["decide_call", "adecide_call"])
    def test_a_lost_reply_after_an_edit_that_ended_prefetching_is_declared(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        row = ahead()
        assert checking.check(WHO).allowed
        row.prefetch = None
        row.save()
        real, calls = checking.decide_call, []  # type: ignore[attr-defined]

        def lose(*args: Any) -> Any:
            calls.append(args)
            if len(calls) == 2:
                raise Unanswered("lost")
            return real(*args)

        async def alose(*args: Any) -> Any:
            return lose(*args)

        monkeypatch.setattr(checking, name, lose if name == "decide_call" else alose)
        if name == "decide_call":
            checking.check(WHO)
        else:
            asyncio.run(checking.acheck(WHO))
        assert len(calls) == 2
        assert {place.kind for place in process_totals.totals()} == {"admitted", "unanswered", "unmetered"}


def test_combinations_of_meters_that_clients_name_are_not_kept_for_ever(check: Check) -> None:
    rule("burst", capacity=1000)
    for number in range(3 * prepared.MAX_METER_COMBINATIONS):
        names = [f"model-{bit}" for bit in range(8) if number >> bit & 1]
        assert check(WHO, costs={"requests": 1, **dict.fromkeys(names, 1)}).allowed
    chosen = rules.current().select("*", "", WHO)
    assert 0 < len(chosen.cache) <= prepared.MAX_METER_COMBINATIONS
