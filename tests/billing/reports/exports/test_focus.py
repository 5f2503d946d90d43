"""Test files with amounts: the second schema as CSV and JSON, and FOCUS."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import openpyxl
import pytest
from django.core.management import call_command
from jsonschema import Draft202012Validator

from ratelimits.billing.models import Report
from ratelimits.billing.reports.exports import FORMATS, focus
from ratelimits.billing.reports.exports import amounts as with_amounts
from ratelimits.billing.reports.exports import json as first_schema
from ratelimits.billing.reports.rows import COLUMNS, Charge
from ratelimits.billing.reports.statements import statements
from ratelimits.billing.reports.statements.charges import lines_for
from tests.billing.reports.exports.samples import ROW, awkward, priced
from tests.support.reports.invoices import account, close, spend, token
from tests.support.reports.priced import TIERS, charge, table
from tests.support.reports.priced import priced as payer
from tests.support.reports.priced import written as in_format
from tests.support.usage.traffic import flow

PAGE = (Path(__file__).parents[4] / "docs" / "exports" / "focus.md").read_text()


def written(name: str, charges: list[Charge]) -> str:
    return b"".join(FORMATS[name].stream(charges)).decode()


def test_the_second_schema_is_the_first_and_then_the_money() -> None:
    Draft202012Validator.check_schema(with_amounts.schema())
    first, second = (schema["$defs"]["line"] for schema in (first_schema.schema(), with_amounts.schema()))
    assert tuple(second["properties"]) == tuple(second["required"]) == with_amounts.COLUMNS
    assert (*COLUMNS, *with_amounts.MONEY) == with_amounts.COLUMNS
    published = Path("ratelimits/billing/reports/schema/report.v2.json")
    assert with_amounts.schema(1) == json.loads(published.read_text())  # what was published stays
    same = first["properties"].keys() - {"charge_category"}
    assert {name: second["properties"][name] for name in same} == {name: first["properties"][name] for name in same}
    assert all(described["description"] for described in second["properties"].values())


def test_json_with_amounts_validates_and_keeps_texts_as_they_are() -> None:
    charges = [Charge(ROW), *map(priced, awkward())]
    charges = [charges[0], *(each._replace(account_name=each.row.account) for each in charges[1:])]
    document = json.loads(written("json-amounts", charges))
    Draft202012Validator(with_amounts.schema()).validate(document)
    unpriced, *lines = document["lines"]
    assert [unpriced[name] for name in with_amounts.MONEY] == [""] * 5
    assert [line["account_name"] for line in lines] == [row.account for row in awkward()]
    assert {line["amount"] for line in lines} == {"0.315"}


@pytest.mark.parametrize("name", ["csv-amounts", "focus"])
def test_no_text_of_a_csv_is_a_formula_and_amounts_below_zero_stay_numbers(name: str) -> None:
    charge = priced(ROW)._replace(account_name="=1+1", amount=Decimal("-0.5"), parts=())
    (row,) = csv.DictReader(io.StringIO(written(name, [charge._replace(row=ROW._replace(charge_category="rounding"))])))
    column = {"csv-amounts": ("account_name", "amount"), "focus": ("BillingAccountName", "BilledCost")}[name]
    assert [row[each] for each in column] == ["'=1+1", "-0.5"]


@pytest.mark.django_db(transaction=True)
def test_a_workbook_says_what_each_account_owes_in_numbers() -> None:
    report = _used()
    book = openpyxl.load_workbook(io.BytesIO(in_format(report, "xlsx-amounts")))
    lines = list(book["Report"].iter_rows(values_only=True))
    assert lines[0] == with_amounts.COLUMNS
    amounts = [row[-2] for row in lines[1:] if row[-2] is not None]
    assert sum(map(Decimal, map(str, amounts))) == Decimal(report.amounts["total"]["EUR"])
    header, *totals = book["Totals"].iter_rows(values_only=True)
    assert header == ("row", "account", "customer", "account_name", "status", "meter", "currency", "amount")
    assert {row[1:5] for row in totals[:-1]} == {("acme", report.customer_id, "Acme Ltd.", "final")}
    assert [row[0] for row in totals] == ["rounding", *["meter"] * 3, "account", "all accounts"]
    # What the account owes is said, and each kind of rows adds up to it.
    owed = float(report.amounts["total"]["EUR"])
    assert totals[-2:] == [
        ("account", "acme", report.customer_id, "Acme Ltd.", "final", None, "EUR", owed),
        ("all accounts", None, None, None, "final", None, "EUR", owed),
    ]
    parts = [row for row in totals if row[0] in ("rounding", "meter")]
    assert sum(Decimal(str(row[-1])) for row in parts) == Decimal(report.amounts["total"]["EUR"])


@pytest.mark.django_db(transaction=True)
def test_the_totals_of_a_month_have_a_total_of_each_currency() -> None:
    payers = [
        payer(name, currency=currency) for name, currency in (("a", "EUR"), ("b", "EUR"), ("c", "JPY"), ("d", "EUR"))
    ]
    for each in payers:
        spend(each, "2026-10-10", 20)
    close("2026-11-02")
    spend(payers[3], "2026-10-10", 20, key="api_key:2")
    spend(payers[3], "2026-11-10", 30)
    flow()
    form = FORMATS["xlsx-amounts"]
    for month in ("2026-10", "2026-11"):
        found = list(statements(month))
        book = openpyxl.load_workbook(io.BytesIO(b"".join(form.stream(lines_for(form, found)))))
        _header, *totals = book["Totals"].iter_rows(values_only=True)
        of_accounts: Counter[tuple[str, str]] = Counter()
        for kind, _account, _token, _name, status, _meter, currency, amount in totals:
            if kind == "account":
                of_accounts[status, currency] += round(Decimal(str(amount)) * 100)
        last = {(row[4], row[6]): round(Decimal(str(row[-1])) * 100) for row in totals if row[0] == "all accounts"}
        assert last == dict(of_accounts)
        assert last.keys() == ({("final", "EUR"), ("final", "JPY")} if month == "2026-10" else {("provisional", "EUR")})


@pytest.mark.django_db(transaction=True)
def test_the_sum_of_an_invoice_never_changes() -> None:
    """Each version of a report is an invoice. Charges of an open period are on none."""
    acme = payer(flat_fee="3")

    def invoices() -> dict[str, Decimal]:
        sums: dict[str, Decimal] = {}
        form = FORMATS["focus"]
        text = b"".join(form.stream(lines_for(form, statements("2026-10")))).decode()
        for row in csv.DictReader(io.StringIO(text)):
            sums[row["InvoiceId"]] = sums.get(row["InvoiceId"], Decimal(0)) + Decimal(row["BilledCost"])
        return sums

    spend(acme, "2026-10-10", 20)
    flow()
    assert invoices() == {"": Decimal("4.5")}
    close("2026-11-02")
    first = {f"{token()}.20261001T000000Z.v1": Decimal("4.5")}
    assert invoices() == first
    spend(acme, "2026-10-12", 1)
    close("2026-11-03")
    assert invoices() == first | {f"{token()}.20261001T000000Z.v2": Decimal("0.1")}


def _used() -> Report:
    """Make two versions of October for an account with graduated prices, fees and a minimum; another has no prices."""
    acme = payer(included=5, pricing="graduated", unit_price=None, tiers=TIERS, flat_fee="3")
    charge(acme, meter="tokens", unit_price="0.000003", minimum="1")
    spend(acme, "2026-10-10", 20)
    spend(acme, "2026-10-11", 10, key="api_key:2")
    spend(acme, "2026-10-11", 4, meter="tokens")
    spend(acme, "2026-10-11", 4, meter="pages")
    spend(account("other"), "2026-10-11", 4)
    close("2026-11-02")
    spend(acme, "2026-10-12", 1)
    close("2026-11-03")
    return Report.objects.get(version=2)


@pytest.mark.django_db(transaction=True)
def test_in_focus_quantity_times_price_is_cost_and_costs_add_up_to_what_is_owed() -> None:
    report = _used()
    rows = table(report, "focus")
    assert tuple(rows[0]) == focus.COLUMNS
    for row in rows:
        assert row["BilledCost"] == row["EffectiveCost"] == row["ListCost"] == row["ContractedCost"]
        if row["PricingQuantity"]:
            assert Fraction(row["PricingQuantity"]) * Fraction(row["ListUnitPrice"]) == Fraction(row["BilledCost"])
        assert row["ChargeClass"] == ("Correction" if row["x_ReportVersion"] == "2" else "")
        assert (row["BillingAccountId"], row["BillingAccountName"], row["BillingCurrency"]) == (
            *(token(), "Acme Ltd.", "EUR"),
        )
    assert sum(Fraction(row["BilledCost"]) for row in rows) == Fraction(report.amounts["total"]["EUR"])
    consumed = sum(int(row["ConsumedQuantity"] or 0) for row in rows if row["ServiceName"] == "requests")
    assert consumed == 31
    assert [
        (row["SubAccountId"], row["PricingQuantity"], row["ListUnitPrice"], row["ChargeCategory"])
        for row in rows
        if row["ServiceName"] == "requests"
    ] == [
        ("api_key:1", "5", "0", "Usage"),
        ("api_key:1", "10", "1", "Usage"),
        ("api_key:1", "5", "0.5", "Usage"),
        ("api_key:2", "5", "0.5", "Usage"),
        ("api_key:2", "5", "0.333", "Usage"),
        ("", "1", "5", "Purchase"),
        ("api_key:1", "1", "0.333", "Usage"),
    ]
    free = [row["BilledCost"] for row in rows if row["ServiceName"] == "pages"]
    assert free == ["0"]


@pytest.mark.django_db(transaction=True)
def test_the_snippet_of_the_page_adds_up_what_accounts_owe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = _used()
    monkeypatch.chdir(tmp_path)
    call_command("ratelimits_report", period="2026-10", output="november.focus.csv", stderr=io.StringIO())
    (snippet,) = re.findall(r"```python\n(import csv\n.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(snippet, "docs/exports/focus.md", "exec"), names)
    assert dict(names["owed"]) == {(token(), "EUR"): Decimal(report.amounts["total"]["EUR"])}


@pytest.mark.django_db(transaction=True)
def test_an_open_period_is_priced_as_it_stands() -> None:
    """Use a volume price, so that the price of the first line depends on the last line."""
    acme = payer(included=0, pricing="volume", unit_price=None, tiers=TIERS)
    for key in ("api_key:1", "api_key:2"):
        spend(acme, "2026-10-10", 6, key=key)
    flow()
    out = io.StringIO()
    call_command("ratelimits_report", period="2026-10", format="csv-amounts", stdout=out, stderr=io.StringIO())
    rows = list(csv.DictReader(io.StringIO(out.getvalue())))
    assert [(row["status"], row["charge_category"], row["amount"], row["report_total"]) for row in rows] == [
        ("provisional", "usage", "3", "8.00"),
        ("provisional", "usage", "3", "8.00"),
        ("provisional", "fee", "2", "8.00"),
    ]


@pytest.mark.django_db(transaction=True)
def test_an_account_that_used_nothing_owes_nothing_since_it_gets_no_report() -> None:
    payer(flat_fee="3")
    out = io.StringIO()
    options = {"period": "2026-10", "format": "csv-amounts", "all_accounts": True}
    call_command("ratelimits_report", stdout=out, stderr=io.StringIO(), **options)
    (row,) = csv.DictReader(io.StringIO(out.getvalue()))
    assert (row["account"], row["amount"], row["report_total"]) == ("acme", "", "")


def test_every_column_of_focus_is_explained() -> None:
    explained = set(re.findall(r"`(\w+)`", PAGE))
    assert set(focus.COLUMNS) - explained == set()
