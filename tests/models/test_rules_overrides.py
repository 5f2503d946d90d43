from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.db import IntegrityError

from ratelimits.models import Account, KeyOverride, Plan, PlanMembership
from tests.rows import rule

pytestmark = pytest.mark.django_db

JANUARY, FEBRUARY, MARCH = (datetime(2026, month, 1, tzinfo=UTC) for month in (1, 2, 3))


def override(key: str = "user:1", rule: str = "burst", **fields: Any) -> KeyOverride:
    row = KeyOverride(key=key, rule=rule, **fields)
    row.full_clean()
    row.save()
    return row


def refused(key: str = "user:1", rule: str = "burst", **fields: Any) -> dict[str, list[str]]:
    with pytest.raises(ValidationError) as caught:
        override(key, rule, **fields)
    messages: dict[str, list[str]] = caught.value.message_dict
    return messages


def test_numbers_or_the_mode_can_differ() -> None:
    rule()
    override(capacity=1000, rate=500)
    override("api_key:9f3c", mode="off")


def test_an_override_that_changes_nothing_is_refused() -> None:
    rule()
    assert refused() == {"__all__": ["It changes nothing: give a capacity, rate, period or mode."]}


def test_a_rule_that_is_not_there_is_refused_with_those_that_are() -> None:
    rule("burst")
    rule("monthly", "calendar_window")
    assert refused(rule="dayly", capacity=1) == {"rule": ["No rule has this name; there are: burst, monthly."]}


def test_a_number_that_the_algorithm_has_not_is_refused() -> None:
    rule(algorithm="fixed_window")
    assert refused(rate=5) == {"rate": ["rate means nothing to burst, a fixed window."]}


def test_a_number_that_makes_no_sense_is_refused() -> None:
    rule()
    assert refused(rate=0) == {"rate": ["rate must be above 0, not 0."]}


def test_it_must_fit_the_rule_in_every_plan() -> None:
    rule()
    rule("burst", "fixed_window", plan=Plan.objects.create(name="Pro", slug="pro"))
    assert refused(rate=5) == {"rate": ["rate means nothing to burst (Pro), a fixed window."]}


@pytest.mark.parametrize(
    ("counted", "key"),
    [
        ("account", "user:1"),
        ("account", "api_key:1"),
        ("global", "account:7"),
        ("ip", "account:7"),
        ("user", "api_key:1"),
    ],
)
def test_numbers_of_a_count_that_is_shared_with_others_cannot_differ(counted: str, key: str) -> None:
    rule(key_kind=counted)
    assert "which others share" in refused(key, capacity=5)["__all__"][0]
    override(key, mode="off")


@pytest.mark.parametrize(
    ("counted", "key"),
    [
        ("account", "account:7"),
        ("user", "account:7"),
        ("api_key", "user:1"),
        ("key", "account:7"),
        ("key", "ip:203.0.113.9"),
        ("ip", "ip:203.0.113.9"),
    ],
)
def test_a_key_may_override_what_is_counted_under_it_alone(counted: str, key: str) -> None:
    rule(key_kind=counted)
    override(key, capacity=5)


def test_two_overrides_of_one_key_and_rule_must_not_meet() -> None:
    rule()
    first = override(capacity=5, valid_until=FEBRUARY)
    override(capacity=6, valid_from=FEBRUARY, valid_until=MARCH)
    meets = {"valid_from": [f"Override {first.pk} holds for the same key and rule at that time: end it first."]}
    assert refused(capacity=7, valid_from=JANUARY, valid_until=FEBRUARY) == meets
    assert refused(capacity=7) == meets
    override("user:2", capacity=7)


def test_a_period_that_ends_before_it_starts_is_refused() -> None:
    rule()
    assert "ends before it starts" in refused(capacity=5, valid_from=MARCH, valid_until=FEBRUARY)["valid_until"][0]
    with pytest.raises(IntegrityError):
        KeyOverride.objects.create(key="user:1", rule="burst", capacity=5, valid_from=MARCH, valid_until=FEBRUARY)


def test_a_rule_cannot_be_edited_into_what_its_overrides_do_not_fit() -> None:
    row = rule()
    override(rate=50)
    row.algorithm = "fixed_window"
    with pytest.raises(ValidationError) as caught:
        row.full_clean()
    assert caught.value.message_dict == {
        "algorithm": [
            (
                "An override of this rule (rate 50) would no longer fit: "
                "rate means nothing to burst, a fixed window. Change it first."
            )
        ]
    }


class TestMembership:
    def test_an_account_has_its_plan_on_itself(self) -> None:
        with pytest.raises(ValidationError, match="choose the plan on the account"):
            PlanMembership(key="account:7", plan=Plan.objects.create(name="Pro", slug="pro")).full_clean()

    def test_a_key_is_on_one_plan(self) -> None:
        plan = Plan.objects.create(name="Pro", slug="pro")
        PlanMembership.objects.create(key="user:1", plan=plan)
        with pytest.raises(ValidationError, match="already exists"):
            PlanMembership(key="user:1", plan=plan).full_clean()


class TestAccount:
    def test_an_unknown_time_zone_is_refused(self) -> None:
        with pytest.raises(ValidationError) as caught:
            Account(identifier="7", timezone="Mars/Olympus").full_clean()
        assert caught.value.message_dict == {
            "timezone": ["unknown time zone 'Mars/Olympus': use an IANA name such as 'UTC' or 'Europe/Paris'"]
        }

    def test_a_billing_anchor_is_a_local_moment(self) -> None:
        Account(identifier="7", timezone="Europe/Paris", billing_anchor="2026-01-31T06:00").full_clean()
        with pytest.raises(ValidationError) as caught:
            Account(identifier="7", billing_anchor="2026-01-31T06:00+01:00").full_clean()
        assert "without one" in caught.value.message_dict["billing_anchor"][0]
