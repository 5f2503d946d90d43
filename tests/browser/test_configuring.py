"""Test in a real browser that staff make a rule, import memberships and undo a change, and that the API obeys."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ratelimits.models import ConfigVersion, Plan, PlanMembership, Rule
from tests.browser.conftest import Customer
from tests.support.rows import rule

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.system, pytest.mark.django_db(transaction=True)]


def test_a_rule_is_made_from_a_starting_point_and_the_next_request_obeys(admin_page: Page, customer: Customer) -> None:
    from playwright.sync_api import expect

    page = admin_page
    assert customer.ask(page) == 200
    page.locator(".model-rule").get_by_role("link", name="Add").click()
    page.get_by_role("link", name="5 per second, bursts to 10").click()
    sentence = page.locator("[data-ratelimits-preview]")
    sentence.get_by_text("5 requests per second, bursts to 10, per caller.").wait_for()
    charts = page.locator("[data-ratelimits-trial]")
    charts.get_by_role("img").first.wait_for()
    assert not page.get_by_label("Calendar unit:").is_visible(), "the algorithm has no such field"

    drawn = charts.inner_html()
    page.get_by_label("Capacity:").fill("2")
    page.get_by_label("Period:", exact=True).fill("")
    page.get_by_label("Rate:").fill("1/h")
    sentence.get_by_text("1 request per hour, bursts to 2, per caller.").wait_for()
    page.wait_for_function(
        "before => document.querySelector('[data-ratelimits-trial]').innerHTML !== before", arg=drawn
    )
    expect(charts.get_by_role("img")).to_have_count(2)
    page.get_by_label("Why this change:").scroll_into_view_if_needed()
    top = "document.querySelector('.ratelimits-reads').getBoundingClientRect().top"
    assert page.evaluate(top) >= 0, "the sentence stays in view"

    page.get_by_role("button", name="Save", exact=True).click()
    page.get_by_text("was added successfully").wait_for()
    row = Rule.objects.get()
    assert (row.capacity, row.rate, row.period) == (2, 1, 3600)
    assert [customer.ask(page) for _ in range(3)] == [200, 200, 429]


def test_500_memberships_are_imported_but_3_bad_rows(admin_page: Page, tmp_path: Path) -> None:
    page = admin_page
    Plan.objects.create(name="Pro", slug="pro")
    before = ConfigVersion.read("default")[0]
    rows = [f"user:{n},pro" for n in range(500)]
    rows[10], rows[20], rows[30] = "user:10,gold", "20", "user 30,pro"
    file = tmp_path / "memberships.csv"
    file.write_text("\n".join(["key,plan", *rows]))

    page.get_by_role("link", name="Plan memberships", exact=True).click()
    page.get_by_role("link", name="Import a CSV file").click()
    page.get_by_label("File:").set_input_files(file)
    page.get_by_role("button", name="Show the differences").click()
    page.get_by_role("heading", name="Wrong lines: 3").wait_for()
    page.get_by_role("heading", name="New rows: 497").wait_for()
    page.get_by_text("There is no plan with the slug “gold”").wait_for()
    page.get_by_label("Why this change:").fill("OPS-17")
    page.get_by_role("button", name="Import 497 rows").click()
    page.get_by_text("tick the box that leaves them out").wait_for()
    assert not PlanMembership.objects.exists()

    page.get_by_label("Import the 497 correct rows, and leave the wrong lines out").check()
    page.get_by_role("button", name="Import 497 rows").click()
    page.get_by_text("497 rows were imported").wait_for()
    assert PlanMembership.objects.count() == 497
    assert ConfigVersion.read("default")[0] == before + 1
    with page.expect_download() as download:
        page.get_by_role("link", name="Export these rows as CSV").click()
    assert download.value.path().read_text("utf-8-sig").count(",pro,") == 497


def test_a_change_is_undone(admin_page: Page, customer: Customer) -> None:
    page = admin_page
    row = rule("hourly", "fixed_window", capacity=100, period=3600, window_start="first_hit", key_kind="api_key")
    page.goto(f"/admin/ratelimits/rule/{row.pk}/change/")
    page.get_by_label("Capacity:").fill("1")
    page.get_by_label("Why this change:").fill("a slip of the hand")
    page.get_by_role("button", name="Save", exact=True).click()
    page.get_by_text("was changed successfully").wait_for()
    assert [customer.ask(page) for _ in range(2)] == [200, 429]

    page.goto("/admin/")
    page.get_by_role("link", name="All changes", exact=True).click()
    line = page.get_by_role("row").filter(has_text="a slip of the hand")
    line.get_by_text("capacity: 100 → 1").wait_for()
    line.get_by_role("link", name="Undo").click()
    page.get_by_role("heading", name="Undo the change of rule hourly").wait_for()
    page.get_by_label("Why this change:").fill("it was a slip")
    page.locator("#content").get_by_role("button").click()
    page.get_by_text("Undone:").wait_for()
    row.refresh_from_db()
    assert row.capacity == 100
