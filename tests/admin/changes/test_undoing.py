"""Test that to undo a change restores every value that the page lists, for each table and each of its fields."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from django.contrib.auth.models import Group
from django.test import Client

from ratelimits.admin.changes.rows import _HIDDEN
from ratelimits.algorithms.limits import ALGORITHMS, fields_of
from ratelimits.models import Access, Account, KeyOverride, Plan, PlanMembership, Rule
from ratelimits.models.fields.rule_fields import PARAMETERS
from ratelimits.models.versioned import versioned_models
from tests.admin.changes.test_changes import PARTS_OF_PLANS, undo_url
from tests.admin.test_rules import text
from tests.support.rows import NEEDED

pytestmark = pytest.mark.django_db

EARLY, LATE = datetime(2098, 1, 1, tzinfo=UTC), datetime(2099, 1, 1, 12, 30, 15, 123456, tzinfo=UTC)
#: Another value for each parameter of an algorithm. A rule with only the required fields has none of the optional ones.
OTHER_PARAMETERS: dict[str, Any] = {
    "capacity": 240,
    "rate": "7.125",
    "period": 120,
    "initial": "empty",
    "window_start": "first_hit",
    "calendar_unit": "day",
    "timezone": "Europe/Berlin",
    "anchor": "2026-01-31T06:00",
    "sub_windows": 5,
    "weighted": True,
    "delay_after": 2,
    "max_burst_seconds": 3,
    "warm_up": 4,
    "cold_factor": 2,
    "lease_ttl": 30,
}
#: A Plan of this slug is put in place of such a value.
PRO, FREE = "plan pro", "plan free"


def of_rule(
    algorithm: str, before: dict[str, Any], after: dict[str, Any]
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    base = {"name": "burst", "algorithm": algorithm, **NEEDED[algorithm], **before}
    return Rule, base, {**base, **after}


def cases() -> list[tuple[Any, dict[str, Any], dict[str, Any]]]:
    """Return for each case the table, the values of a row, and the row's values after a change."""
    found = [
        of_rule(
            name,
            {},
            {field: OTHER_PARAMETERS[field] for field in fields_of(name)}
            | ({"max_wait": "3.5"} if kind.may_wait else {}),
        )
        for name, kind in ALGORITHMS.items()
    ]
    found += [
        of_rule("token_bucket", {}, {"algorithm": "fixed_window", "rate": None, "period": 60}),
        of_rule("fixed_window", {"rate": 5}, {"rate": None}),  # `Rule.clean` would remove a rate that raw SQL wrote
        of_rule(
            "token_bucket",
            {},
            {"name": "other", "plan": PRO, "meter": "tokens", "scope": "search:POST", "mode": "shadow", "bills": True},
        ),
        of_rule(
            "token_bucket",
            {"plan": PRO},
            {"plan": FREE, "callers": "authenticated", "group": "staff", "on_failure": "deny"},
        ),
        of_rule(
            "token_bucket",
            {"key_kind": "ip"},
            {"key_kind": "caller", "ipv4_prefix": 24, "ipv6_prefix": 48, "except_scopes": "health, ready"},
        ),
        of_rule("token_bucket", {"key_kind": "view_key"}, {"view_key": "header:X-Tenant"}),
        of_rule("token_bucket", {}, {"refusal_status": 503, "refusal_text": "Come back later."}),
        of_rule("fixed_window", {}, {"prefetch": 20}),
        of_rule("calendar_window", {"key_kind": "user"}, {"start_from_ledger": True, "lasting": True}),
        (Plan, {"name": "Gold", "slug": "gold"}, {"name": "Silver", "slug": "silver", "currency": "EUR"}),
        (
            Account,
            {"identifier": "7"},
            {
                "name": "B",
                "timezone": "Asia/Tokyo",
                "billing_anchor": "2026-01-31T06:00",
                "plan": PRO,
                "next_plan": FREE,
                "next_plan_at": LATE,
            },
        ),
        (
            KeyOverride,
            {"key": "user:1", "rule": "base", "capacity": 5},
            {
                "key": "user:2",
                "rule": "base2",
                "capacity": 6,
                "rate": "2.5",
                "period": 30,
                "mode": "off",
                "valid_from": EARLY,
                "valid_until": LATE,
                "reason": "x",
            },
        ),
        (
            PlanMembership,
            {"key": "user:1", "plan": PRO},
            {"key": "user:2", "plan": FREE, "valid_from": EARLY, "valid_until": LATE},
        ),
        (
            Access,
            {"target": "user:1", "reason": "a"},
            {
                "target": "ip:203.0.113.0/24",
                "effect": "allow",
                "status": 429,
                "message": "m",
                "valid_from": EARLY,
                "valid_until": LATE,
                "reason": "b",
            },
        ),
    ]
    return found


CASES = cases()


def listed_fields(model: Any) -> set[str]:
    """Return the fields of a table that the pages of changes list."""
    return {field.name for field in model.history.model.tracked_fields} - _HIDDEN


def stored(row: Any) -> dict[str, Any]:
    """Return the listed values of a row, as the database has them."""
    values: dict[str, Any] = type(row).objects.filter(pk=row.pk).values(*sorted(listed_fields(type(row)))).get()
    return values


def with_plans(values: dict[str, Any]) -> dict[str, Any]:
    plans = {PRO: "pro", FREE: "free"}
    return {name: Plan.objects.get(slug=plans[value]) if value in plans else value for name, value in values.items()}


def test_the_cases_change_every_field_of_every_table() -> None:
    changed: dict[Any, set[str]] = {}
    for model, before, after in CASES:
        fields = {name for name in after if after[name] != before.get(name)}
        changed[model] = changed.get(model, set()) | fields
    assert changed.keys() == {*versioned_models()} - PARTS_OF_PLANS
    # The identifier of an account can only be moved: tests/admin/operate/test_moves.py.
    assert changed == {model: listed_fields(model) - {"identifier"} for model in changed}
    assert OTHER_PARAMETERS.keys() == PARAMETERS.keys()


@pytest.mark.parametrize(
    ("model", "before", "after"), CASES, ids=[f"{m.__name__}{n}" for n, (m, *_) in enumerate(CASES)]
)
def test_every_listed_value_is_restored(
    admin_client: Client, model: Any, before: dict[str, Any], after: dict[str, Any]
) -> None:
    Group.objects.create(name="staff")
    for slug in ("pro", "free"):
        Plan.objects.create(name=slug, slug=slug)
    for name in ("base", "base2"):
        Rule.objects.create(name=name, **NEEDED["token_bucket"])
    row = model.objects.create(**with_plans(before))
    first = stored(row)
    for name, value in with_plans(after).items():
        setattr(row, name, value)
    row.save()
    second = stored(row)
    assert {name for name in first if first[name] != second[name]} == {
        name for name in after if after[name] != before.get(name)
    }
    for expected, other in ((first, second), (second, first)):
        url = undo_url(row.history.latest())
        page = admin_client.get(url)
        rows = page.context["consequences"].rows
        assert len(rows) == sum(first[name] != second[name] for name in first), rows
        done = admin_client.post(url, {"_confirmed": "1"}, follow=True)
        assert "has its former values again" in text(done)
        assert stored(row) == expected != other
    pk = row.pk
    row.delete()
    assert admin_client.post(undo_url(model.history.filter(id=pk).latest()), {"_confirmed": "1"}).status_code == 302
    assert stored(model(pk=pk)) == second


def test_a_rule_whose_initial_value_was_filled_in_is_empty_again(admin_client: Client) -> None:
    row = Rule.objects.create(name="burst", **NEEDED["token_bucket"])
    Rule.objects.filter(pk=row.pk).update(initial="full")
    url = undo_url(row.history.latest())
    assert "initial full – " in text(admin_client.get(url))
    admin_client.post(url, {"_confirmed": "1"})
    row.refresh_from_db()
    assert row.initial == ""
    assert "initial: full → –" in text(admin_client.get("/admin/ratelimits/change/"))
