"""Test prices in the admin: typed on a plan's page, refused if they make no sense, and shown with a report."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from ratelimits.billing.models import PlanPrice, Report
from ratelimits.models import Plan
from ratelimits.usage.models import ShardState
from tests.support.reports.invoices import close, spend
from tests.support.reports.priced import TIERS, priced
from tests.support.usage.traffic import at, flow

pytestmark = pytest.mark.django_db

ADD = "/admin/ratelimits/plan/add/"
FORMS = {
    **{f"{name}-{count}_FORMS": "0" for name in ("inclusions", "prices") for count in ("TOTAL", "INITIAL")},
    "prices-TOTAL_FORMS": "1",
}
PLAN = {"name": "Pro", "slug": "pro", "currency": "EUR", **FORMS}


def price(**fields: str) -> dict[str, str]:
    """Return the form fields of a plan's first price."""
    return {
        f"prices-0-{name}": text
        for name, text in {
            "meter": "requests",
            "pricing": "per_unit",
            "flat_fee": "0",
            "minimum": "0",
            "fees_due": "usage",
            **fields,
        }.items()
    }


def wrong(response: Any) -> dict[str, str]:
    """Return the error messages at the fields of the plan and of its prices."""
    assert response.status_code == 200
    context = response.context
    forms = [context["adminform"].form]
    forms += [form for inline in context["inline_admin_formsets"] for form in inline.formset.forms]
    return {name: " ".join(texts) for form in forms for name, texts in form.errors.items()}


def test_a_price_is_typed_on_its_plan_s_page_and_has_a_history(admin_client: Client) -> None:
    typed = price(pricing="graduated", tiers="1000: 0.10\r\nmore: 0.050 + 5", minimum="20")
    assert admin_client.post(ADD, {**PLAN, **typed}).status_code == 302
    row = PlanPrice.objects.get()
    assert (row.tiers, row.minimum, row.plan.currency) == ("1000: 0.1\nmore: 0.05 + 5", Decimal(20), "EUR")
    assert str(row) == "requests graduated: 1000: 0.1; more: 0.05 + 5, minimum 20"
    (record,) = row.history.all()
    assert (record.history_type, str(record.history_user), record.version) == ("+", "admin", row.version)
    page = admin_client.get(reverse("admin:ratelimits_plan_change", args=[row.plan_id])).content.decode()
    assert "1000: 0.1\nmore: 0.05 + 5" in page


def test_a_price_keeps_every_digit_that_it_may_have(admin_client: Client) -> None:
    admin_client.post(ADD, {**PLAN, **price(unit_price="999999999999.999999999999", flat_fee="100000000000")})
    row = PlanPrice.objects.get()
    assert (row.unit_price, row.flat_fee) == (Decimal("999999999999.999999999999"), Decimal(100_000_000_000))
    assert PlanPrice.history.get().unit_price == row.unit_price


@pytest.mark.parametrize(
    ("typed", "field", "sentence"),
    [
        ({"flat_fee": "1"}, "unit_price", "Write the price of one unit, such as 0.10, or 0 if units are free."),
        ({"unit_price": "-1"}, "unit_price", "A price cannot be below 0. To give units back, use an adjustment."),
        ({"unit_price": "0.0000000000001"}, "unit_price", "no more than 12 decimal places"),
        ({"unit_price": "1000000000000"}, "unit_price", "no more than 12 digits before the decimal point"),
        ({"unit_price": "1.000"}, "unit_price", "“1.000” can mean 1 or 1000: write one of these two."),
        ({"unit_price": "1", "fees_due": "never"}, "fees_due", "not one of the available choices"),
        ({"unit_price": "1", "tiers": TIERS}, "tiers", "A price per unit has no tiers: choose graduated or volume"),
        (
            {"unit_price": "1", "pricing": "volume", "tiers": TIERS},
            "unit_price",
            "Leave this empty, because the tiers contain the prices",
        ),
        ({"pricing": "volume"}, "tiers", "there are no tiers: write a tier as"),
        ({"pricing": "volume", "tiers": "10: 1"}, "tiers", "there is no price for units beyond 10"),
        ({"unit_price": "1", "minimum": "-1"}, "minimum", "A price cannot be below 0"),
        ({"unit_price": "1", "pricing": "free"}, "pricing", "not one of the available choices"),
    ],
)
def test_what_is_no_price_is_refused_at_its_field(
    admin_client: Client, typed: dict[str, str], field: str, sentence: str
) -> None:
    errors = wrong(admin_client.post(ADD, {**PLAN, **price(**typed)}))
    assert sentence in errors[field]
    assert not Plan.objects.exists()


def test_prices_need_a_currency_that_there_is(admin_client: Client) -> None:
    typed = {**PLAN, **price(unit_price="1")}
    assert "The plan has no currency" in wrong(admin_client.post(ADD, {**typed, "currency": ""}))["meter"]
    assert "is not a currency of ISO 4217" in wrong(admin_client.post(ADD, {**typed, "currency": "EUX"}))["currency"]
    admin_client.post(ADD, typed)
    plan = Plan.objects.get()
    change = {**PLAN, "prices-TOTAL_FORMS": "0", "currency": ""}
    found = wrong(admin_client.post(reverse("admin:ratelimits_plan_change", args=[plan.pk]), change))
    assert "The plan has prices, and prices need a currency" in found["currency"]


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("fsync_at_once")
def test_a_report_s_page_says_what_each_line_and_the_account_owe(admin_client: Client) -> None:
    acme = priced(included=5, pricing="graduated", unit_price=None, tiers=TIERS)
    spend(acme, "2026-10-10", 20)
    close("2026-11-02")
    spend(acme, "2026-10-10", 1)
    close("2026-11-03")
    first, second = (
        admin_client.get(reverse("admin:ratelimits_billing_report_change", args=[report.pk])).content.decode()
        for report in Report.objects.order_by("version")
    )
    assert "requests: 15 units beyond the included quantity, 14.5 EUR" in first
    assert "owed for this report up to this version: 14.50 EUR" in first
    assert "14.5 EUR" in first.partition("inline")[2]
    assert "requests: 16 units beyond the included quantity (15 before this version), 0.5 EUR" in second
    assert "this version, for the period from 2026-10-01: 0.50 EUR, rounded" in second
    assert "owed for this report up to this version: 15.00 EUR" in second


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("fsync_at_once")
def test_amounts_that_belong_to_no_line_are_shown_with_their_meter(admin_client: Client) -> None:
    acme = priced(included=1, pricing="volume", unit_price=None, tiers=TIERS, flat_fee="4.005", minimum="16")
    spend(acme, "2026-10-10", 8)
    close("2026-11-02")
    spend(acme, "2026-10-10", 6)
    close("2026-11-03")
    first, second = (
        admin_client.get(reverse("admin:ratelimits_billing_report_change", args=[report.pk])).content.decode()
        for report in Report.objects.order_by("version")
    )
    start = "<div>requests: 7 units beyond the included quantity, 16 EUR</div><div>– of these, "
    assert f"{start}fees: 4.005 EUR</div><div>– of these, added to reach the minimum: 4.995 EUR</div>" in first
    assert "rounding: " not in first
    # 13 units at 0.5 instead of 7 at 1, a tier fee of 2 and the flat fee: 12.505 is still below the minimum.
    assert "<div>– of these, fees: 2 EUR</div>" in second
    assert "<div>– of these, another price for units of earlier versions: -3.5 EUR</div>" in second
    assert "<div>– of these, added to reach the minimum: -1.5 EUR</div>" in second


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("fsync_at_once")
def test_the_rounding_is_shown_and_a_preview_has_the_fees(admin_client: Client) -> None:
    spend(priced(included=5, unit_price="0.105", flat_fee="10"), "2026-10-10", 8)
    flow()
    ShardState.objects.update(watermark=at("2026-11-02"))
    preview = admin_client.post("/admin/ratelimits_billing/report/finalise/", {"all": "1"}).content.decode()
    assert "<td>10.315 EUR (fees: 10 EUR)</td>" in preview
    (report,) = close("2026-11-02")
    page = admin_client.get(reverse("admin:ratelimits_billing_report_change", args=[report.pk])).content.decode()
    assert "<div>– of these, fees: 10 EUR</div><div>rounding: 0.005 EUR</div><div>this version" in page
