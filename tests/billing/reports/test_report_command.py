from __future__ import annotations

import csv
import io

import pytest
from django.core.management import CommandError, call_command

from ratelimits.billing.reports.rows import COLUMNS
from ratelimits.models import Account, Plan, PlanInclusion, Rule
from ratelimits.usage.ledger.drain import drain
from ratelimits.usage.ledger.seal import seal
from tests.support.reports.invoices import token
from tests.support.usage.traffic import use

pytestmark = pytest.mark.django_db(transaction=True)


def report(**options: str) -> list[dict[str, str]]:
    out = io.StringIO()
    call_command("ratelimits_report", period="2026-11", format="csv", stdout=out, **options)
    reader = csv.DictReader(io.StringIO(out.getvalue()))
    assert tuple(reader.fieldnames or ()) == COLUMNS
    return list(reader)


@pytest.mark.parametrize("asked", ["x user:5", "=x%20user:5"])
def test_an_account_is_found_by_its_text_and_by_its_name(asked: str) -> None:
    use("=x%20user:5")
    use("other")
    seal()
    drain()
    out = io.StringIO()
    call_command("ratelimits_report", "--period=2026-11", "--format=csv", f"--account={asked}", stdout=out)
    assert [row["account"] for row in csv.DictReader(io.StringIO(out.getvalue()))] == ["'=x%20user:5"]


def test_a_report_says_what_was_used_refused_and_included() -> None:
    plan = Plan.objects.create(name="Pro", slug="pro")
    PlanInclusion.objects.create(plan=plan, meter="requests", quantity=5)
    Account.objects.create(identifier="acme", plan=plan)
    rule = Rule.objects.create(name="monthly", algorithm="token_bucket", capacity=8, rate=1, period=3600, bills=True)
    for _ in range(10):
        use(capacity=8, rule=rule.pk, version=rule.version)
    use("other", "user:7", rule=0, version=rule.version)
    seal()
    drain()
    first, second = report()
    assert first == {
        "report_id": f"{token()}.20261101T000000Z",
        "report_version": "0",
        "status": "provisional",
        "line_id": first["line_id"],
        "account": "acme",
        "key": "api_key:1",
        "meter": "requests",
        "unit": "requests",
        "charge_category": "usage",
        "charge_class": "",
        "corrects_line_id": "",
        "billing_period_start": "2026-11-01T00:00:00Z",
        "billing_period_end": "2026-12-01T00:00:00Z",
        "charge_period_start": "2026-11-21T12:00:00Z",
        "charge_period_end": "2026-11-21T12:15:00Z",
        "timezone": "UTC",
        "consumed_quantity": "8",
        "included_quantity": "5",
        "overage_quantity": "3",
        "refunded_quantity": "0",
        "admitted_count": "8",
        "denied_count": "2",
        "unknown_count": "0",
        "limit": "8",
        "rule": "monthly",
        "rule_version": str(rule.version),
        "plan": "pro",
        "batch_range": first["batch_range"],
        "durability_gap": "",
    }
    assert (second["account"], second["key"], second["rule"], second["plan"]) == ("other", "user:7", "", "")
    assert report(account="other") == [second]


def test_usage_that_is_not_in_the_ledger_is_not_in_the_report() -> None:
    use()
    assert report() == []


def test_what_is_no_month_is_refused() -> None:
    with pytest.raises(CommandError, match="write it like 2026-11"):
        call_command("ratelimits_report", period="November", format="csv")
