"""Test the pages of rules and keys without the floors above: each answers, and reads no table of these floors."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from html import unescape
from importlib.util import find_spec, module_from_spec
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from project.models import ApiKey
from ratelimits.admin import accounts
from ratelimits.models import Access, Account, KeyOverride, Plan, PlanMembership, Rule
from ratelimits.quota.counting import counting
from ratelimits.usage.counting import access
from ratelimits.usage.models import DurabilityGap, KeyTotal, ProcessTotal
from ratelimits.usage.models.totals import DAY, HOUR, QUARTER, SUMS
from tests.support.alone import alone
from tests.support.below import SITE
from tests.support.entry_points import begin_afresh
from tests.support.own_apps import own_models
from tests.support.rows import rule

pytestmark = pytest.mark.django_db(transaction=True)

BASE = "/admin/ratelimits"
#: The tables that the floors above have, without the prices: the page of all changes lists the changes of all tables
#: that are installed.
TABLES = {
    model._meta.db_table
    for model in own_models()
    if model._meta.app_label != "ratelimits" and not model._meta.proxy and "planprice" not in model._meta.model_name
}
assert len(TABLES) > 20
KEY = "api_key:7"


@pytest.fixture(autouse=True)
def _rows(monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    """Make rows of all kinds, and usage and refusals of a key that only the floors above know."""
    settings.RATELIMITS = {**settings.RATELIMITS, "ACCOUNT": None}
    access.clear()
    begin_afresh(monkeypatch)
    row = rule("burst", "fixed_window", capacity=2, period=60, key_kind="api_key")
    rule("tried", "fixed_window", capacity=1, period=60, key_kind="account", mode="shadow")
    Account.objects.create(identifier="acme", name="Acme")
    ApiKey.objects.issue(name="pump", user=User.objects.create(username="ann"))
    plan = Plan.objects.create(slug="pro", name="Pro")
    PlanMembership.objects.create(key=KEY, plan=plan)
    KeyOverride.objects.create(key=KEY, rule="burst", capacity=3)
    Access.objects.create(target=KEY, reason="r", effect="allow")
    now = int(time.time())
    for span in (QUARTER, HOUR, DAY):
        subject = {"account": "acme", "key": KEY, "rule": row.pk, "meter": "requests"}
        KeyTotal.objects.create(span=span, start=now // span * span, **subject, **dict.fromkeys(SUMS, 3))
    start = now // QUARTER * QUARTER
    subject = {"account": "", "key": KEY, "meter": "requests", "bin": start}
    ProcessTotal.objects.create(process="p", kind="exempt", requests=9, units=9, **subject)
    DurabilityGap.objects.create(event="x", kind="wipe", since=1, until=2)


@pytest.fixture
def without() -> Iterator[None]:
    with alone():
        yield


def html(client: Client, url: str) -> str:
    """Return a page that read no table of the floors above."""
    with CaptureQueriesContext(connection) as queries:
        response = client.get(f"/admin/{url}" if not url.startswith("/") else url)
    assert response.status_code == 200, url
    read = {table for query in queries for table in re.findall(r'"(ratelimits_\w+)"', query["sql"])}
    assert read & TABLES == set(), url
    return unescape(response.content.decode())


def text(page: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))


URLS = [
    "",
    "ratelimits/",
    *(f"ratelimits/{name}/" for name in ("status", "inspect", "change", "rule", "keyoverride", "planmembership")),
    *(f"ratelimits/{name}/" for name in ("access", "keyreset")),
    *(f"ratelimits/{name}/add/" for name in ("rule", "keyoverride", "planmembership", "access", "keyreset")),
    *(f"ratelimits/inspect/?q={text}" for text in (KEY, f"{KEY}&account=acme", "account:acme", "acme", "nobody")),
    *(f"ratelimits/inspect/{kind}/?q=ac" for kind in ("keys", "accounts")),
    *(f"ratelimits/{page}/?key={KEY}&account=acme" for page in ("access/grant", "keyreset/add")),
    "ratelimits/rule/trial/?algorithm=fixed_window&capacity=2&period=60&key_kind=account&meter=requests&mode=enforce",
    "ratelimits/rule/preview/?algorithm=fixed_window&capacity=2&period=60&key_kind=account&meter=requests",
]


@pytest.mark.usefixtures("without")
@pytest.mark.parametrize("url", URLS)
def test_a_page_answers_without_the_floors_above(admin_client: Client, url: str) -> None:
    html(admin_client, url)


@pytest.mark.usefixtures("without")
@pytest.mark.parametrize("model", [Rule, KeyOverride, PlanMembership, Access])
def test_the_page_of_a_row_and_its_history_answer(admin_client: Client, model: Any) -> None:
    pk, name = model.objects.first().pk, model._meta.model_name
    for page in ("change", "history"):
        html(admin_client, f"ratelimits/{name}/{pk}/{page}/")


def facts(client: Client) -> list[str]:
    return re.findall(r'<tr id="(\w+)">', html(client, "ratelimits/status/"))


@pytest.mark.usefixtures("without")
def test_the_status_has_the_facts_of_redis_and_of_the_rules(admin_client: Client) -> None:
    page = html(admin_client, "ratelimits/status/")
    assert facts(admin_client) == ["redis", "memory", "eviction", "failure", "configuration"]
    assert 'id="usage"' not in page
    index = html(admin_client, "")
    assert re.findall(rf'href="{SITE}/admin/ratelimits/status/#(\w+)"', index) == facts(admin_client)
    assert "Recent refusals" not in index
    assert "Would a limit have refused anyone" not in index
    assert "Reset a key" in index


@pytest.mark.usefixtures("without")
def test_the_inspector_knows_no_past(admin_client: Client) -> None:
    empty = html(admin_client, "ratelimits/inspect/")
    assert 'name="at"' not in empty
    assert "latest refusals" not in empty
    page = text(html(admin_client, f"ratelimits/inspect/?q={KEY}&account=acme"))
    assert "Rules that apply" in page
    assert "decides now, before any rule" in page
    for missing in ("Refused in the last", "The last refusals", "billing period", "requests in 24 hours"):
        assert missing not in page


@pytest.mark.usefixtures("without")
def test_blocks_and_allows_have_no_numbers(admin_client: Client) -> None:
    assert "requests in 24 hours" not in html(admin_client, "ratelimits/access/").lower()
    row = Access.objects.get()
    assert "30 days" not in html(admin_client, f"ratelimits/access/{row.pk}/change/")
    with_reason = {"key": KEY, "account": "acme"}
    shown = admin_client.get(f"{BASE}/access/grant/", with_reason)
    assert "refused" not in text(unescape(shown.content.decode()))


@pytest.mark.usefixtures("without")
def test_a_list_of_keys_has_no_column_of_refusals(admin_client: Client) -> None:
    assert "refused in 24 hours" not in html(admin_client, "/admin/project/apikey/").lower()


@pytest.mark.usefixtures("without")
def test_the_form_of_a_rule_offers_what_needs_no_usage(admin_client: Client) -> None:
    form = html(admin_client, "ratelimits/rule/add/")
    assert form.count('formtarget="_blank"') == 1
    page: Any = admin.site._registry[Rule]
    names = {pattern.name for pattern in page.get_urls()}
    assert {"ratelimits_rule_preview", "ratelimits_rule_trial"} <= names
    assert names.isdisjoint({"ratelimits_rule_yesterday", "ratelimits_rule_enforce"})
    trial = html(admin_client, URLS[-2])
    assert "<figure>" in trial
    assert "ratelimits-affected" not in trial


@pytest.mark.usefixtures("without")
def test_a_rule_that_admits_nothing_must_still_be_confirmed(admin_client: Client) -> None:
    typed = {"name": "none", "scope": "*", "key_kind": "user", "meter": "requests", "mode": "enforce", "max_wait": "0"}
    typed |= {"algorithm": "fixed_window", "capacity": "0", "period": "60", "on_failure": ""}
    response: Any = admin_client.post(f"{BASE}/rule/add/", typed)
    assert response.context["adminform"].form.errors.keys() == {"__all__"}
    assert "Everyone would be refused." in text(unescape(response.content.decode()))
    assert not Rule.objects.filter(name="none").exists()
    admin_client.post(f"{BASE}/rule/add/", {**typed, "_everyone_meant": "1"})
    assert Rule.objects.filter(name="none").exists()
    assert LogEntry.objects.count() == 1


def test_the_floors_above_add_all_this(admin_client: Client) -> None:
    assert len(re.findall(r'<tr id="(\w+)">', admin_client.get(f"{BASE}/status/").content.decode())) > 15
    assert "Recent refusals" in admin_client.get("/admin/").content.decode()
    assert "The last refusals" in admin_client.get(f"{BASE}/inspect/?q={KEY}&account=acme").content.decode()
    assert "refused in 24 hours" in admin_client.get("/admin/project/apikey/").content.decode().lower()
    page: Any = admin.site._registry[Rule]
    assert {"ratelimits_rule_yesterday", "ratelimits_rule_enforce"} <= {pattern.name for pattern in page.get_urls()}


def test_a_project_without_usage_offers_no_field_that_needs_it(
    admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = Account.objects.first() or Account.objects.create(identifier="acme")
    page = admin_client.get(f"{BASE}/account/{row.pk}/change/").content.decode()
    form = admin_client.get(f"{BASE}/rule/add/").content.decode()
    assert 'name="next_plan"' in page
    assert 'name="bills"' in form
    monkeypatch.setattr(counting, "counts", False)
    assert 'name="next_plan"' not in admin_client.get(f"{BASE}/account/{row.pk}/change/").content.decode()
    form = admin_client.get(f"{BASE}/rule/add/").content.decode()
    assert not any(f'name="{name}"' in form for name in ("bills", "lasting", "start_from_ledger"))


@pytest.fixture
def registry() -> Iterator[dict[Any, Any]]:
    """Return the pages of Django's own admin site. After the test it has its pages again."""
    pages: dict[Any, Any] = admin.site._registry
    before = dict(pages)
    yield pages
    pages.clear()
    pages.update(before)


@pytest.mark.parametrize(
    ("module", "model", "page"),
    [
        ("ratelimits.usage.admin.erasing", Account, accounts.AccountAdmin),
        ("ratelimits.billing.admin.plans", Plan, accounts.PlanAdmin),
    ],
)
def test_a_page_that_the_project_has_replaced_or_removed_stays(
    module: str, model: Any, page: Any, registry: dict[Any, Any]
) -> None:
    """Replace two pages, but only those of the floor below."""
    of_project = type("OfProject", (page,), {})(model, admin.site)
    for pages in ({}, {model: of_project}):
        registry.clear()
        registry.update(pages)
        run_again(module)
        assert registry == pages
    registry[model] = page(model, admin.site)
    run_again(module)
    assert type(registry[model]) is not page


def run_again(module: str) -> None:
    """Run a module once more, as Django's autodiscovery does; the module that is loaded stays."""
    spec = find_spec(module)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(module_from_spec(spec))
