"""Test what a billing period includes, and how its late usage is rated, when terms change within it."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import Any

import pytest
from django.db.models import QuerySet
from django.test import override_settings

from ratelimits import engine
from ratelimits.billing.models import Report, ReportLine
from ratelimits.billing.reports.statements import rows, statements
from ratelimits.billing.reports.verify.report import verify_report
from ratelimits.models import Account, PlanInclusion
from ratelimits.usage.periods import iso
from tests.support.plain import PLAIN
from tests.support.reports.edits import change, edit_at, plan, rename, spend
from tests.support.reports.invoices import account, close
from tests.support.usage.traffic import flow

pytestmark = pytest.mark.django_db(transaction=True)

LATE = override_settings(RATELIMITS={**PLAIN, "LATE_USAGE": "period", "RECEIPT_TTL": 300_000_000})
BY_TIME = override_settings(RATELIMITS={**PLAIN, "PRORATION": "time"})


def split(report: Report) -> tuple[int, int]:
    """Return the included and the overage units that a version added."""
    sums = report.lines.values_list("included_quantity", "overage_quantity")
    return sum(one for one, _other in sums), sum(other for _one, other in sums)


def corrected(report: Report) -> list[tuple[int, int, int, int]]:
    """Return consumed, refunded, included and overage units of the lines of late usage."""
    columns = "consumed_quantity", "refunded_quantity", "included_quantity", "overage_quantity"
    return list(report.lines.filter(charge_class="correction").values_list(*columns))


def findings() -> list[str]:
    return list(chain.from_iterable(verify_report(report) for report in Report.objects.order_by("pk")))


@pytest.mark.parametrize("leave", ["delete", "no plan"])
def test_a_leaver_has_the_allowance_of_its_last_plan(leave: str) -> None:
    acme = account(included=100)
    spend("acme", "2026-10-10", 80)
    flow()
    if leave == "delete":
        with edit_at("2026-10-20"):
            acme.delete()
    else:
        change("2026-10-20", plan=None)
    (report,) = close("2026-11-02")
    assert (report.plan, split(report)) == ("plan-acme", (80, 0))


def test_who_left_before_the_period_has_no_allowance_in_it() -> None:
    account(included=100)
    change("2026-09-30", plan=None)
    spend("acme", "2026-10-10", 80)
    (report,) = close("2026-11-02")
    assert (report.plan, split(report)) == ("", (0, 80))


def test_texts_of_one_customer_have_one_allowance() -> None:
    account(included=100)
    spend("acme", "2026-10-10", 80)
    flow()
    rename("acme", "initech", "2026-10-20")
    spend("initech", "2026-10-25", 50)
    (october,) = close("2026-11-02")
    assert (october.account, split(october)) == ("initech", (100, 30))
    spend("acme", "2026-10-11", 7)
    (second,) = close("2026-11-03")
    assert (second.version, split(second)) == (2, (0, 7))
    spend("initech", "2026-11-10", 60)
    (november,) = close("2026-12-02")
    assert (november.account, split(november)) == ("initech", (60, 0))
    assert findings() == []


def test_an_account_that_comes_back_has_one_allowance() -> None:
    acme = account(included=100)
    spend("acme", "2026-10-10", 80)
    flow()
    with edit_at("2026-10-12"):
        acme.delete()
    with edit_at("2026-10-20"):
        Account.objects.create(identifier="acme", plan=plan("small", 90), timezone="Asia/Kolkata")
    spend("acme", "2026-10-25", 50)
    (report,) = close("2026-11-02")
    assert (report.plan, split(report)) == ("small", (90, 40))


class TestByTime:
    @BY_TIME
    def test_a_whole_month_on_one_plan_includes_all_of_it(self) -> None:
        account(included=100)
        spend("acme", "2026-10-10", 120)
        (report,) = close("2026-11-02")
        assert split(report) == (100, 20)

    @BY_TIME
    def test_an_upgrade_includes_each_plans_share(self) -> None:
        account(included=100)
        change("2026-11-16", plan=plan("big", 1000))
        spend("acme", "2026-11-10", 600)
        (report,) = close("2026-12-02")
        assert (report.plan, split(report)) == ("big", (550, 50))

    @BY_TIME
    def test_a_leaver_has_the_share_of_its_time(self) -> None:
        acme = account(included=101)
        spend("acme", "2026-11-10", 80)
        flow()
        with edit_at("2026-11-16"):
            acme.delete()
        (report,) = close("2026-12-02")
        assert (report.plan, split(report)) == ("plan-acme", (51, 29))  # 50.5, half up

    @BY_TIME
    def test_a_short_period_has_the_share_of_its_month(self) -> None:
        account(included=100)
        spend("acme", "2026-10-10", 120)
        flow()
        change("2026-10-20", billing_anchor="2026-01-15T00:00")
        spend("acme", "2026-11-10", 60)
        october, short = close("2026-11-20")
        assert (iso(short.period_start), iso(short.period_end)) == ("2026-11-01T00:00:00Z", "2026-11-15T00:00:00Z")
        # The month that ends with the period has 31 days: 100 · 14 / 31.
        assert (split(october), split(short)) == ((100, 20), (45, 15))

    @BY_TIME
    def test_texts_of_one_customer_have_the_allowance_of_all_its_time(self) -> None:
        account(included=100)
        spend("acme", "2026-11-10", 80)
        flow()
        rename("acme", "initech", "2026-11-16")
        spend("initech", "2026-11-20", 80)
        assert [split(report) for report in close("2026-12-02")] == [(100, 60)]


class TestLateUsageOnTheNextReport:
    @LATE
    def test_it_is_rated_by_its_own_periods_allowance(self) -> None:
        account(included=100)
        spend("acme", "2026-10-10", 90)
        close("2026-11-02")
        spend("acme", "2026-10-11", 50)
        spend("acme", "2026-11-11", 30)
        (november,) = close("2026-12-02")
        assert corrected(november) == [(50, 0, 10, 40)]
        assert split(november) == (40, 40)
        spend("acme", "2026-10-12", 5)
        spend("acme", "2026-12-12", 100)
        (december,) = close("2027-01-02")
        assert corrected(december) == [(5, 0, 0, 5)]
        assert split(december) == (100, 5)
        assert findings() == []

    @LATE
    def test_a_late_refund_comes_off_its_own_periods_overage(self) -> None:
        account(included=100)
        spend("acme", "2026-10-10", 100)
        receipt = spend("acme", "2026-10-11", 50).receipt
        close("2026-11-02")
        assert receipt is not None
        engine.refund(receipt)
        spend("acme", "2026-11-11", 30)
        (november,) = close("2026-12-02")
        assert corrected(november) == [(0, 50, 0, -50)]
        assert findings() == []

    @LATE
    def test_an_unused_october_does_not_pay_for_november(self) -> None:
        account(included=100)
        spend("acme", "2026-10-10", 1)
        close("2026-11-02")
        spend("acme", "2026-10-11", 60)
        spend("acme", "2026-11-11", 130)
        (november,) = close("2026-12-02")
        assert corrected(november) == [(60, 0, 60, 0)]
        assert split(november) == (160, 30)

    @LATE
    def test_where_no_later_period_comes_it_is_a_further_version(self) -> None:
        acme = account(included=100)
        spend("acme", "2026-10-10", 90)
        close("2026-11-02")
        with edit_at("2026-11-03"):
            acme.delete()
        spend("acme", "2026-10-11", 50)
        assert close("2026-11-20") == []
        assert close("2026-12-01T00:59") == []
        (second,) = close("2026-12-01T01:00")
        assert (second.version, corrected(second)) == (2, [(50, 0, 10, 40)])
        assert close("2026-12-03") == []
        assert findings() == []

    @LATE
    def test_a_report_that_rated_it_by_its_own_allowance_still_verifies(self) -> None:
        account(included=100)
        spend("acme", "2026-10-10", 90)
        close("2026-11-02")
        spend("acme", "2026-10-11", 50)
        spend("acme", "2026-11-11", 70)
        (november,) = close("2026-12-02")
        # Earlier versions rated all of November's lines by November's allowance.
        late, own = ReportLine.objects.filter(report=november).order_by("number")
        QuerySet(ReportLine).filter(pk=late.pk).update(included_quantity=50, overage_quantity=0)
        QuerySet(ReportLine).filter(pk=own.pk).update(included_quantity=50, overage_quantity=20)
        assert [each for each in verify_report(november) if "digest" not in each] == []
        QuerySet(ReportLine).filter(pk=own.pk).update(included_quantity=51, overage_quantity=19)
        assert [each for each in verify_report(november) if "digest" not in each] != []


class TestEdited:
    """Usage of one period from before and after an edit of the terms."""

    def used_twice(self) -> None:
        account(included=100)
        spend("acme", "2026-10-10", 80)
        flow()
        change("2026-10-12", billing_anchor="2026-01-05T00:00")
        spend("acme", "2026-10-13", 50)
        flow()

    def test_it_is_billed_together_with_one_allowance(self) -> None:
        self.used_twice()
        spend("acme", "2026-11-06", 30)
        first, second = close("2026-12-07")
        assert (iso(first.period_start), iso(first.period_end)) == ("2026-10-01T00:00:00Z", "2026-11-01T00:00:00Z")
        assert (iso(second.period_start), iso(second.period_end)) == ("2026-11-05T00:00:00Z", "2026-12-05T00:00:00Z")
        assert (split(first), split(second)) == ((100, 30), (30, 0))
        spend("acme", "2026-10-14", 5)
        (version,) = close("2026-12-08")
        assert (version.version, split(version)) == (2, (0, 5))
        ids = ReportLine.objects.values_list("line_id", flat=True)
        assert max(Counter(ids).values()) == 1
        assert findings() == []

    def test_provisional_lines_say_the_same(self) -> None:
        self.used_twice()

        def said() -> list[Any]:
            found = [row for month in ("2026-10", "2026-11") for row in rows(statements(month))]
            return [
                (row.line_id, row.billing_period_start, row.billing_period_end, row.included_quantity, row.plan)
                for row in found
            ]

        before = said()
        close("2026-12-07")
        assert len(before) == 1
        assert before == said()


def test_provisional_lines_of_a_leaver_say_what_will_be_billed() -> None:
    acme = account(included=100)
    spend("acme", "2026-10-10", 120)
    flow()
    with edit_at("2026-10-20"):
        acme.delete()
    (line,) = rows(statements("2026-10"))
    assert (line.included_quantity, line.overage_quantity, line.plan) == (100, 20, "plan-acme")
    PlanInclusion.objects.update(quantity=7)  # made today, after the period
    (report,) = close("2026-11-02")
    assert split(report) == (100, 20)
