from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from typing import Any

import openpyxl
import pytest
from django.core.management import call_command
from django.test import Client

from ratelimits.billing.reports.exports import DOWNLOADS
from ratelimits.models import Rule
from tests.support.reports.invoices import close
from tests.support.usage.traffic import flow
from tests.usage.api.test_schema import schema
from tests.usage.api.test_usage import spend

pytestmark = pytest.mark.django_db(transaction=True)

OCTOBER = {"period": "2026-10"}


def body(response: Any) -> bytes:
    assert response.status_code == 200, response.content
    assert response.streaming
    return b"".join(response.streaming_content)


def accounts(response: Any) -> list[tuple[str, str]]:
    lines = csv.DictReader(io.StringIO(body(response).decode()))
    return [(line["account"], line["status"]) for line in lines]


def use_october() -> None:
    for account in ("acme", "other"):
        spend("2026-10-15T12:00", account)
    close("2026-11-02")


def test_a_customer_gets_its_own_report_and_nobody_else_s(customer: Callable[..., Client]) -> None:
    client = customer()
    use_october()
    assert accounts(client.get("/usage/report/", OCTOBER)) == [("acme", "final")]
    assert accounts(client.get("/usage/report/", {**OCTOBER, "account": "acme"})) == [("acme", "final")]
    assert client.get("/usage/report/", {**OCTOBER, "account": "other"}).status_code == 403
    assert accounts(customer(None).get("/usage/report/", OCTOBER)) == []


def test_staff_get_all_reports_or_one_account_s(staff: Client) -> None:
    use_october()
    assert accounts(staff.get("/usage/report/", OCTOBER)) == [("acme", "final"), ("other", "final")]
    assert accounts(staff.get("/usage/report/", {**OCTOBER, "account": "other"})) == [("other", "final")]


def test_who_is_nobody_gets_nothing(client: Client) -> None:
    assert client.get("/usage/report/", OCTOBER).status_code in (401, 403)


def test_an_open_period_is_provisional(customer: Callable[..., Client]) -> None:
    client = customer()
    spend("2026-10-15T12:00")
    flow()
    assert accounts(client.get("/usage/report/", OCTOBER)) == [("acme", "provisional")]


@pytest.mark.parametrize("form", DOWNLOADS.values(), ids=lambda form: form.name)
def test_each_format_is_the_file_that_the_command_writes(staff: Client, tmp_path: Any, form: Any) -> None:
    use_october()
    response = staff.get("/usage/report/", {**OCTOBER, "file": form.name})
    assert response["Content-Type"] == form.content_type
    assert response["Content-Disposition"] == f'attachment; filename="usage-2026-10{form.suffix}"'
    path = tmp_path / "file"
    call_command("ratelimits_report", period="2026-10", format=form.name, output=str(path))
    content = body(response)
    assert content == path.read_bytes()
    if form.module == "xlsxwriter":
        assert openpyxl.load_workbook(io.BytesIO(content)).active["E2"].value == "acme"


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({}, "period"),
        ({"period": "October"}, "period"),
        ({"period": "2026-13"}, "period"),
        ({**OCTOBER, "file": "pdf"}, "file"),
        ({**OCTOBER, "acount": "other"}, "acount"),
    ],
)
def test_what_makes_no_sense_is_refused_by_its_name(staff: Client, parameters: dict[str, str], field: str) -> None:
    response = staff.get("/usage/report/", parameters)
    assert response.status_code == 400
    assert list(response.json()) == [field]


def test_what_is_not_installed_is_said_to_be_so(staff: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ratelimits.billing.reports.exports.find_spec", lambda _name: None)
    assert "pip install" in str(staff.get("/usage/report/", {**OCTOBER, "file": "xlsx"}).json())


def test_it_is_limited_by_the_rules_of_its_scope_alone(customer: Callable[..., Client]) -> None:
    client = customer()
    Rule.objects.create(name="asking", scope="usage", algorithm="fixed_window", capacity=1, period=3600)
    assert body(client.get("/usage/report/", OCTOBER))
    refused = client.get("/usage/report/", OCTOBER)
    assert refused.status_code == 429


def test_a_project_can_have_usage_without_reports(customer: Callable[..., Client], settings: Any) -> None:
    settings.ROOT_URLCONF = "ratelimits.usage.api.urls"
    client = customer()
    assert client.get("/usage/").status_code == 200
    assert client.get("/usage/report/", OCTOBER).status_code == 404


def test_the_schema_describes_it(customer: Callable[..., Client]) -> None:
    described = schema(customer())["paths"]["/usage/report/"]["get"]
    assert {one["name"] for one in described["parameters"]} - {"format"} == {"period", "file", "account"}
    assert "text/csv" in json.dumps(described["responses"]["200"])
