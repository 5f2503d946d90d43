"""Test in a real browser that a user without a permission sees no button for it, and cannot do it by URL either.

With the permission the button is there and the URL answers. Each permission is tested alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from django.contrib.auth.models import Permission, User

from ratelimits.billing.models import Adjustment, Report
from ratelimits.models import Access, KeyReset, PlanMembership, Rule
from ratelimits.usage.models import QuarantinedBatch
from tests.browser.conftest import OpenPage, staff
from tests.support.reports.invoices import account, spend
from tests.support.rows import rule
from tests.support.usage.traffic import flow

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = [
    pytest.mark.system,
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("fsync_at_once"),
]

BASE = "/admin/ratelimits"
TOKEN = "t" * 32


def link(name: str) -> Callable[[Page], Locator]:
    return lambda page: page.locator("#content").get_by_role("link", name=name, exact=True)


def button(name: str) -> Callable[[Page], Locator]:
    return lambda page: page.locator("#content").get_by_role("button", name=name, exact=True)


def action(name: str) -> Callable[[Page], Locator]:
    return lambda page: page.locator(f'select[name="action"] option[value="{name}"]')


@dataclass(frozen=True)
class Case:
    """A permission, the page with its button, and the URL that does it.

    permissions  the permission that is tested; several if the button needs all of them
    base         the other permissions that the page needs
    page         the page with the button
    shown        finds the button
    url          the URL behind the button
    posted       the values that are posted to this URL; None: the URL is only read
    readable     whether the URL may be read without the permission, and only the post must change nothing
    """

    permissions: tuple[str, ...]
    base: tuple[str, ...]
    page: str
    shown: Callable[[Page], Locator]
    url: str
    posted: dict[str, Any] | None = None
    readable: bool = False


def cases(row: Rule, batch: QuarantinedBatch, adjustment: Adjustment, blocked: Access) -> list[Case]:
    rules, pk = f"{BASE}/rule/", row.pk
    every = {"name": row.name, "scope": "*", "key_kind": "caller", "meter": "requests", "algorithm": "fixed_window"}
    saved = {**every, "mode": "enforce", "capacity": "1", "period": "60", "on_failure": ""}
    of_batch, of_adjustment = {"_selected_action": str(batch.pk)}, {"_selected_action": str(adjustment.pk)}
    grant = {"key": "account:acme", "rule": row.name, "extra": "5", "reason": "r", "_confirmed": "1"}
    return [
        Case(("view_inspect",), (), "/admin/", link("Why was a request refused?"), f"{BASE}/inspect/?q=user:1"),
        Case(("view_status",), (), "/admin/", link("Status"), f"{BASE}/status/"),
        Case(("view_rule",), (), "/admin/", link("Rules"), rules),
        Case(("view_shadow",), (), "/admin/", link("Shadow refusals"), "/admin/ratelimits_usage/shadow/"),
        Case(("view_change",), (), "/admin/", link("All changes"), f"{BASE}/change/"),
        Case(("add_rule",), ("view_rule",), rules, link("Add rule"), f"{rules}add/", saved),
        Case(("change_rule",), ("view_rule",), f"{rules}{pk}/change/", button("Save"), f"{rules}{pk}/change/", saved,
             True),
        Case(("change_rule",), ("view_shadow",), "/admin/ratelimits_usage/shadow/", link("Enforce now"),
             f"{rules}{pk}/enforce/",
             {"_confirmed": "1", "version": str(row.version)}),
        Case(("delete_rule",), ("change_rule",), f"{rules}{pk}/change/", link("Delete"), f"{rules}{pk}/delete/",
             {"post": "yes"}),
        Case(("operate",), ("view_access",), f"{BASE}/access/", link("Give more"), f"{BASE}/access/grant/", grant),
        Case(("operate",), ("view_access",), f"{BASE}/access/", link("Reset a key"), f"{BASE}/keyreset/add/",
             {"key": "account:acme", "rule": row.name, "reason": "r", "_confirmed": "1"}),
        Case(("operate",), ("view_access",), f"{BASE}/access/", link("Add block or allow"), f"{BASE}/access/add/",
             {"effect": "block", "target": "user:9", "reason": "r", "status": "403", "_confirmed": "1"}),
        Case(("operate",), ("view_access",), f"{BASE}/access/", action("end_now"), f"{BASE}/access/",
             {"action": "end_now", "_selected_action": str(blocked.pk), "_confirmed": "1", "reason": "r"}, True),
        Case(("finalise",), ("view_report",), "/admin/ratelimits_billing/report/open/",
             button("Finalise the chosen periods"),
             "/admin/ratelimits_billing/report/finalise/", {"all": "1", "_confirmed": "1"}),
        Case(("resolve",), ("view_quarantinedbatch",), "/admin/ratelimits_usage/quarantinedbatch/", action("discard"),
             "/admin/ratelimits_usage/quarantinedbatch/", {"action": "discard", "post": "yes", **of_batch}, True),
        Case(("change_adjustment",), ("view_adjustment",), "/admin/ratelimits_billing/adjustment/", action("approve"),
             "/admin/ratelimits_billing/adjustment/", {"action": "approve", **of_adjustment}, True),
        Case(("add_planmembership", "change_planmembership"), ("view_planmembership",), f"{BASE}/planmembership/",
             link("Import a CSV file"), f"{BASE}/planmembership/import/", {}),
    ]  # fmt: skip


def state() -> list[Any]:
    """Return what these actions change."""
    rows: list[Any] = [list(model._default_manager.order_by("pk").values()) for model in (Rule, Access, Adjustment)]
    return rows + [model._default_manager.count() for model in (KeyReset, Report, QuarantinedBatch, PlanMembership)]


def test_without_a_permission_there_is_no_button_and_no_way_by_url(open_page: OpenPage, live_server: Any) -> None:
    row = rule("strict", "fixed_window", key_kind="account", mode="shadow")
    spend(account(included=5), "2025-10-15", 7)
    flow()
    batch = QuarantinedBatch.objects.create(shard=1, name="3f9c:1", content="1", reason="its digest is wrong")
    author = User.objects.create(username="author")
    adjustment = Adjustment.objects.create(
        account="acme", period_start="2025-10-01T00:00Z", quantity=-1, reason="r", author=author, approval="waiting"
    )
    blocked = Access.objects.create(target="user:7", reason="a scan")
    user = staff("view_plan")
    page = open_page(user)
    page.context.add_cookies([{"name": "csrftoken", "value": TOKEN, "url": live_server.url}])
    for case in cases(row, batch, adjustment, blocked):
        about, before = f"{case.permissions} at {case.page}", state()
        for missing in case.permissions:
            given(user, *case.base, *(name for name in case.permissions if name != missing))
            page.goto(case.page)
            assert case.shown(page).count() == 0, about
            read = page.goto(case.url)
            assert read is not None
            assert read.status == (200 if case.readable else 403), about
            if case.posted is not None:
                posted = page.request.post(case.url, form=case.posted, headers={"X-CSRFToken": TOKEN}, max_redirects=0)
                # A list shows itself again if it does not know the action.
                assert posted.status == 403 or (case.readable and "action" in case.posted), about
            assert state() == before, about
        given(user, *case.base, *case.permissions)
        page.goto(case.page)
        assert case.shown(page).count() >= 1, about
        read = page.goto(case.url)
        assert read is not None
        assert read.status in (200, 405), about


def given(user: User, *permissions: str) -> None:
    """Let a user have these permissions from now on, and no others."""
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
