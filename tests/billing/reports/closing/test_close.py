from __future__ import annotations

from datetime import UTC, datetime

import pytest
from django.contrib.auth import get_user_model
from django.db import connection
from django.db.models import QuerySet
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from ratelimits import engine
from ratelimits.billing.models import Adjustment, Report, ReportLine
from ratelimits.billing.reports.closing import ahead
from ratelimits.billing.reports.closing.close import close_together, finalise, finalise_each, home_shard
from ratelimits.billing.reports.verify.report import verify_report
from ratelimits.billing.reports.verify.totals import verify_totals
from ratelimits.models import Account, FrozenPeriod, Name, Plan, PlanInclusion
from ratelimits.usage.models import Batch, ShardState
from ratelimits.usage.periods import iso
from tests.support.plain import PLAIN
from tests.support.reports.invoices import account, close, lines, spend
from tests.support.usage.traffic import at, flow

pytestmark = pytest.mark.django_db(transaction=True)

LATE_TO_NEXT_PERIOD = {**PLAIN, "LATE_USAGE": "period"}


def adjust(quantity: int, period: str = "2026-10-01", **about: str) -> Adjustment:
    author, _created = get_user_model().objects.get_or_create(username="finance")
    return Adjustment.objects.create(
        account="acme",
        period_start=datetime.fromisoformat(period).replace(tzinfo=UTC),
        quantity=quantity,
        reason="double charge",
        author=author,
        **about,
    )


def spans() -> list[tuple[str, str, int]]:
    """Return start, end and consumed units of every report."""
    reports = Report.objects.order_by("period_start", "version")
    return [
        (iso(r.period_start), iso(r.period_end), sum(r.lines.values_list("consumed_quantity", flat=True)))
        for r in reports
    ]


def test_a_period_is_finalised_when_the_watermark_has_passed_its_end_and_grace_and_not_before() -> None:
    spend(account(), "2026-10-15")
    assert close("2026-11-01T00:59:59") == []
    (report,) = close("2026-11-01T01:00:00")
    assert (iso(report.period_start), iso(report.period_end)) == ("2026-10-01T00:00:00Z", "2026-11-01T00:00:00Z")
    assert close("2026-11-01T01:00:01") == []


def test_a_frozen_shard_is_not_finalised() -> None:
    spend(account(), "2026-10-15")
    flow()
    ShardState.objects.update(frozen=True)
    assert close("2026-11-05") == []


def test_usage_beyond_the_included_quantity_is_overage() -> None:
    acme = account(included=100)
    spend(acme, "2026-10-03", 60, key="api_key:1")
    receipt = spend(acme, "2026-10-04", 70, key="api_key:2").receipt
    spend(acme, "2026-10-04", 30, key="api_key:2")
    assert receipt is not None
    engine.settle(receipt, [50, 50])
    (report,) = close("2026-11-02")
    assert lines(report) == [
        {"charge_class": "", "consumed_quantity": 60, "included_quantity": 60, "overage_quantity": 0,
         "refunded_quantity": 0},
        {"charge_class": "", "consumed_quantity": 100, "included_quantity": 40, "overage_quantity": 40,
         "refunded_quantity": 20},
    ]  # fmt: skip


def test_the_included_quantity_is_that_of_the_plan_at_the_periods_end() -> None:
    acme = account(included=100)
    spend(acme, "2026-10-03", 150)
    flow()
    # These changes are made now, so they come after the period.
    PlanInclusion.objects.update(quantity=1000)
    Account.objects.filter(pk=acme.pk).update(plan=Plan.objects.create(name="New", slug="new"))
    (report,) = close("2026-11-02")
    assert (report.plan, report.included) == ("plan-acme", {"requests": 100})


def test_rows_that_were_written_without_a_history_are_billed_by_what_they_say() -> None:
    acme = account(included=100)
    spend(acme, "2026-10-03", 150)
    for model in (Account, Plan, PlanInclusion):
        QuerySet(model).update(since=at("2026-11-20"))
        model.history.all().delete()
    (report,) = close("2026-11-02")
    assert (report.plan, report.included) == ("plan-acme", {"requests": 100})


def test_late_usage_of_a_closed_period_is_a_further_version_that_names_what_it_corrects() -> None:
    acme = account()
    spend(acme, "2026-10-15", 10)
    (first,) = close("2026-11-02")
    spend(acme, "2026-10-16", 5)
    spend(acme, "2026-10-16", 7, key="api_key:new")
    (second,) = close("2026-11-03")
    assert (second.version, second.previous_digest) == (2, first.digest)
    old = ReportLine.objects.get(report=first)
    known, new = ReportLine.objects.filter(report=second).order_by("number")
    assert (known.consumed_quantity, known.charge_class, known.corrects_line_id) == (5, "correction", old.line_id)
    assert (new.consumed_quantity, new.charge_class, new.corrects_line_id) == (7, "correction", "")
    assert close("2026-11-04") == []
    assert ReportLine.objects.filter(report=first).count() == 1


def test_corrections_name_lines_of_the_first_version_or_none() -> None:
    """See the table of docs/billing/corrections.md."""
    acme = account()
    spend(acme, "2026-10-15", 10)
    (first,) = close("2026-11-02")
    spend(acme, "2026-10-16", 7, key="api_key:new")
    close("2026-11-03")
    spend(acme, "2026-10-17", 1, key="api_key:new")
    adjust(-1)
    adjust(-2, corrects_line_id=first.lines.get().line_id)
    (third,) = close("2026-11-04")
    found = third.lines.order_by("consumed_quantity").values_list("consumed_quantity", "corrects_line_id")
    assert [*found] == [(-2, first.lines.get().line_id), (-1, ""), (1, "")]
    assert {*third.lines.values_list("charge_class", flat=True)} == {"correction"}


def test_late_usage_waits_for_no_report_of_a_period_that_ends_without_usage() -> None:
    acme = account()
    spend(acme, "2026-10-15", 10)
    close("2026-11-02")
    spend(acme, "2026-10-16", 5)
    with override_settings(RATELIMITS=LATE_TO_NEXT_PERIOD):
        assert close("2026-11-20") == []
        (corrected,) = close("2026-12-02")
    assert (corrected.version, iso(corrected.period_start)) == (2, "2026-10-01T00:00:00Z")
    assert [line["consumed_quantity"] for line in lines(corrected)] == [5]


def test_late_usage_goes_to_the_next_period_where_the_setting_says_so() -> None:
    acme = account()
    spend(acme, "2026-10-15", 10)
    (october,) = close("2026-11-02")
    spend(acme, "2026-10-16", 5)
    spend(acme, "2026-11-16", 3)
    with override_settings(RATELIMITS=LATE_TO_NEXT_PERIOD):
        assert close("2026-11-20") == []
        adjust(1)
        (corrected,) = close("2026-11-20")
        assert [line["consumed_quantity"] for line in lines(corrected)] == [1]
        (november,) = close("2026-12-02")
    late, own = ReportLine.objects.filter(report=november).order_by("usage_period")
    assert (late.consumed_quantity, late.charge_class) == (5, "correction")
    assert late.corrects_line_id == ReportLine.objects.get(report=october).line_id
    assert iso(late.charge_period_start) == "2026-10-16T00:00:00Z"
    assert (own.consumed_quantity, own.charge_class) == (3, "")
    assert close("2026-12-03") == []


def test_what_is_taken_off_later_comes_off_the_overage_first() -> None:
    acme = account()
    spend(acme, "2026-10-15", 10)
    close("2026-11-02")
    Report.objects.update(included={"requests": 6})
    ReportLine.objects.update(included_quantity=6, overage_quantity=4)
    adjust(-5)
    (second,) = close("2026-11-03")
    assert lines(second) == [
        {"charge_class": "correction", "consumed_quantity": -5, "included_quantity": -1, "overage_quantity": -4,
         "refunded_quantity": 0},
    ]  # fmt: skip


def test_an_adjustment_of_an_open_period_is_in_its_first_version() -> None:
    spend(account(), "2026-10-15", 10)
    flow()
    adjustment = adjust(-4)
    (report,) = close("2026-11-02")
    assert [line["consumed_quantity"] for line in lines(report)] == [10, -4]
    adjustment.refresh_from_db()
    assert adjustment.report == report
    line = ReportLine.objects.get(charge_category="adjustment")
    assert (line.charge_class, line.key) == ("", "")


def test_a_refund_after_closing_is_a_correction() -> None:
    receipt = spend(account(), "2026-10-15", 10).receipt
    close("2026-11-02")
    assert receipt is not None
    engine.refund(receipt)
    (second,) = close("2026-11-03")
    assert lines(second) == [
        {"charge_class": "correction", "consumed_quantity": 0, "included_quantity": 0, "overage_quantity": -10,
         "refunded_quantity": 10},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("timezone", "moments", "expected"),
    [
        # Clocks went back on 2026-10-25 in Berlin: October is an hour longer, November starts at UTC+1.
        (
            "Europe/Berlin",
            ["2026-09-30T21:59", "2026-09-30T22:00", "2026-10-31T22:59", "2026-10-31T23:00"],
            [
                ("2026-08-31T22:00:00Z", "2026-09-30T22:00:00Z", 1),
                ("2026-09-30T22:00:00Z", "2026-10-31T23:00:00Z", 2),
                ("2026-10-31T23:00:00Z", "2026-11-30T23:00:00Z", 1),
            ],
        ),
        (
            "Asia/Tokyo",
            ["2026-09-30T14:59", "2026-09-30T15:00", "2026-10-31T14:59", "2026-10-31T15:00"],
            [
                ("2026-08-31T15:00:00Z", "2026-09-30T15:00:00Z", 1),
                ("2026-09-30T15:00:00Z", "2026-10-31T15:00:00Z", 2),
                ("2026-10-31T15:00:00Z", "2026-11-30T15:00:00Z", 1),
            ],
        ),
        (
            "America/Los_Angeles",
            ["2026-10-01T06:59", "2026-10-01T07:00", "2026-11-01T06:59", "2026-11-01T07:00"],
            [
                ("2026-09-01T07:00:00Z", "2026-10-01T07:00:00Z", 1),
                ("2026-10-01T07:00:00Z", "2026-11-01T07:00:00Z", 2),
                ("2026-11-01T07:00:00Z", "2026-12-01T08:00:00Z", 1),
            ],
        ),
    ],
)
def test_months_begin_at_local_midnight(
    timezone: str, moments: list[str], expected: list[tuple[str, str, int]]
) -> None:
    acme = account(timezone=timezone)
    for moment in moments:
        spend(acme, moment)
    close("2027-01-01")
    assert spans() == expected


def test_an_anchor_on_the_31st_keeps_to_the_last_day_of_shorter_months_leap_years_included() -> None:
    acme = account(billing_anchor="2024-01-31T06:00")
    for moment in ("2024-01-31T05:59", "2024-01-31T06:00", "2024-02-29T05:59", "2024-02-29T06:00", "2024-03-31T06:00"):
        spend(acme, moment)
    close("2024-06-01")
    assert spans() == [
        ("2023-12-31T06:00:00Z", "2024-01-31T06:00:00Z", 1),
        ("2024-01-31T06:00:00Z", "2024-02-29T06:00:00Z", 2),
        ("2024-02-29T06:00:00Z", "2024-03-31T06:00:00Z", 1),
        ("2024-03-31T06:00:00Z", "2024-04-30T06:00:00Z", 1),
    ]


def test_february_of_a_common_year_ends_on_the_28th() -> None:
    acme = account(billing_anchor="2024-01-31T06:00")
    for moment in ("2026-02-28T05:59", "2026-02-28T06:00"):
        spend(acme, moment)
    close("2026-05-01")
    assert [span[:2] for span in spans()] == [
        ("2026-01-31T06:00:00Z", "2026-02-28T06:00:00Z"),
        ("2026-02-28T06:00:00Z", "2026-03-31T06:00:00Z"),
    ]


def test_usage_without_an_account_is_reported_as_anonymous() -> None:
    spend("", "2026-10-15", key="anonymous")
    (report,) = close("2026-11-02")
    assert (report.account, str(report)) == ("", "anonymous 2026-10 v1")


def test_an_account_whose_time_zone_no_longer_exists_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    """Close a frozen period, and one that begins after an update of tzdata removed the zone."""
    spend(account(timezone="Europe/Berlin"), "2026-10-15")
    flow()
    QuerySet(Account).update(timezone="Mars/Olympus")
    Account.history.update(timezone="Mars/Olympus")
    spend("acme", "2026-11-15")
    reports = close("2026-12-02")
    assert [(str(report), report.timezone) for report in reports] == [
        ("acme 2026-10 v1", "Europe/Berlin"),
        ("acme 2026-11 (from 2026-10-31) v1", "UTC"),
    ]


def test_an_account_that_cannot_be_closed_keeps_no_other_open(caplog: pytest.LogCaptureFixture) -> None:
    names = [f"shop-{number}" for number in range(130)]  # some share a shard with the broken one
    for name in names:
        spend(account(name), "2026-10-15")
    flow()
    FrozenPeriod.objects.filter(customer__names__identifier="shop-64")._raw_delete("default")
    assert sorted(report.account for report in close("2026-11-02")) == sorted(set(names) - {"shop-64"})
    assert "Account 'shop-64' cannot be closed" in caplog.text
    assert "is not in the table of billing periods" in caplog.text


def test_a_missing_batch_keeps_open_only_the_accounts_of_its_shard(caplog: pytest.LogCaptureFixture) -> None:
    spend(account("acme"), "2026-10-15")
    spend(account("other"), "2026-10-15")
    flow()
    QuerySet(Batch).filter(shard=home_shard("acme")).delete()
    assert home_shard("acme") != home_shard("other")
    assert [report.account for report in close("2026-11-02")] == ["other"]
    assert "has no batch at position 1" in caplog.text


def test_no_period_is_closed_before_its_end_by_this_machines_clock_either() -> None:
    spend(account(), "2026-10-15")
    flow()
    ShardState.objects.update(watermark=at("2026-11-01T01:00"))
    assert finalise(at("2026-10-31T23:59:59")) == []
    assert finalise(at("2026-11-01T00:59:59")) == []
    assert len(finalise(at("2026-11-01T01:00"))) == 1


def test_finalising_says_how_far_it_is() -> None:
    for name in ("a", "b", "c"):
        spend(account(name), "2026-10-15")
    flow()
    ShardState.objects.update(watermark=at("2026-11-02"))
    steps = list(finalise_each(at("2026-11-02")))
    assert [(step.done, step.total) for step in steps] == [(1, 3), (2, 3), (3, 3)]
    assert sorted(report.account for step in steps for report in step.reports) == ["a", "b", "c"]


def queries_of_closing(names: list[str], now: str) -> int:
    """Return how many queries it takes to close these accounts together, with one report each."""
    customers = pks(names)
    with CaptureQueriesContext(connection) as taken:
        assert len(close_together("default", customers, at(now))) == len(names)
    return len(taken)


def pks(names: list[str]) -> list[int]:
    """Return the primary keys of the customers whom these accounts name."""
    return list(Name.objects.filter(identifier__in=names).values_list("customer", flat=True))


def of_one_shard(count: int) -> list[str]:
    """Return this number of account names whose usage is in one shard, in the order in which they are closed."""
    return sorted([f"shop-{number}" for number in range(3000) if home_shard(f"shop-{number}") == 7][:count])


def test_an_account_more_takes_no_query_more() -> None:
    names = of_one_shard(16)
    for name in names:
        spend(account(name), "2026-10-15")
    flow()
    ShardState.objects.update(watermark=at("2026-11-02"))
    assert queries_of_closing(names[:4], "2026-11-02") == queries_of_closing(names[4:], "2026-11-02")


def test_an_account_whose_months_are_its_own_takes_one_query_more() -> None:
    names = of_one_shard(16)
    for number, name in enumerate(names):
        spend(account(name, billing_anchor=f"2026-01-{number + 1:02d}T{number:02d}:30"), "2026-10-15")
    flow()
    QuerySet(Account).update(since=at("2026-10-30"))  # one query for the former terms in its history
    ShardState.objects.update(watermark=at("2026-12-02"))
    few, more = queries_of_closing(names[:4], "2026-12-02"), queries_of_closing(names[4:], "2026-12-02")
    assert more - few == 8  # one query for the totals of processes in its period


def test_accounts_with_more_lines_than_are_read_at_once_are_closed_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_MAX_GROUPS", 7)
    monkeypatch.setattr(ahead, "_MAX_SPANS", 3)
    names = of_one_shard(9)
    keys = {name: 1 + number * 3 % 11 for number, name in enumerate(names)}
    for number, name in enumerate(names):
        payer = account(name, billing_anchor=f"2026-01-{number % 5 + 1:02d}T00:00")
        for key in range(keys[name]):
            spend(payer, "2026-10-15", key=f"api_key:{key}")
            spend(payer, "2026-11-15", key=f"api_key:{key}")
    reports = close("2027-01-02")
    assert sorted(report.account for report in reports) == sorted(names * 2)
    assert {(report.account, report.line_count, report.lines.count()) for report in reports} == {
        (name, count, count) for name, count in keys.items()
    }
    assert [*verify_totals("default"), *(each for report in reports for each in verify_report(report))] == []


def test_finalising_twice_at_once_writes_one_report() -> None:
    spend(account(), "2026-10-15")
    close("2026-11-02")
    assert finalise(at("2026-11-02")) == []
    assert Report.objects.count() == 1
