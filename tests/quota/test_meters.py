"""Test which meters a cost may name, and that clients who name meters fill no memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from ratelimits import rules
from ratelimits.answers.answer import Answer
from ratelimits.billing.models import PlanPrice
from ratelimits.engine import call
from ratelimits.identity import Identity
from ratelimits.models import Access, Plan, PlanInclusion, Rule
from ratelimits.outbound import permits
from ratelimits.quota import checking, costs, from_memory, prepared
from ratelimits.quota.costs import MAX_FURTHER, WrongCost
from ratelimits.rules import RulesUnavailable
from ratelimits.usage.counting import access, process_totals
from tests.support.entry_points import Clock, begin_afresh, counted
from tests.support.raw import RawRedis
from tests.support.rows import rule

pytestmark = pytest.mark.django_db(transaction=True)

WHO = Identity("user:1", "api_key:9", "account:acme", "ip:203.0.113.9")
Check = Callable[..., Answer]
NOT_DECLARED = "^the meter 'typo' is not known: add it to RATELIMITS\\['METERS'\\], or make a rule for it$"
TOO_MANY = f"is not known, and this process has already accepted {MAX_FURTHER} other meters .*RATELIMITS\\['METERS'\\]$"


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    access.clear()
    return begin_afresh(monkeypatch)


def declare(settings: Any, *names: str) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "METERS": list(names)}


def fill(check: Check) -> None:
    """Use up the places for further meters."""
    for number in range(MAX_FURTHER):
        assert check(WHO, costs={f"model-{number}": 1}).allowed


class TestDeclared:
    def test_a_meter_that_is_neither_declared_nor_limited_is_refused(
        self, check: Check, settings: Any, redis_client: RawRedis
    ) -> None:
        declare(settings, "tokens")
        rule("pages", meter="pages")
        assert check(WHO, costs={"requests": 1, "tokens": 5, "pages": 1}).allowed
        before = counted(redis_client)
        with pytest.raises(WrongCost, match=NOT_DECLARED):
            check(WHO, costs={"requests": 1, "typo": 1})
        assert counted(redis_client) == before
        assert check(WHO).allowed

    def test_a_rule_that_another_process_made_is_found_at_once(self, check: Check, settings: Any) -> None:
        declare(settings)
        assert check(WHO).allowed
        known = rules.current()
        rule("typo", meter="typo", capacity=1, rate="0.001")
        assert rules.current() is known
        assert [check(WHO, costs={"typo": 1}).allowed for _ in range(2)] == [True, False]

    def test_when_its_rule_goes_the_meter_is_not_known_any_more(self, check: Check, settings: Any) -> None:
        declare(settings)
        rule("typo", meter="typo")
        assert check(WHO, costs={"typo": 1}).allowed
        Rule.objects.all().delete()
        assert check(WHO).allowed  # so that this process reads the rules again
        with pytest.raises(WrongCost, match=NOT_DECLARED):
            check(WHO, costs={"typo": 1})

    def test_a_price_declares_no_meter(self, check: Check, settings: Any) -> None:
        declare(settings, "tokens")
        PlanInclusion.objects.create(plan=Plan.objects.create(slug="pro", name="Pro"), meter="typo", quantity=1)
        with pytest.raises(WrongCost, match=NOT_DECLARED):
            check(WHO, costs={"typo": 1})

    def test_a_blocked_request_may_not_name_it_either(self, check: Check, settings: Any) -> None:
        declare(settings, "tokens")
        Access.objects.create(target="account:acme", reason="abuse")
        assert not check(WHO).allowed
        with pytest.raises(WrongCost, match=NOT_DECLARED):
            check(WHO, costs={"typo": 1})

    def test_outbound_calls_name_the_call(self, settings: Any) -> None:
        declare(settings, "tokens")
        rule("mails", scope="mailer-api")

        async def call() -> None:
            async with permits("mailer-api", {"typo": 1}):
                pass

        with pytest.raises(WrongCost, match=r"^mailer-api: the meter 'typo' is not known"):
            asyncio.run(call())
        with pytest.raises(WrongCost, match=r"^mailer-api: the meter"), permits("mailer-api", {"typo": 1}):
            pass
        with permits("mailer-api", {"tokens": 1, "requests": 1}):
            pass


class TestNotDeclared:
    @pytest.mark.parametrize("meter", ["gpt-4.1", "a b", "tokens\n", "größe", "x:y"])
    def test_a_meter_that_no_rule_and_no_price_can_name_is_refused(
        self, check: Check, redis_client: RawRedis, meter: str
    ) -> None:
        with pytest.raises(WrongCost, match="so that rules and prices can name it"):
            check(WHO, costs={"requests": 1, meter: 1})
        assert not counted(redis_client)

    def test_some_further_meters_are_counted_and_then_no_more(self, check: Check, redis_client: RawRedis) -> None:
        fill(check)
        assert len(counted(redis_client)) == MAX_FURTHER
        with pytest.raises(WrongCost, match=TOO_MANY):
            check(WHO, costs={"one-more": 1})
        assert len(counted(redis_client)) == MAX_FURTHER
        assert check(WHO, costs={"model-0": 3, "model-31": 1, "requests": 1}).allowed

    def test_meters_of_rules_plans_and_units_need_no_place(self, check: Check, settings: Any) -> None:
        settings.RATELIMITS = {**settings.RATELIMITS, "UNITS": {"traffic": "MB"}}
        plan = Plan.objects.create(slug="pro", name="Pro", currency="EUR")
        PlanInclusion.objects.create(plan=plan, meter="included", quantity=1)
        PlanPrice.objects.create(plan=plan, meter="priced", unit_price=1)
        rule("pages", meter="pages", mode="off")
        fill(check)
        assert check(WHO, costs=dict.fromkeys(("traffic", "included", "priced", "pages", "requests"), 1)).allowed
        with pytest.raises(WrongCost, match=TOO_MANY):
            check(WHO, costs={"pages": 1, "one-more": 1})

    def test_a_refused_request_takes_no_place(self, check: Check) -> None:
        for number in range(MAX_FURTHER - 1):
            check(WHO, costs={f"model-{number}": 1})
        with pytest.raises(WrongCost, match=TOO_MANY):
            check(WHO, costs={"a": 1, "b": 1})
        assert check(WHO, costs={"b": 1}).allowed

    def test_a_rule_for_a_further_meter_gives_its_place_back(self, check: Check) -> None:
        fill(check)
        rule("first", meter="model-0")
        assert [check(WHO, costs={name: 1}).allowed for name in ("model-0", "one-more")] == [True, True]
        assert len(costs._further) <= MAX_FURTHER

    def test_every_entry_point_shares_the_places(self, check: Check) -> None:
        fill(check)
        rule("mails", scope="mailer-api")
        with pytest.raises(WrongCost, match=f"^mailer-api: .*{TOO_MANY}"), permits("mailer-api", {"one-more": 1}):
            pass

    def test_while_no_rules_can_be_read_the_bound_holds_too(
        self, check: Check, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_args: object) -> None:
            raise RulesUnavailable("the database is away")

        rules.forget()
        monkeypatch.setattr(rules._loader, "_query", fail)
        fill(check)
        with pytest.raises(WrongCost, match=TOO_MANY):
            check(WHO, costs={"one-more": 1})
        assert {total.meter for total in process_totals.totals()} == {f"model-{n}" for n in range(MAX_FURTHER)}


class TestMemory:
    """Clients that name meters, and combinations of meters, fill no memory."""

    def test_thousands_of_names_are_refused_and_kept_nowhere(self, check: Check) -> None:
        rule("burst", capacity=10**6)
        number_of = 3000 if check is checking.check else 100
        each = 4
        refused = 0
        for number in range(number_of):
            try:
                check(WHO, costs={f"name-{number}-{meter}": 1 for meter in range(each)})
            except WrongCost:
                refused += 1
        assert refused == number_of - MAX_FURTHER // each
        assert len(costs._further) == MAX_FURTHER
        assert len(prepared._commands.by_key) <= MAX_FURTHER // each
        assert len({total.meter for total in process_totals.totals()}) == MAX_FURTHER

    def test_combinations_of_known_meters_fill_no_cache(
        self, monkeypatch: pytest.MonkeyPatch, redis_client: RawRedis
    ) -> None:
        monkeypatch.setattr(prepared, "MAX_COMMANDS", 200)
        monkeypatch.setattr(from_memory.denials, "_waiting", type(from_memory.denials._waiting)())
        rule("burst", capacity=0)
        for number in range(2000):
            names = [f"m{bit}" for bit in range(11) if number >> bit & 1]
            checking.check(WHO, costs={"requests": 1, **dict.fromkeys(names, 1)})
        commands = prepared._commands
        assert sum(len(ready.costs) for ready in commands.by_key.values()) <= 200
        selection = rules.current().select("*", "", WHO)
        assert len(selection.cache) <= prepared.MAX_METER_COMBINATIONS
        assert call._meter_texts.cache_info().currsize <= 1024
        from_memory.sender.flush()
        assert sum(counted(redis_client).values()) >= 2000
