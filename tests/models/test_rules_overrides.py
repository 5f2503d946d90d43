from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction
from django.utils import timezone

from ratelimits.models import Account, KeyOverride, Plan, PlanMembership
from ratelimits.models.keys import canonical_key, validate_key
from tests.support.rows import rule

pytestmark = pytest.mark.django_db

JANUARY, FEBRUARY, MARCH = (datetime(2126, month, 1, tzinfo=UTC) for month in (1, 2, 3))
LONG_AGO, AGO = datetime(2025, 1, 1, tzinfo=UTC), datetime(2025, 6, 1, tzinfo=UTC)


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
    override("api_key:93", mode="off")


def test_an_override_that_changes_nothing_is_refused() -> None:
    rule()
    assert refused() == {"__all__": ["The override changes nothing: give a capacity, rate, period or mode."]}


def test_a_rule_that_is_not_there_is_refused_with_those_that_are() -> None:
    rule("burst")
    rule("monthly", "calendar_window")
    assert refused(rule="dayly", capacity=1) == {"rule": ["No rule has this name. These rules exist: burst, monthly."]}


def test_a_number_that_the_algorithm_has_not_is_refused() -> None:
    rule(algorithm="fixed_window")
    assert refused(rate=5) == {"rate": ["rate cannot be changed, because burst is a fixed window, which has no rate."]}


def test_numbers_of_a_key_that_a_view_gives_are_only_for_rules_that_count_this_key() -> None:
    rule("tenant", key_kind="view_key", view_key="header:X-Tenant")
    rule("first", key_kind="view_key")
    rule("user", key_kind="user")
    for name in ("tenant", "first"):
        assert override("header:x-tenant= acme", name, capacity=1).key == "header:X-Tenant=acme"
    override("arg:pk=7", "user", mode="off")
    for name, words in (("tenant", "tenant counts per header:X-Tenant"), ("user", "user counts per user")):
        assert words in refused("arg:pk=7", name, capacity=1)["__all__"][0]


def test_two_spellings_of_one_key_cannot_have_two_overrides() -> None:
    rule("tenant", key_kind="view_key")
    override("arg:pk=7", "tenant", capacity=1)
    assert "is in force for the same key" in refused("arg:pk=+07", "tenant", capacity=2)["key"][0]
    KeyOverride.objects.filter(key="arg:pk=7").update(key="header:x_tenant=acme")
    with pytest.raises(IntegrityError), transaction.atomic():
        KeyOverride.objects.bulk_create([KeyOverride(key="header:X-TENANT=acme", rule="tenant", capacity=1)])


def test_a_number_that_makes_no_sense_is_refused() -> None:
    rule()
    assert refused(rate=0) == {"rate": ["rate must be above 0, not 0."]}


def test_it_must_fit_the_rule_in_every_plan() -> None:
    rule()
    rule("burst", "fixed_window", plan=Plan.objects.create(name="Pro", slug="pro"))
    message = "rate cannot be changed, because burst (Pro) is a fixed window, which has no rate."
    assert refused(rate=5) == {"rate": [message]}


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
    assert "other keys share the counter" in refused(key, capacity=5)["__all__"][0]
    override(key, mode="off")


@pytest.mark.parametrize(
    ("counted", "key"),
    [
        ("account", "account:7"),
        ("user", "account:7"),
        ("api_key", "user:1"),
        ("caller", "account:7"),
        ("caller", "ip:203.0.113.9"),
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
    pk = first.pk
    meets = {"key": [f"Override {pk} is in force for the same key and rule at the same time: end override {pk} first."]}
    assert refused(capacity=7, valid_from=JANUARY, valid_until=FEBRUARY) == meets
    assert refused(capacity=7) == meets
    override("user:2", capacity=7)


@pytest.mark.parametrize("valid_from", [None, LONG_AGO, timezone.now() + timedelta(hours=1)])
def test_an_override_that_has_ended_is_ignored(valid_from: datetime | None) -> None:
    rule()
    ended = override(capacity=5, valid_until=AGO)
    override(capacity=6, valid_from=valid_from)
    ended.reason = "kept for the records"
    ended.full_clean()
    assert "key" in refused(capacity=7, valid_from=MARCH)


def test_two_overrides_without_an_end_are_refused_by_the_database_too() -> None:
    override_of = {"key": "user:1", "rule": "burst", "capacity": 5}
    KeyOverride.objects.create(**override_of, valid_until=FEBRUARY)
    KeyOverride.objects.create(**override_of, valid_from=FEBRUARY)
    with pytest.raises(IntegrityError), transaction.atomic():
        KeyOverride.objects.bulk_create([KeyOverride(**override_of, valid_from=MARCH)])


def test_a_period_that_ends_before_it_starts_is_refused() -> None:
    rule()
    for end in (FEBRUARY, MARCH):
        (sentence,) = refused(capacity=5, valid_from=MARCH, valid_until=end)["valid_until"]
        assert "The end is not after the start" in sentence
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
                "An override of this rule (rate 50) would no longer be valid: "
                "rate cannot be changed, because burst is a fixed window, which has no rate. Change the override first."
            )
        ]
    }


class TestKeys:
    @pytest.mark.parametrize(
        "key",
        [
            *(
                "user:42",
                "user:3f0c9c1e-8a8e-4a57-a9ab-0c8a5d1f2b3c",
                "user:ann@example.com",
                "user:auth0|9f3c",
                "api_key:93",
            ),
            *("account:acme", "account:Acme, Inc.", "account:a:b", "ip:203.0.113.9", "ip:2001:db8::/64"),
            *("user:CN=Max Muster,OU=x", "api_key:a;b", "account:=x%20user:5", "user:=-", "account:=%0Ax"),
        ],
    )
    def test_one_key_of_a_kind_is_taken(self, key: str) -> None:
        validate_key(key)

    @pytest.mark.parametrize(
        "typed",
        [
            *("api_key:4, api_key:5", "api_key:4,api_key:5", "api_key:4;user:5", "api_key:4 api_key:5"),
            *("api_key:4\napi_key:5", "account:acme, account:other", "ip:203.0.113.9 ip:203.0.113.10"),
            *("user:4,5", "user:4 5", "account:x user:5", "account:team/user:5"),
        ],
    )
    def test_several_keys_in_one_field_are_refused(self, typed: str) -> None:
        with pytest.raises(ValidationError, match=r"These are 2 keys: .* here, and add a row for each"):
            validate_key(typed)

    @pytest.mark.parametrize(
        "typed",
        [
            *(
                "",
                "42",
                "user",
                "user:",
                "users:42",
                "User:42",
                "user: 42",
                "user:42 ",
            ),
            *("account: acme", "global:", "global", "key:4"),
        ],
    )
    def test_what_is_no_key_is_refused_with_how_one_looks(self, typed: str) -> None:
        with pytest.raises(ValidationError, match="write a kind, a colon and an id, such as user:42"):
            validate_key(typed)

    @pytest.mark.parametrize(
        ("typed", "wanted"),
        [
            *(("api_key:4\x00", "api_key:=4%00"), ("account:ac\nme", "account:=ac%0Ame"), ("user:~b8", "user:=~b8")),
            *(("account:-", "account:=-"), ("user:a  b", "user:=a %20b"), ("user:=a", "user:==a")),
            *(("user:user:5", "user:=user:5"), ("account:user:a\x85b", "account:user:=a%C2%85b")),
            *(("user:=%zz", "user:==%25zz"), ("user:=%ff", "user:==%25ff"), ("user:=", "user:==")),
            *(("user:shop.customer:~b8", "user:shop.customer:=~b8"), ("account:a\u200bb", "account:=a%E2%80%8Bb")),
        ],
    )
    def test_a_name_that_no_request_has_is_refused_with_the_one_that_it_has(self, typed: str, wanted: str) -> None:
        with pytest.raises(ValidationError) as refused:
            validate_key(typed)
        assert refused.value.messages[0].endswith(f": write {wanted}.")
        validate_key(wanted)
        assert canonical_key(typed) == canonical_key(wanted) == wanted

    def test_several_keys_are_one_name_in_its_own_spelling(self) -> None:
        for typed, one in (("account:x user:5", "account:=x%20user:5"), ("user:4,5", "user:=4,5")):
            with pytest.raises(ValidationError, match=f"If it is the name of one key, write {re.escape(one)}"):
                validate_key(typed)
            validate_key(one)


class TestMembership:
    def test_an_account_has_its_plan_on_itself(self) -> None:
        with pytest.raises(ValidationError, match="choose the plan on the page of the account"):
            PlanMembership(key="account:7", plan=Plan.objects.create(name="Pro", slug="pro")).full_clean()

    def test_a_key_is_on_one_plan_at_a_time(self) -> None:
        plan = Plan.objects.create(name="Pro", slug="pro")
        PlanMembership.objects.create(key="user:1", plan=plan, valid_from=FEBRUARY)
        for valid_until in (None, MARCH):
            with pytest.raises(ValidationError) as caught:
                PlanMembership(key="user:1", plan=plan, valid_until=valid_until).full_clean()
            assert caught.value.message_dict == {
                "key": ["At the same time this key is on the plan Pro: change or end that membership first."]
            }
        with pytest.raises(IntegrityError), transaction.atomic():
            PlanMembership.objects.create(key="user:1", plan=plan)

    def test_a_key_may_be_on_one_plan_after_another(self) -> None:
        plan = Plan.objects.create(name="Pro", slug="pro")
        for valid in ({"valid_until": AGO}, {"valid_until": FEBRUARY}, {"valid_from": FEBRUARY}):
            row = PlanMembership(key="user:1", plan=plan, **valid)
            row.full_clean()
            row.save()


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
        assert "without an offset" in caught.value.message_dict["billing_anchor"][0]
