"""Test that the main actions of the admin need only a keyboard."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ratelimits.models import Access, Rule
from tests.browser.conftest import Customer
from tests.support.rows import rule

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = [pytest.mark.system, pytest.mark.django_db(transaction=True)]

#: Number of times that Tab is pressed until a test gives up.
_MOST = 150


def tab_to(wanted: Locator) -> None:
    """Press Tab until the wanted element has the focus, and check that it shows the focus."""
    # The element is looked for once: its role and name take the browser longer than a press of Tab.
    page, element = wanted.page, wanted.element_handle()
    for _press in range(_MOST):
        page.keyboard.press("Tab")
        if element.evaluate("element => element === document.activeElement"):
            # A ring, or a darker border, as Django's inputs have.
            assert element.evaluate("element => element.matches(':focus-visible')")
            return
    raise AssertionError(f"{wanted} cannot be reached")


def test_a_rule_is_made_with_a_keyboard(admin_page: Page) -> None:
    page = admin_page
    tab_to(page.locator(".model-rule").get_by_role("link", name="Add"))
    page.keyboard.press("Enter")
    page.get_by_role("link", name="4 at once").wait_for()
    tab_to(page.get_by_role("link", name="4 at once"))
    page.keyboard.press("Enter")
    page.wait_for_url("**algorithm=concurrency**")
    page.locator("[data-ratelimits-preview]").get_by_text("4").first.wait_for()
    tab_to(page.get_by_label("Capacity:"))
    page.keyboard.type("7")
    tab_to(page.get_by_role("button", name="Save", exact=True))
    page.keyboard.press("Enter")
    page.get_by_text("was added successfully").wait_for()
    assert Rule.objects.get().capacity == 7


def test_a_key_is_inspected_and_blocked_with_a_keyboard(admin_page: Page, customer: Customer) -> None:
    page, key = admin_page, customer.api_key.limit_key
    rule("hourly", "fixed_window", capacity=2, period=3600, key_kind="api_key")
    tab_to(page.get_by_role("link", name="Inspector", exact=True))
    page.keyboard.press("Enter")
    page.wait_for_url("**/inspect/")
    page.wait_for_function("document.activeElement.name === 'q'")  # The search gets the focus when the page is loaded.
    page.keyboard.type(key)
    page.keyboard.press("Tab")
    page.keyboard.type("acme")
    page.keyboard.press("Enter")
    page.wait_for_url("**/inspect/?q=*")
    tab_to(page.locator(".ratelimits-action", has_text="Block"))
    page.keyboard.press("Enter")
    page.get_by_label("Reason:", exact=True).wait_for()
    tab_to(page.get_by_label("Reason:", exact=True))
    page.keyboard.type("abuse")
    page.keyboard.press("Enter")
    page.get_by_role("button", name=f"Block {key}").wait_for()
    tab_to(page.get_by_role("button", name=f"Block {key}"))
    page.keyboard.press("Enter")
    page.get_by_text("was added successfully").wait_for()
    assert Access.objects.get().target == key
    assert customer.ask(page) == 403


def test_tables_that_are_wider_than_a_phone_scroll_with_a_keyboard(admin_page: Page, customer: Customer) -> None:
    page = admin_page
    rule("hourly", "fixed_window", capacity=2, period=3600, key_kind="api_key")
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(f"/admin/ratelimits/inspect/?q={customer.api_key.limit_key}&account=acme")
    table = page.get_by_role("region", name="Rules that apply")
    tab_to(table)
    assert table.evaluate("element => element.scrollWidth > element.clientWidth")
    page.keyboard.press("ArrowRight")
    page.wait_for_function("document.activeElement.scrollLeft > 0")
