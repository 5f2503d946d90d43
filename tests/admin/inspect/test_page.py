"""Test the page of one key: rules and why they apply, what is left, usage, blocks and refusals, by permission."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime, timedelta
from html import unescape
from typing import Any
from urllib.parse import urlencode

import pytest
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from ratelimits.admin.inspect.limits import duration
from ratelimits.identity import Identity
from ratelimits.models import (
    Access,
    Account,
    ConfigVersion,
    KeyOverride,
    Name,
    Plan,
    PlanInclusion,
    PlanMembership,
    Rule,
)
from ratelimits.models.keys import key_name
from ratelimits.quota import checking
from ratelimits.usage import recording
from ratelimits.usage.counting import access
from ratelimits.usage.models import Alert, KeyTotal, ProcessTotal
from ratelimits.usage.models.totals import DAY, QUARTER
from tests.support.engine.proxy import Proxy
from tests.support.entry_points import Clock, away, begin_afresh, short_timeout
from tests.support.own_apps import list_path
from tests.support.rows import rule, unsaved
from tests.support.servers import TestServers
from tests.support.usage.traffic import flow, use

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fsync_at_once")]

URL = "/admin/ratelimits/inspect/"
#: One client for all users, because making a client reads all static files.
CLIENT = Client()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch, settings: Any) -> Clock:
    settings.RATELIMITS = {**settings.RATELIMITS, "ACCOUNT": None}
    access.clear()
    return begin_afresh(monkeypatch)


@pytest.fixture
def paying(settings: Any) -> None:
    """Let users pay not for themselves, but for an account."""
    settings.RATELIMITS = {**settings.RATELIMITS, "ACCOUNT": lambda request: "acme"}


def user_with(*permissions: str) -> Client:
    user = User.objects.create(username=f"user{User.objects.count()}", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    CLIENT.cookies.clear()
    CLIENT.force_login(user)
    return CLIENT


class TestViewKey:
    """The page of a key that a view gives shows the key as people write it."""

    def test_its_limits_overrides_plan_and_block_are_shown(self) -> None:
        key = "header:X-Tenant=acme"
        plan = Plan.objects.create(slug="pro", name="Pro")
        rule("tenant", "fixed_window", capacity=5, period=86_400, key_kind="view_key", plan=plan)
        rule("page", "fixed_window", capacity=7, period=86_400, key_kind="view_key", view_key="arg:pk")
        PlanMembership.objects.create(key=key, plan=plan)
        KeyOverride.objects.create(key=key, rule="tenant", capacity=6, reason="asked")
        who = Identity("user:1", address="ip:203.0.113.9", view_keys=(key_name(key), key_name("arg:pk=7")))
        assert checking.check(who).allowed
        Access.objects.create(target=key, reason="abuse")
        permissions = [
            f"view_{name}" for name in ("inspect", "rule", "keyoverride", "planmembership", "access", "line")
        ]
        page = html(user_with(*permissions), "header:x-tenant=acme")
        assert "view_key:" not in page
        assert ["5 / 6" in page, "/ 7" in page] == [True, False]
        assert "plan pro of the key" in page
        assert f"override of {key}: capacity 6" in page
        assert f"A block of {key} refuses every request of this key now" in page
        assert "view_key:" not in html(user_with(*permissions), "arg:pk=007")


def html(client: Client, q: str, **more: str) -> str:
    response = client.get(f"{URL}?{urlencode({'q': q, **more})}")
    assert response.status_code == 200
    return response.content.decode()


def text(page: str) -> str:
    shown = unescape(page).partition('id="content-main"')[2]
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", shown)).replace(" , ", ", ")


class TestRules:
    @pytest.mark.usefixtures("paying")
    def test_each_rule_says_why_it_applies_and_what_is_left(self, admin_client: Client) -> None:
        pro, gold = (Plan.objects.create(name=name, slug=name) for name in ("pro", "gold"))
        account = Account.objects.create(identifier="acme", plan=pro)
        default = rule("minute", "fixed_window", capacity=2, period=60, key_kind="user", scope="search:POST,PUT")
        of_account = rule("payer", "fixed_window", capacity=7, period=60, key_kind="account", plan=pro)
        of_key = rule("golden", "fixed_window", capacity=8, period=60, key_kind="user", plan=gold)
        rule("golden", "fixed_window", capacity=1, period=60, key_kind="user", plan=pro)
        rule("place", "fixed_window", key_kind="ip")
        rule("dry", "fixed_window", capacity=0, key_kind="user", mode="shadow")
        member = PlanMembership.objects.create(key="user:1", plan=gold)
        until = timezone.now() + timedelta(hours=2)
        own = KeyOverride.objects.create(key="user:1", rule="golden", capacity=50, valid_until=until, reason="<b>deal")
        KeyOverride.objects.create(key="account:acme", rule="minute", mode="shadow")
        who = Identity("user:1", None, "account:acme")
        assert checking.check(who, "search", "POST").allowed
        page = html(admin_client, "user:1", account="acme")
        base = "/admin/ratelimits"
        rows = {row[0]: row for row in re.findall(r'<tr[^>]*><th scope="row">.*?>(\w+)</a><br>(.*?)</tr>', page)}
        assert list(rows) == ["dry", "minute", "payer", "golden"], "the smallest share first, and no rule of addresses"
        assert f'"{base}/rule/{default.pk}/change/">minute' in page
        assert "2 requests per minute, in fixed windows, per user, on search:POST,PUT" in rows["minute"][1]
        assert "override of account:acme: shadow" in rows["minute"][1]
        assert "<td>1 / 2</td>" in rows["minute"][1]
        assert f'"{base}/account/{account.pk}/change/">plan pro of the account' in rows["payer"][1]
        assert f'<a href="{URL}?q=account%3Aacme">account:acme</a></td><td>6 / 7</td>' in rows["payer"][1]
        assert f"{base}/rule/{of_account.pk}/change/" in page
        assert f"{base}/rule/{of_key.pk}/change/" in page
        assert f'"{base}/planmembership/{member.pk}/change/">plan gold of the key' in rows["golden"][1]
        assert f'"{base}/keyoverride/{own.pk}/change/">override of user:1: capacity 50 until' in rows["golden"][1]
        assert "50 requests per minute" in rows["golden"][1]
        assert "(&lt;b&gt;deal)" in rows["golden"][1]
        assert "shadow: refuses nobody" in rows["dry"][1]
        assert "refuses every request" in rows["dry"][1]
        assert "1 / 2" in html(admin_client, "user:1", account="acme"), "nothing is charged"

    def test_rules_that_refuse_come_first_with_when_they_admit_again(self, admin_client: Client) -> None:
        rule("hour", "fixed_window", capacity=1, period=3600, key_kind="user", window_start="first_hit")
        rule("line", "leaky_bucket_queue", capacity=5, rate=1, period=60, max_wait=100, key_kind="user")
        rule("slow", "leaky_bucket_queue", capacity=5, rate=1, period=60, max_wait=1, key_kind="user", mode="shadow")
        rule("burst", capacity=5, rate=1, period=1, key_kind="user")
        assert checking.check(Identity("user:1", None, "account:1")).allowed
        said = text(html(admin_client, "user:1"))
        assert re.search(
            r"hour 1 request per hour.* 0 / 1 (1 h|59 min.*) refuses; admits again in (1 h|59 min)", said
        ), said
        assert re.search(r"line 1 request per minute.* lets the request wait (1 min|59 s|60 s)", said), said
        assert re.search(r"slow 1 request per minute.* refuses; admits again in (59|58) s", said), said
        assert re.search(r"burst .* [45] / 5 .* admits", said), said
        assert said.index("hour 1") < said.index("burst 1")

    def test_what_is_switched_off_or_cannot_be_read_is_shown(self, admin_client: Client) -> None:
        rule("gone", "fixed_window", key_kind="user")
        rule("broken", "fixed_window", key_kind="user", on_failure="deny")
        rule("off", "fixed_window", key_kind="user", mode="off")
        KeyOverride.objects.create(key="user:1", rule="gone", mode="off")
        row = KeyOverride.objects.create(key="user:1", rule="broken", capacity=5)
        with connection.cursor() as cursor:
            cursor.execute("UPDATE ratelimits_keyoverride SET capacity = NULL, rate = 3 WHERE id = %s", [row.pk])
        said = text(html(admin_client, "user:1"))
        assert "override of user:1: off" in said
        assert "switched off" in said
        assert "the failure policy of the rule decides: deny" in said
        assert " off 100 requests" not in said

    @pytest.mark.usefixtures("paying")
    def test_the_page_of_an_api_key_leads_to_rules_that_count_its_user_or_account(self, admin_client: Client) -> None:
        row = rule("burst", "fixed_window", key_kind="user")
        page = html(admin_client, "api_key:9", account="acme")
        assert "Rules per user or per account may apply to the requests of this key" in text(page)
        assert "No rule applies" not in page
        assert f'<a href="{URL}?q=account%3Aacme">account:acme</a></p>' in page
        page = text(html(admin_client, "user:1", account="acme"))
        assert "Rules per user" not in page
        assert "Refusals of requests with an API key are not listed here" in page
        Rule.objects.filter(pk=row.pk).update(key_kind="account")
        assert "Rules per user" not in html(admin_client, "api_key:9", account="acme"), "the table has the rule"
        assert "Rules per user" in html(admin_client, "api_key:9", account="-")
        Rule.objects.filter(pk=row.pk).update(mode="off")
        assert "No rule applies to this key." in html(admin_client, "api_key:9", account="-")


class TestRefusals:
    def test_why_a_key_was_refused_is_answered_by_quarter_of_an_hour_rule_and_amount(
        self, admin_client: Client
    ) -> None:
        row = rule("search", bills=True)
        version = ConfigVersion.read("default")[0]
        now = int(time.time())
        for at in (now - 3 * 3600, now):
            for _ in range(4):
                use("acme", "api_key:9", now=at * 1_000_000, capacity=1, rule=row.pk, configuration=version)
        use("acme", "api_key:8", now=now * 1_000_000, capacity=5, rule=row.pk, configuration=version)
        flow()
        page = html(admin_client, "api_key:9")
        said = text(page)
        for at in (now - 3 * 3600, now):
            start, end = (time.gmtime(at // 900 * 900 + seconds) for seconds in (0, 900))
            span = f"{time.strftime('%Y-%m-%d %H:%M', start)}–{time.strftime('%H:%M', end)}"
            assert f"{span} search requests 3 0" in said
        assert f'<a href="/admin/ratelimits/rule/{row.pk}/change/">search</a></td><td>requests</td><td>3' in page
        assert f"{time.strftime('%Y-%m-%d', time.gmtime(now))} search requests" in said
        assert "Single requests are not recorded" in said
        assert "All refusals until" in said
        of_account = html(admin_client, "account:acme")
        assert re.search(r"<td>api_key:9</td><td><a [^>]*>search</a></td><td>requests</td><td>3</td>", of_account)
        assert "api_key:8" in text(of_account), "the keys of the account are listed"
        assert f"{URL}?q=api_key%3A8&amp;account=acme" in of_account
        assert "nothing was refused" in text(html(admin_client, "api_key:8"))

    @pytest.mark.parametrize("key", ["account:acme", "203.0.113.9"])
    def test_before_the_first_drain_the_page_says_what_to_start(self, admin_client: Client, key: str) -> None:
        at = time.strftime("%H:%M", time.gmtime(time.time() - 3600))
        for said in (text(html(admin_client, key)), text(html(admin_client, key, at=at))):
            top = said.partition("The last refusals")[0]
            assert "Nothing was drained to the ledger yet, so no usage and no refusals are known here. Start" in top
            assert "Nothing was refused" not in top
        flow()
        for said in (text(html(admin_client, key)), text(html(admin_client, key, at=at))):
            assert "Nothing was drained" not in said

    def test_the_newest_refusals_come_first_with_the_name_that_the_rule_had_then(self, admin_client: Client) -> None:
        flow()
        now = int(time.time()) // QUARTER * QUARTER
        rows = {name: rule(name) for name in ("kept", "edited", "renamed", "deleted")}
        history: Any = Rule.history
        history.update(history_date=timezone.now() - timedelta(days=2))
        pks = [row.pk for row in rows.values()]
        Rule.objects.filter(pk=rows["edited"].pk).update(capacity=99)
        Rule.objects.filter(pk=rows["renamed"].pk).update(name="other")
        rows["deleted"].delete()
        for number, pk in enumerate(pks):
            KeyTotal.objects.create(
                span=QUARTER, start=now - number * QUARTER, rule=pk, account="acme", key="user:1", meter="requests",
                admitted_requests=0, denied_requests=7, shadow_requests=0,
            )  # fmt: skip
        then = rows["kept"].sentence()
        assert "bursts to 10" in then
        said = text(html(admin_client, "account:acme"))
        assert said.index("Refused in the last 24 hours") < said.index("Rules that apply")
        for said_then in (
            f"UTC: 7 refused by kept: {rows['kept'].sentence()}, user:1 ",
            f"UTC: 7 refused by edited: {then}, user:1, edited since; these are its numbers of that time ",
            f"UTC: 7 refused by renamed: {then}, user:1, edited since; its name is now other ",
            f"UTC: 7 refused by deleted: {then}, user:1, deleted since ",
            f"renamed ( edited since; its name is now other ) {then} requests 7 0",
        ):
            assert said_then in said, said_then
        assert "bursts to 99" not in said
        page = html(admin_client, "account:acme")
        history = f"/admin/ratelimits/rule/{pks[1]}/history/"
        assert f'<em><a href="{history}">edited since; these are its numbers of that time</a></em>' in page
        assert f'<a href="/admin/ratelimits/rule/{pks[1]}/change/">edited: {then}</a>' in page
        assert admin_client.get(f"/admin/ratelimits/rule/{pks[3]}/history/").status_code == 200
        assert said.index("7 refused by kept") < said.index("7 refused by edited") < said.index("7 refused by renamed")
        assert "Nothing was refused in the last 24 hours." in text(html(admin_client, "account:other"))
        said = text(html(admin_client, "203.0.113.9"))
        assert "Refusals by rules are not known for a key without an account." in said
        assert "Nothing was refused" not in said

    @pytest.mark.usefixtures("paying")
    def test_a_rule_that_was_edited_in_the_span_has_its_numbers_of_before_and_its_plan_of_then(
        self, admin_client: Client
    ) -> None:
        now = int(time.time()) // QUARTER * QUARTER
        plan = Plan.objects.create(name="Free", slug="free")
        row = rule("burst", key_kind="user", plan=plan)
        history: Any = Rule.history
        history.update(history_date=timezone.now() - timedelta(days=2))
        Rule.objects.filter(pk=row.pk).update(capacity=99, plan=None)
        history.filter(capacity=99).update(history_date=datetime.fromtimestamp(now - QUARTER + 60, UTC))
        for start in (now - QUARTER, now):
            KeyTotal.objects.create(
                span=QUARTER, start=start, rule=row.pk, account="acme", key="user:1", meter="requests",
                admitted_requests=0, denied_requests=7, shadow_requests=0,
            )  # fmt: skip
        said = text(html(admin_client, "user:1", account="acme"))
        before, after = row.sentence(), Rule.objects.get().sentence()
        assert f"refused by burst: {before} (plan free), edited in this span of time; these are its numbers" in said
        assert f"refused by burst: {after} " in said
        assert f"{after} (plan free)" not in said

    @pytest.mark.usefixtures("paying")
    def test_the_meters_and_keys_of_a_rule_are_one_line_and_recorded_requests_have_their_moments(
        self, admin_client: Client
    ) -> None:
        now = int(time.time())
        row = rule("burst", plan=Plan.objects.create(name="Free", slug="free"))
        for key, meter, denied in (("user:1", "requests", 7), ("user:1", "tokens", 6), ("user:2", "requests", 2)):
            KeyTotal.objects.create(
                span=QUARTER, start=now // QUARTER * QUARTER, rule=row.pk, account="acme", key=key, meter=meter,
                admitted_requests=0, denied_requests=denied, shadow_requests=0,
            )  # fmt: skip
        said = text(html(admin_client, "account:acme"))
        assert f"UTC: 9 refused by burst: {row.sentence()} (plan free), 2 keys " in said
        assert said.count("refused by burst") == 1
        assert "Single requests are not recorded." in said
        who = Identity("user:1", None, "account:acme")
        at = now * 1_000_000
        recording.write_rows(
            [(at - number, who, "search", "GET", {"requests": 1}, number < 11) for number in range(12)]
        )
        for other in (Identity("user:1", None, "account:beta"), Identity("user:1", "api_key:5", "account:acme")):
            recording.write_rows([(at, other, "elsewhere", "GET", {"requests": 1}, True)])
        said = text(html(admin_client, "user:1", account="acme"))
        assert f"the newest (times in UTC): {time.strftime('%Y-%m-%d %H:%M:%S (search)', time.gmtime(now))}" in said
        assert said.count("(search)") == 10
        assert "elsewhere" not in said
        assert "Single requests are not recorded" not in said
        assert "elsewhere" in text(html(admin_client, "account:acme"))

    @pytest.mark.usefixtures("paying")
    def test_the_refusals_of_a_moment_come_first_and_say_which_span_they_are_of(
        self, admin_client: Client, settings: Any
    ) -> None:
        flow()
        now = int(time.time())
        then = (now - 6 * 3600) // 60 * 60
        row = rule("burst")
        total = {"rule": row.pk, "account": "acme", "key": "user:1", "meter": "requests", "admitted_requests": 0}
        for span, start, denied in ((QUARTER, then, 7), (QUARTER, now, 9), (DAY, now - 5 * DAY, 40)):
            KeyTotal.objects.create(
                span=span, start=start // span * span, **total, denied_requests=denied, shadow_requests=0
            )
        who = Identity("user:1", None, "account:acme")
        recording.write_rows([((then + 11) * 1_000_000, who, "search", "GET", {"requests": 1}, True)])
        typed = time.strftime("%H:%M", time.gmtime(then))
        said = text(html(admin_client, "user:1", account="acme", at=typed))
        asked = said.partition("Refused at this time")[2].partition("Refused in the last 24 hours")[0]
        assert f"7 refused by burst: {row.sentence()}" in asked
        assert "9 refused" not in asked
        assert f"You asked for {typed}. Refusals are counted by quarter of an hour: this is the whole quarter." in asked
        assert "The recorder stored single requests, but not which rule refused them." in asked
        other = text(html(admin_client, "user:2", account="acme", at=typed))
        assert "Single requests are not recorded, so the minute itself is not known." in other
        settings.RATELIMITS = {**settings.RATELIMITS, "RECORD_SAMPLE": 1}
        other = text(html(admin_client, "user:2", account="acme", at=typed))
        assert "The recorder has no refused request of this key in this minute." in other
        assert time.strftime("(times in UTC): %Y-%m-%d %H:%M:11 (search)", time.gmtime(then)) in asked
        day = time.strftime("%Y-%m-%d", time.gmtime(now - 5 * DAY))
        said = text(html(admin_client, "user:1", account="acme", at=f"{day} 12:04"))
        assert f"Refused at this time ({day} UTC) You asked for 12:04. Refusals of more than 24 hours ago" in said
        assert f"{day} UTC: 40 refused by burst" in said
        assert "Nothing was refused in this span" in text(html(admin_client, "user:2", account="acme", at=typed))
        for at in (typed, f"{day} 12:04"):
            address = text(html(admin_client, "203.0.113.9", at=at))
            assert "No refusal by a block is known for this time. Refusals by rules are not known" in address
            assert "Nothing was refused" not in address
        of_account = html(admin_client, "account:acme", at=typed)
        assert f"7 refused by burst: {row.sentence()}, user:1" in text(of_account)
        for wrong in ("25:00", "9999-12-31 23:59", "yesterday", "0001-01-01"):
            assert f"“{wrong}” is not a time that has passed. Write 12:04" in text(
                html(admin_client, "user:1", account="acme", at=wrong)
            )

    def test_a_block_is_shown_with_what_it_refused(self, admin_client: Client) -> None:
        now = timezone.now()
        Access.objects.create(target="ip:203.0.113.0/24", reason="a scan")
        Access.objects.create(target="ip:203.0.113.9", reason="over", valid_until=now - timedelta(minutes=5))
        Access.objects.create(target="ip:203.0.114.0/24", reason="elsewhere")
        ProcessTotal.objects.create(
            process="p", kind="blocked", key="ip:203.0.113.0/24", meter="requests", bin=int(time.time()) // 900 * 900,
            requests=12, units=12,
        )  # fmt: skip
        said = text(html(admin_client, "203.0.113.9"))
        assert "ip:203.0.113.0/24 block decides now, before any rule – – a scan 12" in said
        assert re.search(r"ip:203.0.113.9 block ended .* over 0", said)
        assert "elsewhere" not in said
        assert re.search(r"block of ip:203.0.113.0/24 requests 12 0", said)
        assert "not known for a single address" in said
        Access.objects.create(target="ip:2001:db8::/32", reason="six")
        assert "ip:2001:db8::/32 block decides now" in text(html(admin_client, "2001:db8:0:7::5"))

    def test_no_rule_admits_beside_a_block(self, admin_client: Client) -> None:
        rule("hour", "fixed_window", capacity=1, period=3600, key_kind="user", window_start="first_hit")
        rule("burst", capacity=5, rate=1, period=1, key_kind="user")
        who = Identity("user:1", None, "account:1")
        assert checking.check(who).allowed
        assert not checking.check(who).allowed
        assert "this rule alone" not in text(html(admin_client, "user:1"))
        row = Access.objects.create(target="user:1", reason="abuse", status=429)
        page = html(admin_client, "user:1")
        said = text(page)
        assert "A block of user:1 refuses every request of this key now, with 429, before any rule." in said
        assert said.count("the block refuses; this rule alone: ") == 2
        assert "the block refuses; this rule alone: admits" in said
        assert "the block refuses; this rule alone: refuses; admits again in" in said
        assert "<td>admits" not in page
        row.end("over")
        Access.objects.create(target="account:1", reason="partner", effect="allow")
        said = text(html(admin_client, "user:1"))
        assert "An allow of account:1 admits every request of this key now, before any rule." in said
        assert said.count("the allow admits; this rule alone: ") == 2


class TestUsage:
    def test_usage_of_the_period_stands_beside_what_is_included(self, admin_client: Client) -> None:
        pro = Plan.objects.create(name="Pro", slug="pro")
        Account.objects.create(identifier="acme", name="Acme Inc.", plan=pro)
        PlanInclusion.objects.create(plan=pro, meter="requests", quantity=1000)
        PlanInclusion.objects.create(plan=pro, meter="tokens", quantity=100)
        version = ConfigVersion.read("default")[0]
        use("acme", "api_key:9", now=None, cost=3, configuration=version)
        use("acme", "api_key:9", now=None, cost=250, meter="tokens", configuration=version)
        flow()
        said = text(html(admin_client, "api_key:9"))
        assert "requests 3 1,000 997 left" in said
        assert "tokens 250 100 150 beyond" in said
        assert "Plan pro." in said
        assert "account:acme (Acme Inc.)" in text(html(admin_client, "account:acme"))

    def test_without_bills_it_stands_alone(self, admin_client: Client, no_bills: None) -> None:
        pro = Plan.objects.create(name="Pro", slug="pro")
        Account.objects.create(identifier="acme", plan=pro)
        PlanInclusion.objects.create(plan=pro, meter="requests", quantity=1000)
        use("acme", "api_key:9", now=None, cost=3, configuration=ConfigVersion.read("default")[0])
        flow()
        page = html(admin_client, "api_key:9")
        assert "what used requests 3" in text(page)
        assert "Plan pro." in text(page)
        assert "included quantity" not in text(page)


PARTS = {
    "view_rule": "Rules that apply",
    "view_periodusage": "Usage of the account",
    "view_line": "The last refusals",
    "view_access": "No block or allow concerns this key.",
    "operate": "Block",
    "add_keyoverride": "Add an override",
}


class TestPermissions:
    def test_the_page_needs_its_own_permission(self) -> None:
        assert user_with(*PARTS).get(f"{URL}?q=user:1").status_code == 403

    @pytest.mark.parametrize("permission", PARTS)
    def test_each_part_needs_the_permission_to_view_it(self, permission: str) -> None:
        rule("minute", "fixed_window", key_kind="user")
        alone = text(html(user_with("view_inspect"), "user:1"))
        assert not [part for part in PARTS.values() if f" {part}" in alone], alone
        assert "minute" not in alone
        assert f" {PARTS[permission]}" in text(html(user_with("view_inspect", permission), "user:1"))

    def test_links_lead_only_to_what_a_user_may_open(self) -> None:
        pro = Plan.objects.create(name="Pro", slug="pro")
        Account.objects.create(identifier="1", plan=pro)
        rule("minute", "fixed_window", key_kind="user", plan=pro)
        KeyOverride.objects.create(key="user:1", rule="minute", capacity=5, reason="a secret deal")
        page = html(user_with("view_inspect", "view_rule"), "user:1")
        assert "override of user:1: capacity 5" in page
        assert "a secret deal" not in page
        assert set(re.findall(r'href="/admin/ratelimits/(\w+)/', page)) == {"rule", "inspect"}
        every = html(user_with("view_inspect", "view_rule", "operate", "view_keyoverride", "view_account"), "user:1")
        assert "/admin/ratelimits/keyreset/add/?key=user%3A1&amp;account=1&amp;rule=minute" in every
        assert "/admin/ratelimits/access/grant/?key=user%3A1&amp;account=1&amp;rule=minute" in every
        assert "/admin/ratelimits/access/add/?effect=allow&amp;target=user%3A1" in every
        assert "a secret deal" in every


class TestSpeed:
    def test_the_number_of_queries_does_not_depend_on_what_there_is(self, admin_client: Client) -> None:
        def count(q: str) -> int:
            html(admin_client, q)
            with CaptureQueriesContext(connection) as queries:
                html(admin_client, q)
            return len(queries)

        def make(number: int) -> None:
            row = rule(f"rule{number}", "fixed_window", key_kind="user", scope=f"scope{number}")
            KeyOverride.objects.create(key="user:1", rule=row.name, capacity=5)
            KeyOverride.objects.create(key=f"user:1{number}", rule=row.name, capacity=5)
            Access.objects.create(target=f"ip:203.0.{number}.0/24", reason="r")
            version = ConfigVersion.read("default")[0]
            for _ in range(3):
                use("1", "user:1", now=None, capacity=1, rule=row.pk, configuration=version)
            use("1", f"user:1{number}", now=None, rule=row.pk, configuration=version)
            flow()

        queries = ("user:1", "account:1", "203.0.1.9", "ser:1")
        make(1)
        before = [count(q) for q in queries]
        for number in range(2, 70, 17):
            make(number)
        assert [count(q) for q in queries] == before

    def test_a_hanging_redis_adds_its_timeout_once(
        self, admin_client: Client, settings: Any, servers: TestServers
    ) -> None:
        rules = (unsaved(f"rule{number}", "fixed_window", key_kind="user") for number in range(130))
        Rule.objects.bulk_create(rules)  # more than one call asks for
        with short_timeout(settings), Proxy(servers.redis.port) as proxy:
            proxy.hold()
            away(settings, proxy.port)
            said = text(html(admin_client, "user:1"))
        assert "Redis does not answer, so the remaining permits are not known" in said
        assert said.count("not known") == 131
        # A connection ends with a wait in vain. So a second wait would have made a second connection.
        assert proxy.connections == 1


class TestLinks:
    def test_lists_and_pages_lead_to_it_for_those_who_may_open_it(self) -> None:
        pro = Plan.objects.create(name="Pro", slug="pro")
        account = Account.objects.create(identifier="acme")
        member = PlanMembership.objects.create(key="user:1", plan=pro)
        rule("minute", "fixed_window", key_kind="user")
        override = KeyOverride.objects.create(key="user:2", rule="minute", capacity=5)
        use("acme", "api_key:9", now=None, configuration=ConfigVersion.read("default")[0])
        flow()
        numbers = dict.fromkeys(("rule", "period", "period_end", "threshold", "used", "quantity"), 1)
        alert = Alert.objects.create(
            id="00000000-0000-4000-8000-000000000001",
            customer=Name.objects.get(identifier="acme").customer,
            account="acme",
            meter="requests",
            basis="included",
            **numbers,
        )
        views = [f"view_{name}" for name in ("account", "planmembership", "keyoverride", "line", "alert")]
        expected = {
            "account": (account.pk, "?q=account%3Aacme"),
            "planmembership": (member.pk, "?q=user%3A1"),
            "keyoverride": (override.pk, "?q=user%3A2"),
            "line": (None, "?q=api_key%3A9&amp;account=acme"),
            "alert": (alert.pk, "?q=account%3Aacme"),
        }
        for permissions, shown in ((views, False), ([*views, "view_inspect"], True)):
            client = user_with(*permissions)
            for name, (pk, query) in expected.items():
                for url in (list_path(name), f"{list_path(name)}{pk}/change/" if pk else ""):
                    if url:
                        page = client.get(url).content.decode()
                        assert (f'href="{URL}{query}"' in page) == shown, url
            assert (f'href="{URL}"' in client.get("/admin/").content.decode()) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.04, "0.1 s"), (59.2, "1 min"), (61, "1 min 1 s"), (7_559, "2 h 6 min"), (86_400, "1 d"), (89_999, "1 d 1 h")],
)
def test_a_time_to_wait_is_rounded_up(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown
