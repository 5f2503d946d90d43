"""Test accounts without usage on reports that ask for them."""

from __future__ import annotations

import io
import json

import pytest
from django.core.management import call_command
from jsonschema import Draft202012Validator

from ratelimits.billing.reports.exports import FORMATS
from ratelimits.billing.reports.exports.json import schema
from ratelimits.billing.reports.rows import PROVISIONAL, WHOLE_NUMBERS, Row
from ratelimits.billing.reports.statements import rows, statements
from ratelimits.models import Account
from ratelimits.usage.models import DurabilityGap
from tests.support.reports.invoices import account, close, spend
from tests.support.usage.traffic import at, flow

pytestmark = pytest.mark.django_db(transaction=True)


def november(*, name: str | None = None) -> list[Row]:
    return list(rows(statements("2026-11", account=name, all_accounts=True)))


def unused(found: list[Row]) -> list[str]:
    return [row.account for row in found if not row.meter]


def test_an_account_without_usage_has_one_line_of_zeros() -> None:
    account("idle", included=5, timezone="Europe/Berlin", billing_anchor="2026-01-15T00:00")
    (line,) = november()
    assert (line.account, line.status, line.plan, line.timezone) == ("idle", PROVISIONAL, "plan-idle", "Europe/Berlin")
    assert {getattr(line, name) for name in WHOLE_NUMBERS} == {0}
    assert (line.key, line.meter, line.rule, line.batch_range) == ("", "", "", "")
    assert line.billing_period_start == at("2026-10-15T00:00+02:00")
    assert line.billing_period_end == at("2026-11-15T00:00+01:00")
    Draft202012Validator(schema()).validate(json.loads(b"".join(FORMATS["json"].stream([line]))))


def test_an_account_with_usage_has_no_further_line_be_it_final_or_not() -> None:
    payers = {name: account(name) for name in ("Zoe", "ab", "acme", "zoë", "ä", "_x")}
    spend(payers["acme"], "2026-11-10T12:00")
    spend("~", "2026-11-10T12:00")
    close("2026-12-02")
    spend(payers["zoë"], "2026-11-10T12:00")
    spend(payers["ab"], "2026-10-10T12:00")
    flow()
    found = november()
    assert [row.account for row in found] == sorted([*payers, "~"])
    assert unused(found) == ["Zoe", "_x", "ab", "ä"]
    assert [row.account for row in rows(statements("2026-11"))] == ["acme", "zoë", "~"]


def test_one_account_can_be_asked_for() -> None:
    account("idle")
    account("other")
    assert unused(november(name="idle")) == ["idle"]


def test_an_account_made_after_the_period_is_left_out() -> None:
    for name, since in (("before", "2026-11-30T23:59"), ("after", "2026-12-01T00:00")):
        account(name)
        Account.history.filter(identifier=name).update(since=at(since))
    assert unused(november()) == ["before"]


def test_a_gap_stands_on_the_line_too() -> None:
    account("idle")
    DurabilityGap.objects.create(event="a", kind="restart", since=at("2026-11-04"), until=at("2026-11-05"))
    assert november()[0].durability_gap == "restart 2026-11-04T00:00:00Z/2026-11-05T00:00:00Z"


def test_the_command_has_an_option_for_it() -> None:
    account("idle")
    printed = []
    for every in (False, True):
        out = io.StringIO()
        call_command("ratelimits_report", period="2026-11", all_accounts=every, stdout=out)
        printed.append(len(out.getvalue().splitlines()))
    assert printed == [1, 2]
