from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis
from django.conf import settings
from django.test import Client, override_settings

from ratelimits.engine.program import MAX_LIMITS
from ratelimits.models import Account, Plan, PlanInclusion, Rule
from tests.support import rows
from tests.support.usage.traffic import flow

pytestmark = pytest.mark.django_db(transaction=True)


def quota(client: Client, **parameters: Any) -> dict[str, Any]:
    answer: dict[str, Any] = client.get("/usage/", parameters).json()["quota"]
    return answer


def call(client: Client, times: int = 1) -> None:
    for _ in range(times):
        assert client.get("/api/time/").status_code == 200


def test_what_the_plan_includes_and_how_much_is_left(customer: Callable[..., Client]) -> None:
    plan = Plan.objects.create(name="Pro", slug="pro")
    PlanInclusion.objects.create(plan=plan, meter="requests", quantity=2)
    PlanInclusion.objects.create(plan=plan, meter="tokens", quantity=500)
    client = customer(plan=plan)
    call(client, 3)
    flow()
    found = quota(client)
    assert (found["plan"], found["limits"]) == ("pro", [])
    assert found["included"] == [
        {"meter": "requests", "unit": "requests", "used": 3, "included": 2, "remaining": 0, "overage": 1},
        {"meter": "tokens", "unit": "tokens", "used": 0, "included": 500, "remaining": 500, "overage": 0},
    ]


def test_without_bills_it_says_what_was_used_and_that_nobody_knows_what_is_included(
    customer: Callable[..., Client], no_bills: None
) -> None:
    rows.rule("monthly", "calendar_window", capacity=10, key_kind="account", bills=True)
    plan = Plan.objects.create(name="Pro", slug="pro")
    PlanInclusion.objects.create(plan=plan, meter="requests", quantity=2)
    client = customer(plan=plan, timezone="Asia/Tokyo")
    call(client, 3)
    flow()
    answer = client.get("/usage/", {"window": "period"}).json()
    assert (answer["timezone"], answer["quota"]["plan"]) == ("Asia/Tokyo", "pro")
    assert answer["quota"]["included"] == [
        {"meter": "requests", "unit": "requests", "used": 3, "included": None, "remaining": None, "overage": None}
    ]
    assert [(one["rule"], one["remaining"]) for one in answer["quota"]["limits"]] == [("monthly", 7)]
    assert [one["admitted_units"] for one in answer["results"]] == [3]
    assert answer["results"][0]["start"] == answer["quota"]["period_start"]


def test_limits_that_bill_stand_as_they_are_now_not_as_the_ledger_has_them(customer: Callable[..., Client]) -> None:
    rows.rule("monthly", "calendar_window", capacity=10, key_kind="account", bills=True)
    rows.rule("per-key", "calendar_window", capacity=7, key_kind="api_key", bills=True, scope="time")
    rows.rule("burst", capacity=50)
    client, other = customer(), customer()
    call(client, 3)
    call(other)
    found = quota(client)["limits"]
    assert [(one["rule"], one["key"], one["limit"], one["remaining"]) for one in found] == [
        ("monthly", "account:acme", 10, 6),
        ("per-key", client.api_key.limit_key, 7, 4),  # type: ignore[attr-defined]
    ]
    assert all(0 < one["reset_after"] <= 31 * 86_400 for one in found)
    assert [one["remaining"] for one in quota(client)["limits"]] == [6, 4]


def test_staff_see_where_an_account_and_a_key_of_it_stand(customer: Callable[..., Client], staff: Client) -> None:
    rows.rule("monthly", "calendar_window", capacity=10, key_kind="account", bills=True)
    rows.rule("per-key", "calendar_window", capacity=7, key_kind="api_key", bills=True)
    client = customer()
    call(client, 3)
    (found,) = quota(staff, account="acme")["limits"]
    assert (found["rule"], found["remaining"]) == ("monthly", 7)
    key = client.api_key.limit_key  # type: ignore[attr-defined]
    assert [one["remaining"] for one in quota(staff, account="acme", key=key)["limits"]] == [7, 4]


def test_a_customer_that_names_another_key_sees_its_own_standing(customer: Callable[..., Client]) -> None:
    rows.rule("per-key", "calendar_window", capacity=7, key_kind="api_key", bills=True)
    client, other = customer("acme"), customer("globex")
    call(other, 5)
    theirs = other.api_key.limit_key  # type: ignore[attr-defined]
    assert [one["remaining"] for one in quota(client, key=theirs)["limits"]] == [7]


def test_looking_is_neither_charged_nor_billed(customer: Callable[..., Client]) -> None:
    rows.rule("monthly", "calendar_window", capacity=2, key_kind="account", bills=True)
    client = customer()
    for _ in range(5):
        response = client.get("/usage/")
        assert response.status_code == 200
        assert response.json()["quota"]["limits"][0]["remaining"] == 2
        assert "RateLimit" not in response
    assert flow().lines == 0


def test_rules_of_its_own_scope_throttle_it_and_still_nothing_is_billed(customer: Callable[..., Client]) -> None:
    rows.rule("looking", capacity=2, rate=1, period=3600, scope="usage", bills=True)
    client = customer()
    assert client.get("/usage/")["RateLimit"].startswith('"looking";r=1;')
    assert client.get("/usage/").status_code == 200
    refused = client.get("/usage/")
    assert refused.status_code == 429
    assert int(refused["Retry-After"]) > 3000
    assert refused["Cache-Control"] == "no-store, private"
    call(client)
    assert flow().lines == 1


def test_an_edit_of_a_rule_holds_at_once(customer: Callable[..., Client]) -> None:
    rule = rows.rule("monthly", "calendar_window", capacity=10, key_kind="account", bills=True)
    client = customer()
    assert quota(client)["limits"][0]["remaining"] == 10
    rule.capacity = 4
    rule.save()
    assert quota(client)["limits"][0]["remaining"] == 4
    Account.objects.filter(identifier="acme").update(timezone="Asia/Tokyo")
    assert quota(client)["limits"][0]["remaining"] == 4


def test_without_redis_the_ledger_still_answers(customer: Callable[..., Client]) -> None:
    rows.rule("monthly", "calendar_window", capacity=10, key_kind="account", bills=True)
    client = customer()
    call(client)
    flow()
    away = {**settings.CACHES, "ratelimits": {**settings.CACHES["ratelimits"], "LOCATION": "redis://127.0.0.1:1/0"}}
    with override_settings(CACHES=away):
        answer = client.get("/usage/").json()
    assert answer["quota"]["limits"] is None
    assert answer["results"][0]["admitted_units"] == 1


def test_a_fresh_server_is_no_error(customer: Callable[..., Client], redis_client: redis.Redis) -> None:
    rows.rule("monthly", "calendar_window", capacity=10, key_kind="account", bills=True)
    client = customer()
    redis_client.flushall()
    assert quota(client)["limits"][0]["remaining"] == 10


def test_rules_that_no_decision_can_follow_are_no_error_either(customer: Callable[..., Client]) -> None:
    rows.rule("closed", "calendar_window", capacity=0, key_kind="account", bills=True)
    client = customer()
    (found,) = quota(client)["limits"]
    assert (found["limit"], found["remaining"]) == (0, 0)
    Rule.objects.bulk_create(rows.unsaved(f"r{n}", scope="usage") for n in range(MAX_LIMITS + 1))
    assert client.get("/usage/").status_code == 200


def test_its_own_rules_hold_from_the_next_look_on_whatever_held_before(customer: Callable[..., Client]) -> None:
    client = customer()
    assert client.get("/usage/").status_code == 200
    rows.rule("looking", "calendar_window", capacity=1, scope="usage")
    assert [client.get("/usage/").status_code for _ in range(2)] == [200, 429]
    Rule.objects.bulk_create(rows.unsaved(f"r{n}", scope="usage") for n in range(MAX_LIMITS))
    assert client.get("/usage/").status_code == 429  # one rule too many: the last one is left out, by name
    for on_failure, capacity, status in (("allow", 5, 200), ("deny", 5, 503), ("local", 5, 200), ("local", 0, 429)):
        # Under the policy "allow", one request is charged. Otherwise, refusals give back what was charged before.
        Rule.objects.filter(name="looking").update(name="zz", capacity=1)
        Rule.objects.filter(name="r99").update(capacity=capacity)
        Rule.objects.filter(name="zz").update(on_failure=on_failure, capacity=capacity)
        assert client.get("/usage/").status_code == status, (on_failure, capacity)
        Rule.objects.filter(name="zz").update(name="looking", capacity=1, on_failure="allow")
    Rule.objects.filter(name="r0").delete()
    assert client.get("/usage/").status_code == 429
    Rule.objects.filter(name="looking").update(timezone="Mars/Olympus", on_failure="deny")
    assert client.get("/usage/").status_code == 503
