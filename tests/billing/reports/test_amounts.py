"""Test finalised reports with prices: what is recorded, what lines and accounts cost, and how verify checks it."""

from __future__ import annotations

import io
import random
from datetime import datetime
from decimal import Decimal
from fractions import Fraction
from itertools import product
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.core.management import CommandError, call_command
from django.db import connection
from django.db.models import QuerySet
from django.test import Client
from django.test.utils import CaptureQueriesContext

from ratelimits import engine
from ratelimits.billing.models import Adjustment, PlanPrice, Report, ReportLine
from ratelimits.billing.pricing.prices import NO_UNITS, Units
from ratelimits.billing.reports.closing.close import close_together, home_shard
from ratelimits.billing.reports.closing.open_periods import NotForcedError, force, open_periods
from ratelimits.billing.reports.exports import FORMATS
from ratelimits.billing.reports.statements import statements
from ratelimits.billing.reports.statements.charges import charges
from ratelimits.billing.reports.statements.effect import AmountOwed, effect_of
from ratelimits.billing.reports.statements.lineage import terms_edits
from ratelimits.models import Account, Name, Plan
from ratelimits.usage.models import ShardState
from ratelimits.usage.periods import iso
from tests.billing.pricing.test_prices import modelled
from tests.support.reports import edits
from tests.support.reports.edits import edit_at
from tests.support.reports.invoices import account, close, spend, token
from tests.support.reports.priced import TIERS, amounts, charge, findings, owed, priced, table, written
from tests.support.usage.traffic import at, flow, opened_late

pytestmark = pytest.mark.django_db(transaction=True)

#: Files in the first schema, which must not change.
FIRST_SCHEMA = [name for name, form in FORMATS.items() if not form.priced]


def adjust(quantity: int, start: str = "2026-10-01T00:00:00+00:00", payer: str = "acme") -> None:
    """Add units to an account's period by an adjustment."""
    author, _created = get_user_model().objects.get_or_create(username="finance")
    about = {"account": payer, "period_start": datetime.fromisoformat(start), "author": author}
    Adjustment.objects.create(quantity=quantity, reason="double charge", **about)


def test_a_report_says_what_each_line_and_the_account_owe() -> None:
    acme = priced(included=5, unit_price="0.105", flat_fee="10", minimum="12")
    spend(acme, "2026-10-10", 7)
    spend(acme, "2026-10-11", 4, key="api_key:2")
    (report,) = close("2026-11-02")
    assert amounts(report) == [
        ("1", "usage", "requests", "2", "0.105", "0.21"),
        ("1", "usage", "requests", "4", "0.105", "0.42"),
        ("1", "fee", "requests", "0", "", "10"),
        ("1", "minimum", "requests", "0", "", "1.37"),
    ]
    assert {(row["account_name"], row["currency"], row["report_total"]) for row in table(report)} == {
        ("Acme Ltd.", "EUR", "12.00")
    }
    assert report.amounts["total"] == {"EUR": "12.00"}


def test_a_line_that_reaches_into_another_tier_costs_what_each_unit_does() -> None:
    acme = priced(included=0, pricing="graduated", unit_price=None, tiers=TIERS)
    spend(acme, "2026-10-10", 8)
    spend(acme, "2026-10-11", 15, key="api_key:2")
    (report,) = close("2026-11-02")
    assert amounts(report) == [
        ("1", "usage", "requests", "8", "1", "8"),
        ("1", "usage", "requests", "15", "", "7.999"),  # 2 at 1, 10 at 0.5, 3 at 0.333
        ("1", "fee", "requests", "0", "", "2"),
        ("1", "rounding", "", "0", "", "0.001"),
    ]
    assert report.amounts["total"] == {"EUR": "18.00"}


def test_volume_reprices_what_was_billed_before_when_late_usage_moves_the_total_to_another_tier() -> None:
    acme = priced(included=0, pricing="volume", unit_price=None, tiers=TIERS)
    spend(acme, "2026-10-10", 9)
    (first,) = close("2026-11-02")
    assert amounts(first) == [("1", "usage", "requests", "9", "1", "9")]
    spend(acme, "2026-10-10", 6)
    (second,) = close("2026-11-03")
    assert amounts(second)[1:] == [
        ("2", "usage", "requests", "6", "0.5", "3"),
        ("2", "fee", "requests", "0", "", "2"),
        ("2", "repricing", "requests", "0", "", "-4.5"),
    ]
    assert (owed(second), second.amounts["total"]) == (Fraction("9.5"), {"EUR": "9.50"})


def test_usage_from_before_an_edit_is_priced_together_with_usage_from_after_it() -> None:
    priced(included=5, pricing="graduated", unit_price=None, tiers=TIERS, flat_fee="4", minimum="20")
    edits.spend("acme", "2026-10-10", 12)
    edits.change("2026-10-12", billing_anchor="2026-01-05T00:00")  # before any of its usage reached the ledger
    edits.spend("acme", "2026-10-13", 10, key="api_key:2")
    (first,) = close("2026-11-07")
    assert (iso(first.period_start), iso(first.period_end)) == ("2026-10-05T00:00:00Z", "2026-11-05T00:00:00Z")
    assert amounts(first) == [
        ("1", "usage", "requests", "7", "1", "7"),
        ("1", "usage", "requests", "10", "", "6.5"),  # 3 at 1, 7 at 0.5
        ("1", "fee", "requests", "0", "", "6"),  # the flat fee of 4, and the second tier's fee of 2
        ("1", "minimum", "requests", "0", "", "0.5"),
    ]
    for number, moment in enumerate(("2026-10-11", "2026-10-14"), 2):
        spend("acme", moment, 4)
        (version,) = close(f"2026-11-{6 + number:02d}")
        assert version.version == number
    assert amounts(version)[4:] == [
        ("2", "usage", "requests", "4", "", "1.833"),  # 3 at 0.5, 1 at 0.333
        ("2", "minimum", "requests", "0", "", "-0.5"),
        ("2", "rounding", "", "0", "", "-0.003"),
        ("3", "usage", "requests", "4", "0.333", "1.332"),
        ("3", "rounding", "", "0", "", "-0.002"),
    ]
    assert (owed(version), version.amounts["total"]) == (Fraction("22.66"), {"EUR": "22.66"})
    assert findings() == ""


def test_adjustments_are_priced_as_what_they_make_of_the_total() -> None:
    acme = priced(included=2, pricing="graduated", unit_price=None, tiers=TIERS, minimum="3")
    spend(acme, "2026-10-10", 14)
    close("2026-11-02")
    adjust(-5)
    (second,) = close("2026-11-03")
    assert amounts(second)[-2:] == [
        ("2", "adjustment", "requests", "-5", "", "-4"),  # 2 at 0.5, 3 at 1
        ("2", "fee", "requests", "0", "", "-2"),
    ]
    adjust(-7)
    (third,) = close("2026-11-04")
    assert amounts(third)[-2:] == [
        ("3", "adjustment", "requests", "-7", "1", "-7"),
        ("3", "minimum", "requests", "0", "", "3"),
    ]
    assert third.amounts["total"] == {"EUR": "3.00"}


@pytest.mark.parametrize("proration", ["none", "time"])
@pytest.mark.parametrize("late", ["version", "period"])
def test_texts_of_one_customer_owe_its_fees_minimum_and_tiers_once(proration: str, late: str, settings: Any) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "PRORATION": proration, "LATE_USAGE": late}
    fees: dict[str, Any] = {"flat_fee": "10.001", "minimum": "26"}
    acme = priced(included=5, pricing="graduated", unit_price=None, tiers=TIERS, **fees)
    spend(acme, "2026-10-10", 12)
    flow()
    edits.rename("acme", "initech", "2026-10-20")
    spend("initech", "2026-10-25", 9)
    flow()
    price = PlanPrice.objects.get().price()
    provisional = [charge.amount for charge in charges(statements("2026-10")) if charge.amount]
    (report,) = close("2026-11-02")
    # 12 and 9, minus the 5 that are included
    assert owed(report) == sum(provisional) == Fraction(round(price.of(Units(21, 16)), 2))
    assert [row[5] for row in amounts(report) if row[1] == "fee"] == ["12.001"]
    spend("acme", "2026-10-11", 3)
    spend("initech", "2026-11-11", 1)
    (second,) = close("2026-11-03") if late == "version" else close("2026-12-02")
    assert (second.label, second.version) == (("2026-10", 2) if late == "version" else ("2026-11", 1))
    adjust(-3, payer="initech")
    (third,) = (each for each in close("2026-12-03") if each.label == "2026-10")
    assert (third.account, third.version) == ("initech", second.version + 1)
    october = str(at("2026-10-01") // 10**6)
    added = [Fraction(each.amounts["periods"][october]["amount"]) for each in (report, second, third)]
    assert sum(added) == Fraction(round(price.of(Units(21, 16)), 2))
    assert findings() == ""


def test_a_leaver_owes_what_its_last_plan_charged_also_where_that_is_no_more() -> None:
    acme = priced(included=5, unit_price="0.10", flat_fee="1")
    spend(acme, "2026-10-10", 7)
    flow()
    with edit_at("2026-10-20"):
        Account.objects.update(plan=None)
    with edit_at("2026-10-25"):
        Plan.objects.all().delete()
    provisional = [charge.amount for charge in charges(statements("2026-10")) if charge.amount]
    (report,) = close("2026-11-02")
    assert (report.plan, report.amounts["total"]) == ("plan-acme", {"EUR": "1.20"})
    assert sum(provisional) == Decimal("1.20")
    assert findings() == ""


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"pricing": "graduated", "unit_price": None, "tiers": "1000: 0.1"}, "units beyond 1000"),
        ({"unit_price": None}, "the price of one unit is missing"),
        ({"unit_price": "-1"}, "cannot be below 0"),
        ({"flat_fee": "-1"}, "cannot be below 0"),
        ({"pricing": "free"}, "there is no pricing"),
    ],
)
def test_a_price_that_makes_no_sense_keeps_its_period_open_until_it_is_corrected(
    fields: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Such a price was written without full_clean(), as by a data migration."""
    acme, globex = priced(), priced("globex")
    wrong = {"unit_price": Decimal("0.10"), "meter": "tokens", **fields}
    with edit_at("2026-10-05"):
        PlanPrice.objects.create(plan=Plan.objects.get(slug="plan-acme"), **wrong)
    for payer in (acme, globex):
        spend(payer, "2026-10-10", 7)
    flow()
    found = [(each.row.account, each.amount) for each in charges(statements("2026-10"))]
    assert found == [("acme", None), ("globex", Decimal("0.20"))]
    assert [report.account for report in close("2026-11-02")] == ["globex"]
    (waits,) = open_periods(at("2026-11-02"))
    assert waits.why.startswith("the price of tokens in plan plan-acme is not valid: ")
    assert why in waits.why
    with pytest.raises(NotForcedError, match=r"is not valid.*correct it first"):
        force(token(), at("2026-10-01"), "ada", "due", at("2026-11-02"))
    row = PlanPrice.objects.get(plan=acme.plan, meter="tokens")
    row.pricing, row.unit_price, row.tiers, row.flat_fee = "per_unit", Decimal(3), "", Decimal(1)
    row.fees_due = "report"
    row.full_clean()
    row.save()
    (report,) = close("2026-11-03")
    assert report.amounts["total"] == {"EUR": "1.20"}
    assert findings() == ""


def test_a_price_that_makes_no_sense_may_be_deleted() -> None:
    acme = priced()
    with edit_at("2026-10-05"):
        PlanPrice.objects.create(plan=Plan.objects.get(), meter="tokens")
    spend(acme, "2026-10-10", 7)
    assert close("2026-11-02") == []
    PlanPrice.objects.get(meter="tokens").delete()
    (report,) = close("2026-11-03")
    assert report.amounts["total"] == {"EUR": "0.20"}


@pytest.mark.parametrize("fees_due", ["usage", "report"])
def test_without_net_usage_fees_and_minimum_are_due_only_if_the_price_says_so(fees_due: str) -> None:
    """Net usage is what was used, minus what was given back, plus or minus what people adjusted."""
    fees: dict[str, Any] = {"flat_fee": "50", "minimum": "80", "fees_due": fees_due}
    refused, failed, _idle, left, used = (
        priced(name, **fees) for name in ("refused", "failed", "idle", "left", "used")
    )
    assert not spend(refused, "2026-10-10", 11, capacity=10).allowed
    receipt = spend(failed, "2026-10-10", 3).receipt
    assert receipt is not None
    engine.refund(receipt)
    spend(left, "2026-10-10", 12)
    spend(used, "2026-10-10", 1)
    adjust(-1, payer="idle")
    adjust(-12, payer="left")
    provisional = {name: Decimal(0) for name in ("refused", "failed", "idle", "left", "used")}
    flow()
    for each in charges(statements("2026-10")):
        provisional[each.row.account] += each.amount or 0
    reports = {report.account: report for report in close("2026-11-02")}
    due = Decimal(80 if fees_due == "report" else 0)
    expected = {"refused": due, "failed": due, "idle": due, "left": due, "used": Decimal(80)}
    assert (
        {name: Decimal(report.amounts["total"]["EUR"]) for name, report in reports.items()} == expected == provisional
    )
    assert {name: owed(report) for name, report in reports.items()} == expected
    # A correction owes the price after it minus the price before it, in both directions.
    adjust(1, payer="left")
    adjust(-1, payer="used")
    later = {report.account: report for report in close("2026-11-03")}
    assert {name: owed(report) for name, report in later.items()} == {"left": 80, "used": due}
    assert findings() == ""


def test_an_adjustment_shows_what_is_owed_without_net_usage(settings: Any) -> None:
    acme = priced(flat_fee="50", minimum="80")
    spend(acme, "2026-10-10", 9)
    close("2026-11-02")
    author = get_user_model().objects.create(username="finance")
    credit = Adjustment(account="acme", period_start=datetime.fromisoformat("2026-10-01T00:00:00+00:00"), author=author)
    credit.quantity = -9
    assert effect_of(credit).owed == AmountOwed("EUR", Decimal("80.00"), Decimal("0.00"))


def test_large_prices_quantities_and_tiers_are_exact() -> None:
    """Rupiah, a price per byte, and units above 10^12; SQLite would turn decimals of this length into floats."""
    rupiah = priced("rupiah", included=0, currency="IDR", unit_price="100000")
    tiers = f"{10**13}: 0 + 150000\n{2**63 - 1}: 0.000000000084\nmore: 1"
    tiered = priced("tiered", included=0, pricing="graduated", unit_price=None, tiers=tiers)
    per_byte = priced("bytes", included=0, unit_price="0.000000000084", flat_fee="999999999999.999999999999")
    spend(rupiah, "2026-10-10", 3)
    for payer, count in ((tiered, 11), (per_byte, 12)):
        spend(payer, "2026-10-10")
        adjust(-1, payer=payer.identifier)
        for _credit in range(count):
            adjust(2**40, payer=payer.identifier)
    reports = {report.account: report for report in close("2026-11-02")}
    used = 11 * 2**40
    exact = {
        "rupiah": Fraction(300_000),
        "tiered": 150_000 + (used - 10**13) * Fraction(84, 10**12),
        "bytes": 12 * 2**40 * Fraction(84, 10**12) + Fraction(10**24 - 1, 10**12),
    }
    digits = {"rupiah": 2, "tiered": 2, "bytes": 2}
    for name, amount in exact.items():
        assert owed(reports[name]) == Fraction(round(amount, digits[name])), name
        lines = [row for row in table(reports[name]) if row["charge_category"] != "rounding"]
        assert sum(Fraction(row["amount"]) for row in lines) == amount, name
    assert findings() == ""


def payers_of(dice: random.Random) -> list[Account]:
    """Make twelve accounts with prices of each kind in three currencies; some have a price of tokens too."""
    found = []
    for number in range(12):
        fields: dict[str, Any] = {"unit_price": "0.1234567891"}
        if number % 4:
            fields = {"unit_price": None, "tiers": TIERS, "pricing": ("graduated", "volume")[number % 2]}
        fields |= {"flat_fee": f"{dice.randrange(3)}.005", "minimum": f"{dice.randrange(12)}"}
        fields |= {"fees_due": dice.choice(["usage", "usage", "report"])}
        currency = ("EUR", "JPY", "KWD")[number % 3]
        payer = priced(f"payer-{number}", included=dice.randrange(20), currency=currency, **fields)
        if dice.random() < 0.5:
            charge(payer, meter="tokens", unit_price="0.0000003", minimum="0.0051")
        found.append(payer)
    return found


def due(payer: Account) -> Fraction:
    """Return what an account owes: the price of each period's billed quantities, rounded once per period."""
    assert payer.plan is not None
    plan = Plan.objects.get(slug=payer.plan.slug)
    billed: dict[int, dict[str, Units]] = {}
    for line in ReportLine.objects.filter(report__account=payer.identifier):
        period, units = billed.setdefault(line.usage_period, {}), (line.consumed_quantity - line.refunded_quantity,)
        period[line.meter] = period.get(line.meter, NO_UNITS).plus(Units(*units, line.overage_quantity))
    unit = 10 ** {"EUR": 2, "JPY": 0, "KWD": 3}[plan.currency]
    prices = [(row.meter, row.price()) for row in PlanPrice.objects.filter(plan=plan)]
    exact = (
        sum((modelled(price, units.get(meter, NO_UNITS)) for meter, price in prices), Fraction(0))
        for units in billed.values()
    )
    return sum((Fraction(round(amount * unit), unit) for amount in exact), Fraction(0))


@pytest.mark.parametrize("late", ["version", "period"])
def test_whatever_came_when_the_sum_of_all_versions_is_the_price_of_the_final_quantities(
    late: str, settings: Any
) -> None:
    """Try three rounds of usage, adjustments and closings."""
    settings.RATELIMITS = {**settings.RATELIMITS, "LATE_USAGE": late}
    dice = random.Random(7)
    payers = payers_of(dice)
    for turn in range(3):
        for payer, month, _again in product(payers, ("2026-09", "2026-10"), range(2)):
            about = {"key": f"api_key:{dice.randrange(2)}", "meter": dice.choice(["requests", "tokens"])}
            spend(payer, f"{month}-{dice.randrange(1, 28):02d}", dice.randrange(1, 30), **about)
        opened_late()
        flow()
        for report in Report.objects.filter(version=1).order_by("account", "period_start"):
            if turn and dice.random() < 0.3:
                # Some credits are larger than all usage. Then nothing is owed, but fees that are due with each report.
                adjust(-dice.choice([dice.randrange(1, 9), 500]), iso(report.period_start), report.account)
        close(f"2026-11-0{turn + 2}")
    for payer in payers:
        reports = Report.objects.filter(account=payer.identifier)
        newest = list({report.period_start: report for report in reports.order_by("version")}.values())
        assert sum(map(owed, newest)) == due(payer)
        assert [{Fraction(total) for total in report.amounts["total"].values()} for report in newest] == [
            {owed(report)} for report in newest
        ]
    assert Report.objects.filter(version__gt=1).count() > 5
    assert findings() == ""


def test_the_prices_are_those_at_the_period_s_end_and_stay_with_the_report_whatever_is_edited_since() -> None:
    acme = priced(unit_price="0.10")
    spend(acme, "2026-10-10", 7)
    (report,) = close("2026-11-02")
    before = {name: written(report, name) for name in FORMATS}
    PlanPrice.objects.update(unit_price=Decimal("9.99"))
    Plan.objects.update(currency="USD")
    Account.objects.update(name="Renamed")
    assert {name: written(report, name) for name in FORMATS} == before
    spend(acme, "2026-10-10", 1)
    (second,) = close("2026-11-03")
    assert amounts(second)[-1] == ("2", "usage", "requests", "1", "0.1", "0.1")
    PlanPrice.objects.all().delete()
    assert {name: written(report, name) for name in FORMATS} == before
    assert findings() == ""


def test_an_edit_within_the_period_holds_for_all_of_it_and_one_after_its_end_for_none() -> None:
    acme = priced(unit_price="0.10")
    spend(acme, "2026-10-10", 7)
    row = PlanPrice.objects.get()
    for price, since in (("0.20", 1_792_000_000), ("0.30", 1_793_500_000)):  # in October, in November
        row.unit_price = Decimal(price)
        row.save()
        row.history.filter(version=row.version).update(since=since * 10**6)
    QuerySet(PlanPrice).update(since=1_793_500_000 * 10**6)
    (report,) = close("2026-11-02")
    assert amounts(report) == [("1", "usage", "requests", "2", "0.2", "0.4")]


def test_an_open_period_that_is_over_is_shown_with_the_prices_of_its_end() -> None:
    acme = priced(unit_price="0.10")
    spend(acme, "2026-10-10", 7)
    flow()
    with edit_at("2026-11-01T12:00"):
        PlanPrice.objects.update(unit_price=Decimal("0.30"))
    found = [charge.amount for charge in charges(statements("2026-10"))]
    (report,) = close("2026-11-02")
    assert found == [Decimal("0.20")]
    assert report.amounts["total"] == {"EUR": "0.20"}


def test_prices_that_were_written_past_the_models_hold_too() -> None:
    acme = priced(unit_price="0.10")
    for model in (Plan, PlanPrice):
        model.history.all().delete()
        QuerySet(model).update(since=2**60)
    spend(acme, "2026-10-10", 7)
    (report,) = close("2026-11-02")
    assert amounts(report) == [("1", "usage", "requests", "2", "0.1", "0.2")]
    assert findings() == ""


def test_without_prices_nothing_has_an_amount_and_a_billed_period_stays_so() -> None:
    spend(account(included=5), "2026-10-10", 7)
    (report,) = close("2026-11-02")
    assert (report.prices, report.amounts, amounts(report)) == ({}, {}, [])
    assert {(row["currency"], row["report_total"]) for row in table(report)} == {("", "")}
    PlanPrice.objects.create(plan=Plan.objects.get(), meter="requests", unit_price=Decimal(1))
    Plan.objects.update(currency="EUR")
    spend("acme", "2026-10-10", 1)
    (second,) = close("2026-11-03")
    assert second.prices == {}, "a period that was billed without prices stays so"
    assert findings() == ""


def test_files_of_the_first_schema_have_the_same_bytes_with_prices_and_without() -> None:
    acme = priced(unit_price="0.10", flat_fee="10")
    spend(acme, "2026-10-10", 7)
    (report,) = close("2026-11-02")
    adjust(3)
    (report,) = close("2026-11-03")
    with_prices = {name: written(report, name) for name in FIRST_SCHEMA}
    Report.objects.update(prices={}, amounts={})
    PlanPrice.objects.all().delete()
    Plan.objects.update(currency="")
    report.refresh_from_db()
    assert {name: written(report, name) for name in FIRST_SCHEMA} == with_prices


def test_prices_take_no_query_for_each_account() -> None:
    names = sorted([f"shop-{number}" for number in range(2000) if home_shard(f"shop-{number}") == 3][:10])
    plan = priced(names[0]).plan
    for name in names[1:]:
        Account.objects.create(identifier=name, plan=plan)
    QuerySet(Account).update(since=0)
    Account.history.update(since=0)
    for name in names:
        spend(name, "2026-10-15", 7)
    flow()
    ShardState.objects.update(watermark=at("2026-11-02"))
    taken = []
    for chunk in (names[:2], names[2:]):
        customers = list(Name.objects.filter(identifier__in=chunk).values_list("customer", flat=True))
        with CaptureQueriesContext(connection) as queries:
            reports = close_together("default", customers, at("2026-11-02"))
        assert [report.amounts["total"] for report in reports] == [{"EUR": "0.20"}] * len(chunk)
        taken.append(len(queries))
    few, more = taken
    assert more == few


def test_the_units_of_a_meter_without_a_price_have_no_amount() -> None:
    acme = priced()
    spend(acme, "2026-10-10", 7, meter="tokens")
    (report,) = close("2026-11-02")
    assert amounts(report) == []
    assert report.amounts["total"] == {"EUR": "0.00"}


def test_a_line_leads_to_the_edit_that_made_its_price() -> None:
    spend(priced(unit_price="0.10"), "2026-10-10", 7)
    (report,) = close("2026-11-02")
    PlanPrice.objects.update(unit_price=Decimal(3))
    edits = [(edit.kind, edit.row, edit.did) for edit in terms_edits(report.lines.get(), "default")]
    assert edits[-1] == ("price", "requests per_unit: 0.1", "added")


def test_a_line_leads_to_the_price_of_a_plan_that_ended_before_the_period() -> None:
    spend(priced(unit_price="0.10"), "2026-10-10", 7)
    edits.change("2026-10-20", plan=None)
    (report,) = close("2026-11-02")
    assert report.amounts["total"] == {"EUR": "0.20"}
    shown = [(edit.kind, edit.row, edit.did) for edit in terms_edits(report.lines.get(), "default")]
    assert shown == [("account", "Acme Ltd.", "changed"), ("price", "requests per_unit: 0.1", "added")]


def tampered(report: Report, field: str, change: Any) -> str:
    """Change a report's field without the models; return the findings of verify."""
    value = getattr(report, field)
    change(value)
    QuerySet(Report).filter(pk=report.pk).update(**{field: value})
    return findings()


def test_a_price_that_was_changed_on_a_report_is_named() -> None:
    spend(priced(unit_price="0.10"), "2026-10-10", 7)
    (report,) = close("2026-11-02")
    assert findings() == ""
    period = str(report.period_start // 10**6)

    def cheaper(prices: Any) -> None:
        prices["periods"][period]["meters"]["requests"]["tiers"] = "more: 0.01"

    found = tampered(report, "prices", cheaper)
    assert "its own columns or its lines do not match its digest" in found
    assert "its price of requests has tiers 'more: 0.01', but the configuration's version" in found
    assert "has 'more: 0.1' for requests" in found


@pytest.mark.parametrize(
    ("field", "change", "sentence"),
    [
        (
            "amounts",
            lambda value: value["total"].update(EUR="0.01"),
            "its amounts are 0.01 EUR, but its lines",
        ),
        ("amounts", dict.clear, "its amounts are none, but its lines and prices give 0.20 EUR"),
        ("amounts", lambda value: value.update(total=3), "its prices or amounts do not have the form"),
        ("prices", dict.clear, "its amounts are 0.20 EUR, but its lines and prices give none"),
        ("prices", lambda value: value.update(account_name="x"), "its own columns or its lines do not match"),
    ],
)
def test_changed_amounts_and_prices_are_named(field: str, change: Any, sentence: str) -> None:
    spend(priced(unit_price="0.10"), "2026-10-10", 7)
    (report,) = close("2026-11-02")
    assert sentence in tampered(report, field, change)


@pytest.mark.parametrize(
    "fields",
    [{"amounts": {}}, {"amounts": {"total": 3}}, {"prices": {"periods": {"x": 1}}}, {"prices": {"periods": 3}}],
)
def test_amounts_that_cannot_be_read_are_named_where_they_are_asked_for(
    fields: dict[str, Any], admin_client: Client
) -> None:
    spend(priced(unit_price="0.10"), "2025-10-10", 7)
    (report,) = close("2025-11-02")
    QuerySet(Report).filter(pk=report.pk).update(**fields)
    said = "report acme 2025-10 v1: its prices or amounts do not have the form"
    with pytest.raises(CommandError, match=said):
        call_command("ratelimits_report", period="2025-10", format="csv-amounts", stdout=io.StringIO())
    page = admin_client.get(f"/admin/ratelimits_billing/report/{report.pk}/change/")
    assert said in page.content.decode()


def test_a_later_version_must_have_the_prices_of_the_first() -> None:
    acme = priced(unit_price="0.10")
    spend(acme, "2026-10-10", 7)
    close("2026-11-02")
    spend(acme, "2026-10-10", 1)
    (second,) = close("2026-11-03")

    def cheaper(prices: Any) -> None:
        for record in prices["periods"].values():
            record["meters"]["requests"]["tiers"] = "more: 0.01"

    assert "its prices differ from the prices with which the period was billed for the first time" in tampered(
        second, "prices", cheaper
    )
