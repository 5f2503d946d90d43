"""Test in a real browser that staff finalise an open billing period and download its report."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING

import pytest

from ratelimits.billing.models import Report
from tests.support.reports.invoices import account, spend
from tests.support.usage.traffic import flow

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [
    pytest.mark.system,
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("fsync_at_once"),
]


def test_an_open_period_is_finalised_after_a_preview_and_exported(admin_page: Page) -> None:
    from playwright.sync_api import expect

    page = admin_page
    spend(account(included=5), "2025-10-15", 7)
    flow()
    page.get_by_role("link", name="Reports", exact=True).click()
    page.get_by_role("link", name="Open periods and the reasons why they are open").click()
    page.get_by_role("checkbox", name="Finalise acme").check()
    page.get_by_role("button", name="Finalise the chosen periods").click()
    preview = page.get_by_role("region", name="acme, October 2025")
    for place, figure in enumerate(["7", "0", "5", "2"]):
        expect(preview.get_by_role("cell").nth(place)).to_have_text(figure)
    assert not Report.objects.exists(), "nothing is finalised yet"
    page.get_by_role("button", name="Finalise 1 report").click()
    page.get_by_text("1 report was finalised").wait_for()

    report = Report.objects.get()
    page.goto(f"/admin/ratelimits_billing/report/{report.pk}/change/")
    with page.expect_download() as download:
        page.get_by_role("link", name="CSV", exact=True).click()
    (line,) = csv.DictReader(download.value.path().read_text().splitlines())
    assert (line["account"], line["consumed_quantity"], line["overage_quantity"]) == ("acme", "7", "2")
