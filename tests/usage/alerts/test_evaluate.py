from __future__ import annotations

import threading
from typing import Any

import pytest
from django.conf import settings
from django.db import connection
from django.test import override_settings

from ratelimits import engine
from ratelimits.models import Account, ConfigVersion, KeyOverride, Plan, PlanInclusion, Rule
from ratelimits.usage.alerts.evaluate import evaluate
from ratelimits.usage.models import Alert, AlertChannel, AlertDelivery
from tests.support import rows
from tests.support.usage.traffic import NOON, at, flow, use

pytestmark = pytest.mark.django_db(transaction=True)


def account(identifier: str = "acme", included: int | None = 100, **fields: Any) -> Account:
    plan = Plan.objects.create(name=identifier, slug=identifier)
    if included is not None:
        PlanInclusion.objects.create(plan=plan, meter="requests", quantity=included)
    return Account.objects.create(identifier=identifier, plan=plan, **fields)


def monthly(capacity: int = 100, **fields: Any) -> Rule:
    return rows.rule("monthly", "calendar_window", capacity=capacity, bills=True, **fields)


def spend(cost: int, rule: Rule | int = 0, **about: Any) -> None:
    """Add usage to the ledger and its totals."""
    pk = rule.pk if isinstance(rule, Rule) else rule
    use(cost=cost, rule=pk, configuration=ConfigVersion.read("default")[0], **about)
    flow()


def raised(now: int = NOON) -> list[tuple[str, int, int, int]]:
    return [(alert.account, alert.threshold, alert.used, alert.quantity) for alert in evaluate(now)]


def test_each_threshold_of_what_the_plan_includes_is_reached_once() -> None:
    account()
    spend(49)
    assert raised() == []
    spend(1)
    assert raised() == [("acme", 50, 50, 100)]
    assert raised() == []
    spend(35)
    assert raised() == [("acme", 80, 85, 100)]
    spend(14)
    assert raised() == []
    spend(200)
    assert raised() == [("acme", 100, 299, 100)]
    spend(200)
    assert raised() == []


def test_a_leap_over_all_thresholds_raises_each() -> None:
    account()
    spend(1000)
    assert [threshold for _account, threshold, _used, _quantity in raised()] == [50, 80, 100]


def test_the_next_period_begins_anew() -> None:
    account()
    spend(50)
    assert raised() == [("acme", 50, 50, 100)]
    december = at("2026-12-01T00:00")
    spend(60, now=december)
    assert raised(december) == [("acme", 50, 60, 100)]
    first, second = Alert.objects.order_by("period")
    assert (first.period_end, second.period_end) == (second.period, at("2027-01-01T00:00") // 1_000_000)


def test_what_was_given_back_does_not_count() -> None:
    account()
    receipt = use(cost=80, configuration=ConfigVersion.read("default")[0]).receipt
    assert receipt is not None
    engine.refund(receipt)
    flow()
    assert raised() == []


def test_every_account_has_alerts_of_its_own_and_usage_without_account_has_none() -> None:
    account("acme")
    account("globex", included=1000)
    for name in ("acme", "globex", ""):
        spend(60, account=name, key="user:1")
    assert raised() == [("acme", 50, 60, 100)]


def test_an_account_without_plan_or_limit_has_no_alerts() -> None:
    spend(1_000_000)
    assert raised() == []


def test_the_limit_of_an_account_per_month_counts_where_no_plan_includes_anything() -> None:
    rule = monthly(key_kind="account")
    spend(50, rule, key="api_key:1")
    spend(35, rule, key="api_key:2")
    assert raised() == [("acme", 50, 85, 100), ("acme", 80, 85, 100)]
    alert = Alert.objects.first()
    assert alert is not None
    assert (alert.basis, alert.rule, alert.rule_name, alert.key) == ("limit", rule.pk, "monthly", "")


@pytest.mark.parametrize("kind", ["caller", "user"])
def test_the_keys_of_a_user_who_is_the_account_reach_its_limit_together(settings: Any, kind: str) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "ACCOUNT": None}
    rule = monthly(key_kind=kind)
    for key in ("api_key:1", "api_key:2"):
        spend(30, rule, account="42", key=key)
    assert raised() == [("42", 50, 60, 100)]
    assert [alert.key for alert in Alert.objects.all()] == ["user:42"]


def test_a_limit_per_key_is_reached_by_the_key_that_has_used_most_of_it() -> None:
    rule = monthly()
    KeyOverride.objects.create(key="api_key:3", rule="monthly", capacity=10)
    spend(40, rule, key="api_key:1")
    spend(45, rule, key="api_key:2")
    assert raised() == []
    spend(6, rule, key="api_key:2")
    assert raised() == [("acme", 50, 51, 100)]
    spend(9, rule, key="api_key:3")
    assert raised() == [("acme", 80, 9, 10)]
    assert set(Alert.objects.values_list("threshold", "key")) == {(50, "api_key:2"), (80, "api_key:3")}


@pytest.mark.parametrize(("promised", "used"), [(False, 100), (True, 60)])
def test_a_key_with_several_accounts_reaches_its_limit_by_all_of_them(settings: Any, promised: bool, used: int) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "ACCOUNT": lambda request: None, "ONE_ACCOUNT_PER_KEY": promised}
    rule = monthly(key_kind="user")
    spend(60, rule, account="acme", key="user:1")
    spend(40, rule, account="globex", key="user:1")
    spend(70, rule, account="globex", key="user:1", now=at("2026-10-15T00:00"))
    spend(30, rule, account="acme", key="user:2")
    # The other account has used less than any threshold itself, so it is told nothing.
    expected = [("acme", percent, used, 100) for percent in (50, 80, 100) if percent <= used]
    assert raised() == expected
    assert {alert.key for alert in Alert.objects.all()} == {"user:1"}


def test_a_user_who_is_one_of_its_accounts_reaches_its_limit_by_all_of_them(settings: Any) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "ACCOUNT": lambda request: None}
    rule = monthly(key_kind="user")
    spend(40, rule, account="user:1", key="user:1")
    spend(20, rule, account="user:1", key="api_key:7")
    spend(25, rule, account="acme", key="user:1")
    assert raised() == [("user:1", 50, 85, 100), ("user:1", 80, 85, 100)]


def test_a_limit_that_is_not_enforced_any_more_raises_no_alert() -> None:
    rule = monthly(key_kind="account")
    spend(60, rule)
    rule.mode = Rule.Mode.SHADOW
    rule.save()
    assert raised() == []


def test_an_override_changes_what_100_percent_is() -> None:
    rule = monthly(key_kind="account")
    KeyOverride.objects.create(key="account:acme", rule="monthly", capacity=1000)
    spend(60, rule)
    assert raised() == []
    KeyOverride.objects.all().delete()
    assert raised() == [("acme", 50, 60, 100)]


def test_of_included_quantity_and_limit_the_one_that_ends_first_counts() -> None:
    account(included=1000)
    rule = monthly(key_kind="account")
    spend(60, rule)
    assert raised() == [("acme", 50, 60, 100)]


def test_without_bills_alerts_are_about_the_limits_of_rules_alone(no_bills: None) -> None:
    account(included=50, timezone="Asia/Tokyo")
    rule = monthly(key_kind="account")
    spend(60, rule)
    spend(1000, meter="tokens")
    assert raised() == [("acme", 50, 60, 100)]
    assert Alert.objects.get().basis == "limit"


def test_a_limit_per_minute_or_of_another_month_is_no_quantity_of_a_billing_period() -> None:
    burst = rows.rule("burst", "token_bucket", key_kind="account", bills=True)
    spend(60, burst)
    mid_month = monthly(key_kind="account", meter="tokens", anchor="2026-01-15T00:00")
    spend(60, mid_month, meter="tokens")
    assert raised() == []


def test_a_limit_in_another_time_zone_than_the_account_is_the_same_month() -> None:
    Account.objects.create(identifier="acme", timezone="Asia/Tokyo")
    rule = monthly(key_kind="account")
    spend(60, rule)
    assert raised() == [("acme", 50, 60, 100)]


@pytest.mark.parametrize("kind", ["account", "caller"])
@pytest.mark.parametrize(
    ("terms", "day"),
    [
        ({"billing_anchor": "2026-01-10T00:00"}, "2026-12-05T00:00"),
        ({"timezone": "Asia/Tokyo"}, "2026-11-30T14:00"),
        ({"timezone": "Asia/Tokyo", "billing_anchor": "2026-01-31T06:00"}, "2026-11-29T00:00"),
    ],
)
def test_a_limit_on_the_billing_period_raises_alerts_in_the_accounts_own_period(
    settings: Any, terms: dict[str, str], day: str, kind: str
) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "ACCOUNT": None}
    Account.objects.create(identifier="42", **terms)
    rule = monthly(key_kind=kind, calendar_unit="billing_period")
    spend(60, rule, account="42", key="user:42")
    assert raised() == [("42", 50, 60, 100)]
    spend(40, rule, account="42", key="user:42", now=at(day))
    assert raised(at(day)) == [("42", 80, 100, 100), ("42", 100, 100, 100)]
    assert len(set(Alert.objects.values_list("period", "period_end"))) == 1
    later = at("2027-01-20T00:00")
    spend(50, rule, account="42", key="user:42", now=later)
    assert raised(later) == [("42", 50, 50, 100)]


def test_a_limit_on_the_billing_period_raises_alerts_in_a_period_that_an_edit_has_shortened() -> None:
    owner = Account.objects.create(identifier="acme")
    rule = monthly(key_kind="account", calendar_unit="billing_period")
    spend(10, rule)
    owner.billing_anchor = "2026-01-10T00:00"
    owner.save()
    now = at("2026-12-05T00:00")
    spend(60, rule, now=now)
    assert raised(now) == [("acme", 50, 60, 100)]
    alert = Alert.objects.get()
    assert (alert.period, alert.period_end) == tuple(at(f"2026-12-{day}T00:00") // 1_000_000 for day in ("01", "10"))


def test_a_smaller_plan_raises_what_is_reached_by_it_and_repeats_nothing() -> None:
    owner = account(included=1000)
    spend(500)
    assert raised() == [("acme", 50, 500, 1000)]
    small = account("other", included=600)
    owner.plan = small.plan
    owner.save()
    assert raised() == [("acme", 80, 500, 600)]
    assert raised() == []


def test_a_larger_plan_in_mid_period_has_each_threshold_said_of_it() -> None:
    owner = account(included=100)
    spend(100)
    assert raised() == [("acme", 50, 100, 100), ("acme", 80, 100, 100), ("acme", 100, 100, 100)]
    owner.plan = account("larger", included=1000).plan
    owner.save()
    assert raised() == []
    spend(400)
    assert raised() == [("acme", 50, 500, 1000)]
    owner.plan = account("smaller", included=600).plan
    owner.save()
    assert raised() == [("acme", 80, 500, 600)]
    assert raised() == []


def test_a_limit_that_was_raised_is_reached_again() -> None:
    rule = monthly(key_kind="account")
    spend(60, rule)
    assert raised() == [("acme", 50, 60, 100)]
    rule.capacity = 200
    rule.save()
    spend(41, rule)
    assert raised() == [("acme", 50, 101, 200)]
    assert raised() == []


def test_what_a_plan_includes_is_no_rule_s_and_a_limit_names_its_own() -> None:
    account()
    web, batch = monthly(30, key_kind="account"), rows.rule("batch", bills=True)
    spend(20, batch)
    spend(20, web)
    spend(20, batch)
    evaluate(NOON)
    alerts = Alert.objects.values_list("basis", "threshold", "quantity", "rule", "rule_name", "used")
    assert set(alerts) == {("included", 50, 100, 0, "", 60), ("limit", 50, 30, web.pk, "monthly", 20)}


def test_a_plan_s_quantity_is_said_to_be_reached_once_for_all_its_rules() -> None:
    account()
    web, batch = monthly(100_000, key_kind="account"), rows.rule("batch", bills=True)
    spend(30, web)
    spend(30, batch)
    assert raised() == [("acme", 50, 60, 100)]
    spend(1, web)
    assert raised() == []


def test_other_thresholds_hold_from_the_next_look() -> None:
    account()
    spend(60)
    with override_settings(RATELIMITS={**settings.RATELIMITS, "ALERT_THRESHOLDS": [150, 25]}):
        assert raised() == [("acme", 25, 60, 100)]
    with override_settings(RATELIMITS={**settings.RATELIMITS, "ALERT_THRESHOLDS": []}):
        assert raised() == []
    assert raised() == [("acme", 50, 60, 100)]


def test_periods_that_were_over_before_the_first_look_are_left_alone_and_later_ones_are_not() -> None:
    account()
    spend(60, now=at("2026-10-31T23:00"))
    assert raised() == []
    spend(60, now=at("2026-11-30T23:59"))
    assert raised(at("2026-12-03T00:00")) == [("acme", 50, 60, 100)]


def test_an_alert_has_a_delivery_for_every_way() -> None:
    owner = account()
    AlertChannel.objects.create(account=owner, email="a@example.com", webhook_url="https://example.com/a")
    AlertChannel.objects.create(account=owner, email="b@example.com")
    AlertChannel.objects.create(account=owner, email="c@example.com", active=False)
    AlertChannel.objects.create(account=account("other"), email="d@example.com")
    spend(60)
    evaluate(NOON)
    made = AlertDelivery.objects.values_list("kind", "channel__email")
    assert set(made) == {
        ("signal", None),
        ("email", "a@example.com"),
        ("webhook", "a@example.com"),
        ("email", "b@example.com"),
    }


def test_many_looks_at_once_raise_each_alert_once() -> None:
    for number in range(20):
        account(f"a{number}")
        use(f"a{number}", cost=90, configuration=ConfigVersion.read("default")[0])
    flow()
    together = threading.Barrier(4)
    found: list[Alert] = []

    def look() -> None:
        together.wait()
        try:
            found.extend(evaluate(NOON))
        finally:
            connection.close()

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == Alert.objects.count() == AlertDelivery.objects.count() == 40


def test_who_is_blocked_is_told_nothing_and_does_not_hide_the_next_smallest_limit() -> None:
    account(included=None)
    rule = monthly(100)
    for key, capacity in (("api_key:1", 0), ("api_key:2", 10)):
        KeyOverride.objects.create(key=key, rule="monthly", capacity=capacity)
    spend(5, rule, key="api_key:1")
    spend(5, rule, key="api_key:2")
    assert raised() == [("acme", 50, 5, 10)]
    Rule.objects.update(capacity=0)
    spend(5, rule, key="api_key:3")
    assert raised() == []
