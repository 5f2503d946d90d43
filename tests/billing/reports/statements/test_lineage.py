from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth import get_user_model
from simple_history.utils import update_change_reason

from ratelimits.billing.models import Adjustment, ReportLine
from ratelimits.billing.reports.statements.lineage import RecordedEdit, batches, ledger_lines, rule_edits, terms_edits
from ratelimits.models import KeyOverride, Plan, PlanInclusion, Rule
from ratelimits.usage.models import Line
from tests.billing.reports.closing.test_close import adjust
from tests.support.reports.invoices import account, close, spend
from tests.support.rows import rule
from tests.support.usage.traffic import flow

pytestmark = pytest.mark.django_db(transaction=True)


def short(edit: RecordedEdit) -> tuple[str, str, str, str]:
    return edit.kind, edit.row, edit.did, edit.who


def test_a_line_leads_to_the_edit_that_made_its_rule_so_and_to_who_made_it() -> None:
    monthly: Any = rule("monthly", bills=True)
    monthly.capacity = 20
    monthly._history_user = get_user_model().objects.create(username="ada")
    monthly.save()
    update_change_reason(monthly, "they asked")
    spend(account(), "2026-10-15", rule=monthly.pk, version=monthly.version)
    (report,) = close("2026-11-02")
    (line,) = report.lines.all()
    monthly.delete()
    (edit,) = rule_edits(line, "default")
    assert short(edit) == ("rule", "monthly", "changed", "ada")
    assert (edit.version, edit.reason, edit.at.tzinfo is not None) == (line.rule_version, "they asked", True)


def test_an_override_that_shaped_the_rule_is_named_too() -> None:
    monthly = rule("monthly", bills=True)
    mine = KeyOverride.objects.create(key="api_key:1", rule="monthly", capacity=50, reason="trial")
    KeyOverride.objects.create(key="api_key:2", rule="monthly", capacity=60)
    spend(account(), "2026-10-15", rule=monthly.pk, version=mine.version)
    (report,) = close("2026-11-02")
    (edit,) = rule_edits(report.lines.get(), "default")
    assert short(edit)[:3] == ("override", "monthly for api_key:1", "added")
    assert edit.reason == "trial"


def test_the_terms_are_those_at_the_period_s_end_whatever_was_edited_since() -> None:
    acme = account(included=5)
    spend(acme, "2026-10-15")
    (report,) = close("2026-11-02")
    PlanInclusion.objects.update(quantity=6)
    Plan.objects.update(name="Gone")
    edits = list(terms_edits(report.lines.get(), "default"))
    assert [short(edit)[:3] for edit in edits] == [
        ("account", "acme", "added"),
        ("plan", "Plan of acme", "added"),
        ("included quantity", "5 requests", "added"),
    ]


def test_a_line_leads_to_the_ledger_lines_and_the_batches_that_it_is_the_sum_of() -> None:
    acme = account()
    for cost in (1, 20):
        spend(acme, "2026-10-15", cost)
        spend(acme, "2026-10-15", key="api_key:2")
        flow()
    (first,) = close("2026-11-02")
    spend(acme, "2026-10-15", 300)
    (second,) = close("2026-11-03")
    early, late = (report.lines.get(key="api_key:1") for report in (first, second))
    assert sorted(ledger_lines(early, "default").values_list("admitted_units", flat=True)) == [1, 20]
    assert ledger_lines(late, "default").get().admitted_units == 300
    assert [batch.position for batch in batches(early, "default")] == [1, 2]
    assert [batch.position for batch in batches(late, "default")] == [3]
    for line in ReportLine.objects.all():
        sums = sum(ledger_lines(line, "default").values_list("admitted_units", flat=True))
        assert sums == line.consumed_quantity
    assert Line.objects.count() == 5


def test_an_adjustment_has_an_author_and_no_ledger_lines() -> None:
    spend(account(), "2026-10-15", 10)
    flow()
    adjust(-4)
    (report,) = close("2026-11-02")
    line = report.lines.get(charge_category="adjustment")
    assert not ledger_lines(line, "default").exists()
    assert list(rule_edits(line, "default")) == []
    assert str(Adjustment.objects.get(report=report).author) == "finance"


def test_usage_that_no_rule_bills_has_no_rule_edit() -> None:
    Rule.objects.create(name="other", algorithm="token_bucket", capacity=1, rate=1, period=1)
    spend("", "2026-10-15", key="anonymous", rule=0, version=0)
    (report,) = close("2026-11-02")
    line = report.lines.get()
    assert list(rule_edits(line, "default")) == []
    assert list(terms_edits(line, "default")) == []
