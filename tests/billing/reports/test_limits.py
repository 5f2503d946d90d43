from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from ratelimits.billing.reports.statements import rows, statements
from ratelimits.billing.reports.verify.report import verify_report
from ratelimits.models import KeyOverride, Rule
from tests.support.reports.invoices import account, close, spend
from tests.support.rows import rule
from tests.support.usage.traffic import flow

pytestmark = pytest.mark.django_db(transaction=True)


def monthly(**fields: Any) -> Rule:
    return rule("monthly", bills=True, capacity=100, **{"key_kind": "api_key", **fields})


def override(key: str, capacity: int | None = 500, **fields: Any) -> KeyOverride:
    return KeyOverride.objects.create(key=key, rule="monthly", capacity=capacity, **fields)


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def limits() -> list[str]:
    """Return the limits of October's lines, which must be the same when provisional and when finalised."""
    flow()
    provisional = [row.limit for row in rows(statements("2026-10"))]
    reports = close("2026-11-02")
    final = [row.limit for row in rows(statements("2026-10"))]
    assert provisional == final
    assert [finding for report in reports for finding in verify_report(report)] == []
    return final


def test_a_key_with_an_override_has_its_limit_and_others_the_rule_s() -> None:
    counted, acme = monthly(), account()
    mine = override("api_key:1")
    spend(acme, "2026-10-15", rule=counted.pk, version=mine.version)
    spend(acme, "2026-10-15", key="api_key:2", rule=counted.pk, version=counted.version)
    assert limits() == ["500", "100"]


def test_a_key_s_own_override_goes_before_its_account_s_number_by_number() -> None:
    counted, acme = rule("monthly", bills=True, capacity=100, rate=1, period=1), account()
    override("account:acme", 200)
    mine = KeyOverride.objects.create(key="api_key:1", rule="monthly", rate=7)
    spend(acme, "2026-10-15", rule=counted.pk, version=mine.version)
    assert limits() == ["200"]


@pytest.mark.parametrize(
    ("key_kind", "limit"), [("account", "100"), ("api_key", "500"), ("caller", ""), ("global", "100")]
)
def test_a_count_that_is_not_the_override_s_own_keeps_the_rule_s_limit(key_kind: str, limit: str) -> None:
    counted, acme = monthly(key_kind=key_kind), account()
    mine = override("api_key:1")
    spend(acme, "2026-10-15", rule=counted.pk, version=mine.version)
    assert limits() == [limit]


def test_an_api_key_that_is_the_account_was_counted_by_itself() -> None:
    counted, mine = monthly(key_kind="caller"), override("api_key:1")
    spend(account("api_key:1"), "2026-10-15", rule=counted.pk, version=mine.version)
    assert limits() == ["500"]


def test_each_version_of_an_override_is_a_line_with_its_limit() -> None:
    counted, acme = monthly(), account()
    mine = override("api_key:1")
    for capacity in (500, 600):
        mine.capacity = capacity
        mine.save()
        spend(acme, "2026-10-15", rule=counted.pk, version=mine.version)
    assert limits() == ["500", "600"]


def test_what_was_edited_or_deleted_since_still_has_the_limit_that_it_had() -> None:
    counted, acme = monthly(), account()
    mine = override("api_key:1")
    spend(acme, "2026-10-15", rule=counted.pk, version=mine.version)
    mine.delete()
    counted.capacity = 1
    counted.save()
    assert limits() == ["500"]


def test_a_limit_that_changed_within_the_line_is_not_told() -> None:
    counted, acme = monthly(), account()
    override("api_key:1", valid_until=at("2026-10-16"))
    counted.save()
    for day in ("2026-10-15", "2026-10-17"):
        spend(acme, day, rule=counted.pk, version=counted.version)
    assert limits() == [""]


@pytest.mark.parametrize(("day", "limit"), [("2026-10-15", "500"), ("2026-10-17", "100")])
def test_an_override_counts_while_it_was_in_force(day: str, limit: str) -> None:
    counted, acme = monthly(), account()
    override("api_key:1", valid_from=at("2026-10-14"), valid_until=at("2026-10-16"))
    counted.save()
    spend(acme, day, rule=counted.pk, version=counted.version)
    assert limits() == [limit]


def test_an_override_of_the_key_s_user_is_known_by_the_line_s_version() -> None:
    counted, acme = monthly(), account()
    users = override("user:5")
    spend(acme, "2026-10-15", rule=counted.pk, version=users.version)
    spend(acme, "2026-10-15", key="api_key:2", rule=counted.pk, version=counted.version)
    assert limits() == ["500", "100"]


def test_where_a_user_s_override_may_have_been_in_force_no_limit_is_told() -> None:
    counted, acme = monthly(), account()
    override("user:5")
    counted.save()
    spend(acme, "2026-10-15", rule=counted.pk, version=counted.version)
    assert limits() == [""]


def test_an_override_of_a_key_that_a_view_gives_is_known_by_the_line_s_version() -> None:
    counted, acme = monthly(key_kind="view_key"), account()
    tenants = override("header:X-Tenant=acme")
    spend(acme, "2026-10-15", rule=counted.pk, version=tenants.version)
    spend(acme, "2026-10-15", key="api_key:2", rule=counted.pk, version=counted.version)
    assert limits() == ["500", "100"]


def test_numbers_that_make_no_sense_for_the_rule_were_not_in_force() -> None:
    counted, acme = rule("monthly", bills=True, capacity=100), account()
    mine = KeyOverride.objects.create(key="api_key:1", rule="monthly", capacity=-3)
    spend(acme, "2026-10-15", rule=counted.pk, version=mine.version)
    assert limits() == ["100"]


def test_an_override_of_the_mode_alone_leaves_the_limit() -> None:
    counted, acme = monthly(), account()
    mine = override("api_key:1", None, mode="shadow")
    spend(acme, "2026-10-15", rule=counted.pk, version=mine.version)
    assert limits() == ["100"]


def test_limits_are_read_for_many_lines_at_once() -> None:
    counted, acme = monthly(), account()
    for number in range(30):
        mine = override(f"api_key:{number}", 1000 + number)
        spend(acme, "2026-10-15", key=f"api_key:{number}", rule=counted.pk, version=mine.version)
    flow()
    with CaptureQueriesContext(connection) as queries:
        found = [row.limit for row in rows(statements("2026-10"))]
    # One query asks whether there ever was an override; if there was none, no other query follows.
    assert sum("keyoverride" in query["sql"] for query in queries) <= 4
    assert sorted(found) == [str(1000 + number) for number in range(30)]
