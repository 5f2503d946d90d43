from __future__ import annotations

import importlib
import re
from html import unescape
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import Permission, User
from django.db import OperationalError, connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import NoReverseMatch
from django.utils.timezone import now

from ratelimits import admin as pages
from ratelimits.admin.status import tags
from ratelimits.admin.status.index import in_order
from ratelimits.models import ConfigVersion, Rule
from ratelimits.routers import is_own, own_apps
from ratelimits.usage.models import DurabilityGap, KeyTotal, QuarantinedBatch
from tests.support.below import SITE
from tests.support.engine.proxy import Proxy
from tests.support.entry_points import away, short_timeout
from tests.support.rows import rule
from tests.support.servers import TestServers
from tests.support.usage.traffic import flow, use

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fsync_at_once")]

#: One client for all users, because making a client reads all static files.
CLIENT = Client()
URL, INDEX = f"{SITE}/admin/ratelimits/status/", "/admin/"


def page(client: Client, url: str = URL) -> str:
    response = client.get(url)
    assert response.status_code == 200
    return unescape(response.content.decode())


def text(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))


def user_with(*permissions: str) -> Client:
    user = User.objects.create(username=f"user{User.objects.count()}", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    CLIENT.force_login(user)
    return CLIENT


def use_some(accounts: int = 1) -> Rule:
    row = rule("search", bills=True)
    version = ConfigVersion.read("default")[0]
    for number in range(accounts):
        for _ in range(4):
            use(f"<b>acme {number}", now=None, capacity=3, rule=row.pk, configuration=version)
    flow()
    return row


def test_the_page_shows_facts_charts_and_lists_with_links(admin_client: Client) -> None:
    row = use_some()
    html = page(admin_client)
    shown = text(html)
    assert "Redis answers in" in shown
    assert "Admitted: 3" in shown
    assert "Refused: 1" in shown
    assert f'<a href="{SITE}/admin/ratelimits/rule/{row.pk}/change/">search</a>' in html
    assert f'<a href="{SITE}/admin/ratelimits_usage/line/?q=%3Cb%3Eacme+0+api_key%3A1">api_key:1</a>' in html
    assert "mostly by search" in shown
    assert html.count('<svg class="ratelimits-bars') == 2, (
        "nothing was refused by shadow rules or let through unmetered"
    )
    assert re.search(r'<rect [^>]*height="100"><title>\d\d:\d\d: 3</title>', html)
    assert len(re.findall(r"<tr><th scope=\"row\">\d\d:\d\d</th>", html)) == 96
    assert "/admin/ratelimits_usage/quarantinedbatch/?resolved_at__isempty=1" in html
    raw = admin_client.get(URL).content.decode()
    assert "<b>acme" not in raw
    assert "&lt;b&gt;acme 0" in raw


def test_the_page_shows_30_days_and_another_meter(admin_client: Client) -> None:
    use_some()
    use("acme", now=None, meter="tokens", cost=250, configuration=ConfigVersion.read("default")[0])
    flow()
    html = page(admin_client, f"{URL}?window=month&meter=tokens")
    assert "Admitted: 1" in text(html)
    assert '<a href="?window=month&meter=tokens#usage" aria-current="true">tokens (1)</a>' in html
    assert len(re.findall(r"<tr><th scope=\"row\">\d{4}-\d\d-\d\d</th>", html)) == 30
    assert "Admitted: 3" in text(page(admin_client, f"{URL}?window=year&meter=x"))


def test_without_usage_the_page_says_so(admin_client: Client) -> None:
    flow()
    said = text(page(admin_client))
    assert "There was no usage in this time." in said
    assert "Nothing was drained" not in said


def test_before_the_first_drain_the_pages_say_what_to_start(admin_client: Client) -> None:
    said = text(page(admin_client)).partition("usage that is not in the ledger yet is missing")[2]
    assert "Nothing was drained to the ledger yet, so no usage and no refusals are known here." in said
    assert "Start a Celery worker with beat, or run ratelimits_seal and then ratelimits_drain." in said
    assert "There was no usage" not in said
    shown = recent(page(admin_client, INDEX))
    assert "Nothing was drained to the ledger yet" in shown
    assert "Nothing was refused" not in shown


def test_only_those_who_may_view_the_status_see_the_strip() -> None:
    QuarantinedBatch.objects.create(shard=1, name="a:1", content="1")
    every = page(user_with("view_status"), INDEX)
    assert f'class="ratelimits-level ratelimits-red" href="{URL}#quarantine"' in every
    facts = re.findall(rf'href="{URL}#(\w+)"', every)
    assert len(facts) == 18
    assert re.findall(r'<tr id="(\w+)">', page(user_with("view_status"))) == facts
    other = user_with("view_rule", "view_shardstate")
    assert "ratelimits-level" not in page(other, INDEX)
    assert other.get(URL).status_code == 403


def test_links_lead_only_to_what_a_user_may_see() -> None:
    use_some()
    html = page(user_with("view_status"))
    assert "Refused: 1" in text(html)
    assert re.findall(rf'href="{SITE}/admin/\w+/(?:rule|line|batch|quarantinedbatch|durabilitygap)/', html) == []
    assert f'href="{SITE}/admin/ratelimits/rule/' in page(user_with("view_status", "view_rule"))


def test_there_is_nothing_to_change_or_to_delete(admin_client: Client) -> None:
    use_some()
    for name in ("add/", "1/change/", "1/delete/", "1/history/", "1/"):
        assert admin_client.get(f"{URL}{name}").status_code == 404


def test_the_number_of_queries_does_not_depend_on_what_there_is(admin_client: Client) -> None:
    def count(url: str) -> int:
        with CaptureQueriesContext(connection) as queries:
            page(admin_client, url)
        return len(queries)

    use_some()
    before = count(URL), count(f"{URL}?window=month"), count(INDEX)
    Rule.objects.all().delete()
    use_some(accounts=3)
    for number in range(4):
        rule(f"rule{number}", on_failure="deny")
        DurabilityGap.objects.create(event=f"x{number}", kind="wipe", since=1, until=2)
        QuarantinedBatch.objects.create(shard=1, name=f"a:{number}", content="1", resolved_at=now())
    assert (count(URL), count(f"{URL}?window=month"), count(INDEX)) == before


@pytest.mark.parametrize("url", [URL, INDEX])
def test_a_hanging_redis_adds_at_most_its_timeout(
    admin_client: Client, settings: Any, servers: TestServers, url: str
) -> None:
    with short_timeout(settings), Proxy(servers.redis.port) as proxy:
        proxy.hold()
        away(settings, proxy.port)
        shown = text(page(admin_client, url))
    assert "does not answer" in shown
    assert "active: allow" in shown
    # A connection ends with a wait in vain. So a second wait would have made a second connection.
    assert proxy.connections == 1


def test_the_index_stays_a_project_s_own(admin_client: Client) -> None:
    ours = admin.site.index_template
    assert ours == "ratelimits/admin/index.html"
    admin.site.index_template = "admin/index.html"  # by hand: pytest's monkeypatch cannot restore what a proxy wraps
    try:
        importlib.reload(pages)
        assert "ratelimits-level" not in page(admin_client, INDEX)
    finally:
        admin.site.index_template = ours


def test_a_site_without_the_page_has_no_strip(monkeypatch: pytest.MonkeyPatch, admin_client: Client) -> None:
    def no_page(*args: Any, **kwargs: Any) -> str:
        raise NoReverseMatch

    monkeypatch.setattr(tags, "reverse", no_page)
    assert "ratelimits-level" not in page(admin_client, INDEX)


PLACED = [(config.label, name) for config in own_apps() for name in config.pages]


def test_every_table_of_the_index_has_a_place_in_the_order_of_work() -> None:
    registered = [(model._meta.app_label, model.__name__) for model in admin.site._registry]
    assert sorted(PLACED) == sorted((label, name) for label, name in registered if is_own(label))


def test_the_index_is_in_the_order_of_work(admin_client: Client) -> None:
    html = page(admin_client, INDEX)
    captions = [" ".join(text(each).split()) for each in re.findall(r"<caption>(.*?)</caption>", html, re.DOTALL)]
    ours = [caption for caption in captions if caption.startswith("Rate limits")]
    assert ours == ["Rate limits", "Rate limits: usage", "Rate limits: billing"]
    own = "|".join(config.label for config in own_apps())
    order = re.findall(rf'id="({own})-(\w+)"', html)
    assert order == [(label, name.lower()) for label, name in PLACED]


@pytest.mark.parametrize("label", [config.label for config in own_apps()])
def test_the_index_of_an_app_is_in_the_order_of_work(admin_client: Client, label: str) -> None:
    order = re.findall(rf'id="{label}-(\w+)"', page(admin_client, f"/admin/{label}/"))
    assert order == [name.lower() for placed, name in PLACED if placed == label]


def test_an_app_without_a_table_that_one_may_see_is_left_out() -> None:
    html = page(user_with("view_rule"), INDEX)
    captions = [" ".join(text(each).split()) for each in re.findall(r"<caption>(.*?)</caption>", html, re.DOTALL)]
    assert captions == ["Rate limits"]


def test_a_table_without_a_place_comes_last() -> None:
    usage = {"app_label": "ratelimits_usage", "name": "Usage", "models": [{"object_name": "Line"}]}
    models = [{"object_name": "New"}, {"object_name": "Rule"}, {"object_name": "Status"}]
    rules = {"app_label": "ratelimits", "name": "Limits", "models": models}
    other = {"app_label": "shop", "name": "Shop", "models": []}
    found = in_order([other, usage, other, rules])
    assert [(each["name"], [model["object_name"] for model in each["models"]]) for each in found] == [
        ("Shop", []),
        ("Limits", ["Status", "Rule", "New"]),
        ("Usage", ["Line"]),
        ("Shop", []),
    ]


def recent(html: str) -> str:
    found = re.search(r'<section class="ratelimits-recent">.*?</section>', html, re.DOTALL)
    return found.group() if found is not None else ""


def test_the_index_lists_recent_refusals_for_those_who_may_see_them() -> None:
    client = user_with("view_inspect", "view_line")
    flow()
    assert "Nothing was refused in the last hour." in recent(page(client, INDEX))
    row = use_some()
    shown = recent(page(client, INDEX))
    assert re.search(r"\d\d:\d\d–\d\d:\d\d UTC: search refused 1 request of api_key:1 \(<b>acme 0\)<", shown)
    (url,) = re.findall(r'href="([^"]*)"', shown)
    assert url.endswith("?q=api_key%3A1&account=%3Cb%3Eacme+0")
    asked = text(page(client, url))
    assert "You asked for" not in asked
    assert "1 refused by" in asked
    pk = row.pk
    row.delete()
    assert f"UTC: rule {pk} refused 1" in recent(page(client, INDEX))
    KeyTotal.objects.update(rule=0)
    assert "UTC: a block refused 1 request of api_key:1" in recent(page(client, INDEX))
    for permissions in (("view_inspect",), ("view_line", "view_status")):
        assert recent(page(user_with(*permissions), INDEX)) == ""


def test_a_database_that_fails_is_said_above_the_index(
    monkeypatch: pytest.MonkeyPatch, admin_client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(request: Any) -> Any:
        raise OperationalError("no such table")

    monkeypatch.setattr(tags, "facts_of_strip", fail)
    html = page(admin_client, INDEX)
    assert "Database: OperationalError" in text(html)
    assert html.count("ratelimits-level") == 1
    assert "no such table" in caplog.text
