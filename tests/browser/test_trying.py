"""Test in a real browser that staff try a rule on recorded requests, and enforce a rule that was in shadow mode."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from ratelimits.identity import Identity
from ratelimits.models import Rule
from ratelimits.quota.checking import check
from ratelimits.usage import recording
from tests.browser.conftest import OpenPage, staff
from tests.support.rows import rule
from tests.support.usage.traffic import flow

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [
    pytest.mark.system,
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("fsync_at_once"),
]

#: The width of a phone, in CSS pixels.
PHONE = {"width": 390, "height": 844}


def fits(page: Page) -> bool:
    """Return whether the page has no horizontal scroll bar."""
    return bool(page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"))


def test_a_typed_rule_is_tried_on_the_requests_of_the_last_24_hours(open_page: OpenPage) -> None:
    from playwright.sync_api import expect

    start = (int(time.time()) - 600) * 1_000_000
    requests = [(start + n, Identity(f"user:{n % 3}"), "*", "GET", {"requests": 1}, False) for n in range(60)]
    recording.write_rows(requests)
    row = rule("hourly", "fixed_window", key_kind="user", capacity=50, period=86_400, window_start="first_hit")
    page = open_page(staff(), viewport=PHONE)
    page.goto(f"/admin/ratelimits/rule/{row.pk}/change/")
    page.get_by_label("Capacity:").fill("15")
    page.get_by_text("Recorded requests: the newest 1 hour").wait_for()
    with page.context.expect_page() as opened:
        page.get_by_role("button", name="requests of the last 24 hours").click()
    tried = opened.value
    tried.get_by_text("would have refused 15 requests of 3 keys").wait_for()
    expect(tried.get_by_role("link", name="user:1")).to_have_count(1)
    assert fits(tried)
    row.refresh_from_db()
    assert row.capacity == 50, "nothing was saved"


def test_a_shadow_rule_is_enforced_after_a_look_at_whom_it_hits(open_page: OpenPage) -> None:
    row = rule("strict", capacity=2, rate="0.000001", mode="shadow")
    who = Identity("user:1", account="account:acme")
    assert all(check(who).allowed for _ in range(5))
    flow()
    page = open_page(staff(), viewport=PHONE)
    page.goto("/admin/")
    page.locator(".model-shadow").get_by_role("link", name="Shadow refusals").first.click()
    page.get_by_text("would have refused 3 requests of 1 key").wait_for()
    assert fits(page)
    page.get_by_role("link", name="Enforce now").click()
    page.get_by_text("From the next request on").wait_for()
    assert fits(page)
    assert Rule.objects.get().mode == "shadow"
    page.get_by_label("Why this change:").fill("OPS-17")
    page.get_by_role("button", name="Enforce strict").click()
    page.get_by_text("The mode of 1 rule is now enforce.").wait_for()
    row.refresh_from_db()
    assert (row.mode, row.history.latest().history_change_reason) == ("enforce", "OPS-17")
    assert not check(who).allowed
