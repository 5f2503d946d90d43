"""Test numbers that people type in forms, files and commands: a thousand is never read as one."""

from __future__ import annotations

import io
import json
import re
from decimal import Decimal
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.test import Client

from ratelimits.billing.models import Adjustment, PlanPrice
from ratelimits.models import KeyOverride, Plan, PlanInclusion, Rule
from tests.admin.test_adjustments import sent_again, typed
from tests.admin.test_prices import FORMS, price
from tests.admin.test_row_files import confirmed, upload
from tests.admin.test_rules import BUCKET
from tests.support.reports.invoices import account, spend
from tests.support.rows import rule
from tests.support.selection import few
from tests.support.usage.traffic import flow

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fsync_at_once")]

BASE = "/admin/ratelimits"
TWO = "can mean 1 or 1000: write one of these two."
PLAN = {"name": "Pro", "slug": "pro", "currency": "EUR", **FORMS}
INCLUDED = {"prices-TOTAL_FORMS": "0", "inclusions-TOTAL_FORMS": "1", "inclusions-0-meter": "requests"}


@pytest.fixture(params=few(["en", "de"], "de"))
def german(request: pytest.FixtureRequest, settings: Any) -> bool:
    """Let the admin speak English or German. Return whether it speaks German."""
    settings.LANGUAGES, settings.LANGUAGE_CODE = [(request.param, request.param)], request.param
    return bool(request.param == "de")


def shown(page: Any, name: str) -> str:
    """Return the value that the page shows in an input."""
    found = re.search(rf'<input[^>]*name="{name}"[^>]*>', page.content.decode())
    value = found and re.search(r'value="([^"]*)"', found[0])
    return unescape(value[1]) if value else ""


def test_a_thousand_in_a_form_is_read_by_the_language_or_refused(admin_client: Client, german: bool) -> None:
    spend(account(included=40), "2026-10-15", 50)
    flow()
    acme = Plan.objects.get()
    forms: dict[str, tuple[str, dict[str, str], str, Any]] = {
        "capacity": (f"{BASE}/rule/add/", BUCKET, "capacity", lambda: Rule.objects.get().capacity),
        "rate": (f"{BASE}/rule/add/", BUCKET, "rate", lambda: Rule.objects.get().rate),
        "period": (f"{BASE}/rule/add/", BUCKET, "period", lambda: Rule.objects.get().period),
        "included": (f"{BASE}/plan/add/", {**PLAN, **INCLUDED}, "inclusions-0-quantity", None),
        "price": (f"{BASE}/plan/add/", {**PLAN, **price()}, "prices-0-unit_price", None),
        "adjustment": (
            "/admin/ratelimits_billing/adjustment/add/",
            typed(),
            "quantity",
            lambda: Adjustment.objects.get().quantity,
        ),
    }
    forms["included"] = (*forms["included"][:3], lambda: PlanInclusion.objects.exclude(plan=acme).get().quantity)
    forms["price"] = (*forms["price"][:3], lambda: PlanPrice.objects.get().unit_price)
    for about, (url, values, field, saved) in forms.items():
        # In English "1.000" is 1, and in German "1,000" is 1. Each is a thousand to somebody.
        decimal_sign, thousands = (",", ".") if german else (".", ",")
        refused = admin_client.post(url, {**values, field: f"1{decimal_sign}000"})
        assert refused.status_code == 200, about
        assert f"“1{decimal_sign}000” {TWO}" in unescape(refused.content.decode()), about
        for text in (f"1{thousands}000", "1 000"):
            page = admin_client.post(url, {**values, field: text})
            if about == "adjustment":
                page = admin_client.post(url, sent_again(page, _large_meant="1"))
            assert page.status_code == 302, about
            assert saved() == 1000, about
            Rule.objects.all().delete()
            Adjustment.objects.all().delete()
            Plan.objects.exclude(pk=acme.pk).delete()


def test_what_a_form_shows_it_reads_as_the_same_number(admin_client: Client, german: bool) -> None:
    row = rule(rate="1.125", capacity=1000, period="0.125")
    url = f"{BASE}/rule/{row.pk}/change/"
    page = admin_client.get(url)
    names = ("rate", "capacity", "period", "initial-period")
    values = {name: shown(page, name) for name in names}
    assert values["rate"] == ("1,125" if german else "1.125")
    assert values["initial-period"] == values["period"] == ("0,125" if german else "0.125")
    assert admin_client.post(url, {**BUCKET, **values, "mode": "shadow"}).status_code == 302
    row.refresh_from_db()
    assert (row.rate, row.capacity, row.period, row.mode) == (Decimal("1.125"), 1000, Decimal("0.125"), "shadow")


def test_a_link_to_a_form_has_a_decimal_point_in_every_language(admin_client: Client, german: bool) -> None:
    page = admin_client.get(f"{BASE}/rule/add/?capacity=1000&rate=1.125&period=1.5&algorithm=token_bucket")
    assert shown(page, "rate") == ("1,125" if german else "1.125")
    assert (shown(page, "capacity"), shown(page, "period")) == ("1000", "1,5" if german else "1.5")


def test_a_typed_rate_is_read_by_the_language(admin_client: Client, german: bool) -> None:
    wrong, right = ("1,000/min", "1.000/min") if german else ("1.000/min", "1,000/min")
    values = {name: text for name, text in BUCKET.items() if name not in ("rate", "period")}
    page = admin_client.post(f"{BASE}/rule/add/", {**values, "rate": wrong, "period": ""})
    assert TWO in unescape(page.content.decode())
    admin_client.post(f"{BASE}/rule/add/", {**values, "rate": right, "period": ""})
    assert (Rule.objects.get().rate, Rule.objects.get().period) == (1000, 60)


@pytest.mark.usefixtures("german")
def test_numbers_of_files_and_commands_have_a_decimal_point_in_every_language(
    admin_client: Client, tmp_path: Path
) -> None:
    rule()

    def imported(number: str) -> str:
        page = upload(
            admin_client, f"{BASE}/keyoverride/", "key,rule,capacity,reason", f'user:1,burst,"{number}",asked'
        )
        page = admin_client.get(page["Location"])
        confirmed(admin_client, page, change_reason="asked")
        return unescape(page.content.decode())

    for number in ("1.000", "1,000"):
        assert f"“{number}” {TWO}" in imported(number)
        with pytest.raises(CommandError, match=re.escape(TWO)):
            call_command("ratelimits_key", "grant", "user:1", "burst", number, "--until", "1h", "--reason", "asked")
    assert not KeyOverride.objects.exists()
    imported("1 000")
    assert KeyOverride.objects.get().capacity == 1000
    document = tmp_path / "rules.json"
    for number in ("1.000", "12.500"):
        document.write_text(json.dumps({"rules": [{"name": "a", "capacity": 5, "rate": "RATE", "period": 1}]}))
        document.write_text(document.read_text().replace('"RATE"', number))
        with pytest.raises(CommandError, match="write one of these two"):
            call_command("ratelimits_rules", "load", str(document), stdout=io.StringIO())
