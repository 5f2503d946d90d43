"""Test in a real browser that staff find out why a key is refused, reset it, and block a network."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from ratelimits.models import Access
from ratelimits.quota import from_memory
from tests.browser.conftest import Customer, OpenPage, staff
from tests.support.eventually import until
from tests.support.reports.invoices import spend
from tests.support.rows import rule
from tests.support.usage.traffic import flow

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [
    pytest.mark.system,
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("fsync_at_once"),
]


def test_the_inspector_says_why_a_key_is_refused_and_leads_to_its_reset(admin_page: Page, customer: Customer) -> None:
    from playwright.sync_api import expect

    page = admin_page
    rule("hourly", "fixed_window", capacity=2, period=3600, window_start="first_hit", key_kind="api_key", bills=True)
    assert [customer.ask(page) for _ in range(5)] == [200, 200, 429, 429, 429]
    from_memory.sender.flush()  # the refusals that were repeated from memory
    flow()
    page.get_by_role("link", name="Why was a request refused?").click()
    page.get_by_label("Key, account, user name or address, or a part of it").fill("mobile")
    page.get_by_role("button", name="Inspect").click()
    found = page.get_by_role("heading", name="(acme mobile)")
    several = page.get_by_role("heading", name="Which key do you mean?")
    expect(found.or_(several)).to_be_visible()
    if several.is_visible():
        page.get_by_role("link", name=customer.api_key.limit_key).click()
    found.wait_for()
    limits = page.get_by_role("region", name="Rules that apply").get_by_role("row").filter(has_text="hourly")
    limits.get_by_text("0 / 2").wait_for()
    limits.get_by_text("admits again in").wait_for()
    limits.get_by_text("default rule").wait_for()
    lately = page.get_by_role("region", name="24 hours, by quarter of an hour").get_by_role("row").nth(1)
    expect(lately).to_have_text(re.compile(r"hourly\s*requests\s*3\s*0\s*$"))

    limits.get_by_role("link", name="Reset").click()
    page.get_by_text(f"{customer.api_key.limit_key} (acme mobile)").wait_for()
    page.get_by_label("Reason:").fill("asked for it")
    page.get_by_role("button", name="Show what the reset changes").click()
    page.get_by_role("button", name="Reset").click()
    page.get_by_text("again").first.wait_for()
    # The process may repeat the last refusal for a second.
    until(lambda: customer.ask(page) == 200, "the reset is in force")
    page.goto(f"/admin/ratelimits/inspect/?q={customer.api_key.limit_key}&account=acme")
    page.get_by_text("1 / 2").wait_for()


def test_a_customer_gets_more_from_the_index_alone(admin_page: Page, customer: Customer) -> None:
    page = admin_page
    rule("hourly", "fixed_window", capacity=2, period=3600, window_start="first_hit", key_kind="account")
    assert [customer.ask(page) for _ in range(3)] == [200, 200, 429]
    page.get_by_role("link", name="Give more").click()
    page.get_by_label("For whom").fill("acme")
    page.get_by_role("button", name="Continue").click()
    page.get_by_role("link", name="account:acme (Acme)").click()
    page.get_by_label("How many more:").fill("3")
    page.get_by_label("Reason:").fill("a good customer")
    page.get_by_role("button", name="Show what this changes").click()
    page.get_by_text("account:acme has 0 of 2 left now, and 3 of 5 with the grant.").wait_for()
    page.get_by_role("button", name="Give 3 more requests in each window of 1 hour").click()
    page.get_by_text("account:acme has 3 of 5 left now.").wait_for()
    until(lambda: customer.ask(page) == 200, "the grant is in force")


def test_a_network_is_blocked_and_unblocked(admin_page: Page, customer: Customer) -> None:
    page = admin_page
    assert customer.ask(page) == 200
    page.get_by_role("link", name="Blocks and allows", exact=True).click()
    page.get_by_role("link", name="Add block or allow").click()
    page.get_by_label("Effect:").select_option("block")
    page.get_by_label("Key or network:").fill("127.0.0.0/24")
    page.get_by_label("Reason:", exact=True).fill("a scan")
    page.get_by_role("button", name="Save", exact=True).click()
    page.get_by_text("256 addresses").wait_for()
    page.get_by_text("Your own requests").wait_for()
    assert customer.ask(page) == 200, "nothing is saved yet"
    page.get_by_role("button", name="Block ip:127.0.0.0/24").click()
    page.get_by_text("was added successfully").wait_for()
    assert customer.ask(page) == 403

    page.get_by_role("checkbox", name="Select this object").check()
    page.get_by_label("Action:").select_option("End the selected blocks and allows now")
    page.get_by_role("button", name="Go", exact=True).or_(page.get_by_role("button", name="Run")).click()
    page.get_by_label("Reason:").fill("it was our office")
    page.get_by_role("button", name="End now").click()
    page.get_by_text("Ended: block ip:127.0.0.0/24.").wait_for()
    assert customer.ask(page) == 200
    assert Access.objects.get().history.first().history_change_reason == "it was our office"


def test_who_may_not_change_a_thing_sees_no_button_for_it(open_page: OpenPage, customer: Customer) -> None:
    rule("hourly", "fixed_window", capacity=2, period=3600, key_kind="api_key", mode="shadow")
    spend("acme", "2025-10-15", 7)
    flow()
    Access.objects.create(target="user:7", reason="a scan")
    viewed = ("inspect", "rule", "access", "planmembership", "report", "change", "shadow")
    page = open_page(staff(*(f"view_{name}" for name in viewed)))
    own, key = page.locator("#content"), customer.api_key.limit_key
    for address, buttons in {
        "/admin/": ("Add", "Change", "Status", "Reset a key"),
        f"/admin/ratelimits/inspect/?q={key}&account=acme": (
            "Reset",
            "Give more",
            "Block",
            "Allow",
            "Add an override",
        ),
        "/admin/ratelimits/access/": ("Add block or allow", "Reset a key", "Give more"),
        "/admin/ratelimits/rule/": ("Add rule",),
        "/admin/ratelimits/planmembership/": ("Import a CSV file", "Add plan membership"),
        "/admin/ratelimits_billing/report/open/": ("Close by force",),
        "/admin/ratelimits_usage/shadow/": ("Enforce now",),
        "/admin/ratelimits/change/": ("Undo",),
    }.items():
        response = page.goto(address)
        assert response is not None
        assert response.status == 200, address
        for name in buttons:
            assert own.get_by_role("link", name=name, exact=True).count() == 0, (address, name)
        assert own.get_by_role("button", name=re.compile("Save|Finalise")).count() == 0, address
        assert own.get_by_label("Action:").count() == 0, address
