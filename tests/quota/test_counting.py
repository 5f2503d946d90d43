"""Test limits without the floor that counts usage: they decide, refuse, refund and settle, and nothing is counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
from django.apps import apps
from django.test import RequestFactory

from ratelimits import rules
from ratelimits.algorithms.limits import Lasting
from ratelimits.answers.answer import Answer
from ratelimits.embedded import free_port
from ratelimits.engine import AlreadySettled, Decision, Receipt, refund
from ratelimits.identity import Identity
from ratelimits.models import Access, Rule
from ratelimits.quota import checking, from_memory, receipts, spending
from ratelimits.quota.counting import Counting, counting
from ratelimits.quota.waiting import acheck_and_wait, check_and_wait
from ratelimits.usage import recording
from ratelimits.usage.counting import access, process_totals
from ratelimits.usage.models import ProcessTotal
from tests.support.entry_points import away, begin_afresh, counted
from tests.support.raw import RawRedis
from tests.support.rows import rule
from tests.usage.counting.test_access import of_another_process

pytestmark = pytest.mark.django_db(transaction=True)

WHO = Identity("user:1", "api_key:9", "account:acme", "ip:203.0.113.9")
NOBODY = Identity(address="ip:203.0.113.9")
Check = Callable[..., Answer]
Settle = Callable[[Answer, dict[str, int]], Decision | None]


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    access.clear()
    begin_afresh(monkeypatch)
    yield
    rules.forget()  # the commands were prepared without the floor above


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, redis_client: RawRedis) -> Iterator[None]:
    """Take the floor above away during the test, and find nothing that was counted at its end."""
    for place in fields(Counting):
        monkeypatch.setattr(counting, place.name, place.default)
    yield
    from_memory.sender.flush()
    spending.send_and_give_back(everything=True)
    assert [key for ending in ("open", "sealed", "prefetched") for key in redis_client.keys(f"*}}:{ending}")] == []
    assert process_totals.totals() == {}
    assert (access.take(), list(recording._unwritten)) == ([], [])
    assert not ProcessTotal.objects.exists()


@pytest.fixture(params=["settle", "async_settle"])
def settle(request: pytest.FixtureRequest) -> Settle:
    """Settle an answer at these costs, or refund it if there are none: in sync code, then in async code."""

    def settle(answer: Answer, costs: dict[str, int]) -> Decision | None:
        asked = SimpleNamespace(quota=answer)
        if request.param == "settle":
            return receipts.settle(asked, costs) if costs else receipts.refund(asked)
        return asyncio.run(receipts.async_settle(asked, costs) if costs else receipts.async_refund(asked))

    return settle


def admitted(check: Check, tries: int, identity: Identity = WHO, **more: Any) -> int:
    return sum(check(identity, **more).allowed for _ in range(tries))


def test_the_floor_above_has_a_function_in_each_place() -> None:
    assert [place.name for place in fields(Counting) if getattr(counting, place.name) == place.default] == []


def test_what_was_prepared_before_the_floor_above_was_installed_is_prepared_again(
    check: Check, redis_client: RawRedis
) -> None:
    """An app whose `ready` came earlier has asked for a decision."""
    rule("monthly", "calendar_window", capacity=5, start_from_ledger=True)
    with pytest.MonkeyPatch.context() as patch:
        for place in fields(Counting):
            patch.setattr(counting, place.name, place.default)
        assert check(WHO).allowed
    apps.get_app_config("ratelimits_usage").ready()
    decision = check(WHO).decision
    assert decision is not None
    assert decision.program.terms[0].lasting is not Lasting.NO
    assert list(counted(redis_client).values()) == [1]


@pytest.mark.usefixtures("alone")
class TestDeciding:
    @pytest.mark.parametrize("identity", [WHO, NOBODY], ids=["account", "address"])
    def test_as_many_requests_pass_as_the_rule_says(self, check: Check, identity: Identity) -> None:
        rule(capacity=3, rate="0.000001")
        answers = [check(identity) for _ in range(5)]
        assert [answer.allowed for answer in answers] == [True] * 3 + [False] * 2
        assert [answer.headers()["RateLimit"].split(";")[1] for answer in answers] == [
            "r=2",
            "r=1",
            "r=0",
            "r=0",
            "r=0",
        ]

    @pytest.mark.parametrize("identity", [WHO, NOBODY], ids=["account", "address"])
    def test_the_first_rule_of_another_process_is_in_force_at_once(self, check: Check, identity: Identity) -> None:
        assert check(identity).allowed
        of_another_process(lambda: rule(capacity=1, rate="0.000001"))
        assert admitted(check, 3, identity) == 1

    def test_an_edit_of_capacity_0_by_another_process_is_known_with_the_next_sending(self, check: Check) -> None:
        rule(capacity=0)
        assert not check(WHO).allowed
        with from_memory.sender._background._working:  # the thread asks nothing meanwhile
            of_another_process(lambda: Rule.objects.update(capacity=5))
            assert not check(WHO).allowed
        from_memory.sender.flush()
        assert check(WHO).allowed

    @pytest.mark.parametrize("effect", ["block", "allow"])
    def test_the_end_of_a_block_by_another_process_is_known_with_the_next_sending(
        self, check: Check, effect: str
    ) -> None:
        rule(capacity=50)
        row = Access.objects.create(target="account:acme", reason="abuse", effect=effect)
        assert check(WHO).access is not None
        with from_memory.sender._background._working:
            of_another_process(lambda: row.end("over"))
            assert check(WHO).access is not None
        from_memory.sender.flush()
        answer = check(WHO)
        assert (answer.allowed, answer.access) == (True, None)

    def test_a_stored_refusal_is_repeated_and_a_newer_rule_is_known_with_the_next_sending(self, check: Check) -> None:
        rule(capacity=1, rate="0.000001")
        assert admitted(check, 3) == 1
        with from_memory.sender._background._working:
            of_another_process(lambda: Rule.objects.update(capacity=9))
            assert not check(WHO).allowed
        from_memory.sender.flush()
        assert [getattr(row.algorithm, "capacity", 0) for row in rules.current().rows.rules.values()] == [9]

    def test_failure_policies_answer_while_redis_is_away(self, check: Check, settings: Any) -> None:
        rule("a", on_failure="allow")
        rule("d", on_failure="deny", scope="strict")
        caches = settings.CACHES
        away(settings, free_port())
        answers = [check(Identity("user:2", unreadable=("user",))), check(WHO, "strict")]
        assert [(answer.allowed, answer.unavailable) for answer in answers] == [(True, False), (False, True)]
        settings.CACHES = caches

    def test_a_lasting_rule_begins_again_if_redis_has_lost_its_data(self, check: Check, redis_client: RawRedis) -> None:
        rule("monthly", "calendar_window", capacity=3, start_from_ledger=True)
        assert admitted(check, 5) == 3
        from_memory.denials.clear()
        redis_client.flushall()
        assert admitted(check, 5) == 3

    def test_prefetched_permits_are_spent_and_the_rest_is_given_back(self, check: Check, settings: Any) -> None:
        settings.RATELIMITS = {**settings.RATELIMITS, "PREFETCH_SECONDS": 600}
        rule("ahead", "fixed_window", capacity=100, period=700_000_000, prefetch=50)
        decisions = [check(WHO).decision for _ in range(12)]
        assert sum(type(decision) is not Decision for decision in decisions) == 11
        spending.send_and_give_back(everything=True)
        assert admitted(check, 200) == 100 - 12

    def test_requests_of_entry_points_are_not_recorded(self, settings: Any) -> None:
        settings.RATELIMITS = {**settings.RATELIMITS, "RECORD_SAMPLE": 1}
        assert check_and_wait(WHO, "*", "GET", {"requests": 1}, RequestFactory().get("/")).allowed
        assert asyncio.run(acheck_and_wait(WHO, "*", "GET", {"requests": 1})).allowed


@pytest.mark.usefixtures("alone")
class TestReceipts:
    def test_a_request_is_refunded_once(self, check: Check, settle: Settle) -> None:
        rule(capacity=1, rate="0.000001")
        answer = check(WHO)
        settle(answer, {})
        with pytest.raises(AlreadySettled):
            settle(answer, {})
        assert admitted(check, 3) == 1

    @pytest.mark.parametrize("identity", [WHO, NOBODY], ids=["account", "address"])
    def test_a_request_without_rules_is_refunded_once(self, check: Check, settle: Settle, identity: Identity) -> None:
        answer = check(identity)
        decision = settle(answer, {})
        assert decision is not None
        assert decision.allowed
        with pytest.raises(AlreadySettled):
            settle(answer, {})

    def test_a_request_is_settled_at_its_true_costs_in_each_meter(self, check: Check, settle: Settle) -> None:
        rule("tokens", "fixed_window", capacity=100, period=700_000_000, meter="tokens", key_kind="global")
        rule("calls", "fixed_window", capacity=9, period=700_000_000, key_kind="global")
        answer = check(WHO, costs={"requests": 1, "tokens": 50})
        decision = settle(answer, {"tokens": 20})
        assert decision is not None
        assert [standing.remaining for standing in decision.standings] == [8, 80]
        with pytest.raises(ValueError, match="was not charged in words, only in requests, tokens"):
            settle(check(WHO, costs={"requests": 1, "tokens": 50}), {"words": 3})


def test_what_was_not_counted_is_not_counted_as_refunded_by_a_process_that_counts(redis_client: RawRedis) -> None:
    """The floor above was added meanwhile: an old process has decided the request, and a new one refunds it."""
    rule(capacity=2, rate="0.000001")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counting, "counts", False)
        receipt = checking.check(WHO).decision.receipt  # type: ignore[union-attr]
    assert isinstance(receipt, Receipt)
    rules.forget()
    assert checking.check(WHO).allowed
    before = counted(redis_client)
    assert list(before.values()) == [1]
    refund(receipt)
    assert counted(redis_client) == before
