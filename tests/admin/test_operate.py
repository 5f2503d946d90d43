"""Test the pages that block, allow, reset and grant: who may, what they say first, and what they do."""

from __future__ import annotations

import re
import time
from datetime import timedelta
from html import unescape
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from ratelimits import moments
from ratelimits.embedded import free_port
from ratelimits.identity import Identity
from ratelimits.models import Access, Account, KeyOverride, KeyReset, Plan
from ratelimits.models.keys import key_name
from ratelimits.quota import checking, from_memory
from ratelimits.usage.counting import access, process_totals
from ratelimits.usage.models import Alert, KeyTotal, ProcessTotal
from ratelimits.usage.models.totals import DAY, QUARTER, SUMS, newest_days
from tests.support.entry_points import Clock, away, begin_afresh
from tests.support.rows import rule

pytestmark = pytest.mark.django_db(transaction=True)

BASE = "/admin/ratelimits"
BLOCKS, BLOCK, GRANT = f"{BASE}/access/", f"{BASE}/access/add/", f"{BASE}/access/grant/"
RESETS, RESET = f"{BASE}/keyreset/", f"{BASE}/keyreset/add/"
#: A text as `secrets.token_urlsafe` makes it.
SECRET = "Gz3tT0nV5rVq7m-1kqk2Jw_0aYh8X5cXbLJ4oVfQx9E"
#: One client for all users, because making a client reads all static files.
CLIENT = Client()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch, settings: Any) -> Clock:
    settings.RATELIMITS = {**settings.RATELIMITS, "ACCOUNT": None}
    access.clear()
    return begin_afresh(monkeypatch)


@pytest.fixture(autouse=True)
def _known() -> None:
    used("user:1", "1")


def used(key: str, account: str) -> None:
    """Let an account have used a key today."""
    subject = {"account": account, "key": key, "rule": 0, "meter": "requests"}
    KeyTotal.objects.create(span=DAY, start=newest_days(time.time(), 1)[0], **subject, **dict.fromkeys(SUMS, 1))


def user_with(*permissions: str, staff: bool = True) -> Client:
    user = User.objects.create(username=f"user{User.objects.count()}", is_staff=staff)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    CLIENT.cookies.clear()
    CLIENT.force_login(user)
    return CLIENT


def text(response: Any) -> str:
    page = unescape(response.content.decode()).partition('<div id="content"')[2]
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))


def confirmed(client: Client, url: str, typed: dict[str, Any]) -> Any:
    """Post a form, check that this changes nothing, then post what the page of consequences posts."""
    before = counts()
    page = client.post(url, typed)
    assert page.status_code == 200
    assert "_confirmed" in page.content.decode(), text(page)
    assert counts() == before
    inputs = re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', page.content.decode())
    posted: dict[str, Any] = {name: unescape(value) for name, value in inputs if name != "csrfmiddlewaretoken"}
    return page, client.post(url, posted)


def offered(page: str) -> list[tuple[str, str, str]]:
    """Return the rules that a form offers: the name, whether it is chosen, and the whole text."""
    found = re.findall(r'<input type="radio" name="rule" value="([\w-]*)"([^>]*)>\s*([^<]*?)\s*</label>', page)
    return [(name, "yes" if "checked" in more else "", unescape(label)) for name, more, label in found]


def counts() -> list[int]:
    return [model.objects.count() for model in (Access, KeyReset, KeyOverride, LogEntry)]


def named(text: str) -> list[tuple[str, str]]:
    """Find the only API key, as a project's function KEY_SEARCH does."""
    return [("api_key:7", "phone")] if text in "api_key:7" else []


def typed_block(**fields: Any) -> dict[str, Any]:
    return {"effect": "block", "target": "203.0.113.0/24", "reason": "a scan", "status": "403", "message": "", **fields}


FROM_2099 = {"valid_from_0": "2099-01-01", "valid_from_1": "0:00"}
TYPED: dict[str, dict[str, Any]] = {
    BLOCK: typed_block(),
    RESET: {"key": "user:1", "account": "", "rule": "burst", "reason": "asked"},
    GRANT: {
        "key": "user:1",
        "account": "",
        "rule": "burst",
        "extra": "5",
        "reason": "asked",
        "until_0": "2099-01-01",
        "until_1": "00:00:00",
    },
}


class TestViewKeys:
    """A key that a view gives is typed as people write it, and blocked, reset and granted like any other key."""

    def test_it_is_blocked_and_the_page_warns_if_no_view_gives_it(self) -> None:
        client = user_with("operate")
        page, _done = confirmed(client, BLOCK, typed_block(target="header:x-tenant= acme"))
        assert "Every request of header:X-Tenant=acme is refused with 403" in text(page)
        assert "No view gives the key “header:X-Tenant” yet." in text(page)
        assert Access.objects.get().target == "header:X-Tenant=acme"
        blocked = Identity(address="ip:203.0.113.9", view_keys=(key_name("header:X-Tenant=acme"),))
        assert not checking.check(blocked).allowed
        checking.check(blocked._replace(view_keys=()))
        process_totals.write()
        assert not ProcessTotal.objects.filter(key__contains="acme").exists()
        assert "1" in re.findall(r"<td[^>]*>([^<]*)</td>", client.get(BLOCKS).content.decode())

    def test_it_is_reset_and_gets_more(self) -> None:
        rule("tenant", "fixed_window", capacity=1, period=86_400, key_kind="view_key")
        who = Identity(address="ip:203.0.113.9", view_keys=(key_name("header:X-Tenant=acme"),))
        client = user_with("operate", "view_inspect", "view_rule")

        def spend() -> list[bool]:
            from_memory.denials.clear()
            return [checking.check(who).allowed for _ in range(3)]

        assert spend() == [True, False, False]
        typed = {"key": "header:x-tenant=acme", "account": "", "rule": "tenant", "reason": "asked"}
        page, _done = confirmed(client, RESET, typed)
        assert "header:X-Tenant=acme 0 1" in text(page)
        assert spend() == [True, False, False]
        confirmed(client, GRANT, {**TYPED[GRANT], **typed, "extra": "1"})
        assert KeyOverride.objects.get().key == "header:X-Tenant=acme"
        assert spend() == [True, False, False]


class TestWhoMay:
    @pytest.mark.parametrize("url", [BLOCK, RESET, GRANT])
    def test_only_operators_add(self, url: str) -> None:
        rule(key_kind="user")
        every = [
            codename for codename in Permission.objects.values_list("codename", flat=True) if codename != "operate"
        ]
        for client in (user_with(), user_with("view_access", "view_keyreset"), user_with(*every)):
            for values in (TYPED[url], {**TYPED[url], "_confirmed": "1"}):
                before = counts()
                assert (client.get(url).status_code, client.post(url, values).status_code) == (403, 403)
                assert counts() == before
        nobody = user_with("operate", staff=False)
        assert nobody.post(url, TYPED[url])["Location"].startswith("/admin/login/")
        _page, response = confirmed(user_with("operate"), url, TYPED[url])
        assert response.status_code == 302

    def test_lists_are_for_operators_and_those_who_may_view(self) -> None:
        row = Access.objects.create(target="user:1", reason="r")
        done = KeyReset.objects.create(key="user:1", rule="burst", reason="r")
        for url, view in ((BLOCKS, "view_access"), (RESETS, "view_keyreset")):
            pk = row.pk if url == BLOCKS else done.pk
            for page in (url, f"{url}{pk}/change/", f"{url}{pk}/history/"):
                assert user_with("view_rule").get(page).status_code == 403
                assert user_with(view).get(page).status_code == 200
                assert user_with("operate").get(page).status_code == 200
            assert user_with("operate", view).get(f"{url}{pk}/delete/").status_code == 403

    def test_who_may_view_can_change_and_end_nothing(self) -> None:
        row = Access.objects.create(target="user:1", reason="r")
        client = user_with("view_access")
        values = {**typed_block(target="user:1", effect="allow"), "_confirmed": "1"}
        assert client.post(f"{BLOCKS}{row.pk}/change/", values).status_code == 403
        history = f"{BLOCKS}{row.pk}/history/{row.history.latest().pk}/"
        assert client.get(history).status_code == 200
        assert client.post(history, values).status_code == 403
        client.post(BLOCKS, {"action": "end_now", "_selected_action": [row.pk], "_confirmed": "1", "reason": "x"})
        row.refresh_from_db()
        assert (row.effect, row.valid_until) == ("block", None)


class TestBlocks:
    def test_a_network_is_blocked_after_a_confirmation_and_unblocked_with_a_reason(self) -> None:
        who, client = Identity(address="ip:203.0.113.7"), user_with("operate")
        page, _response = confirmed(client, BLOCK, typed_block(valid_until_0="2099-01-01", valid_until_1="00:00:00"))
        said = text(page)
        assert "Every request of ip:203.0.113.0/24 is refused with 403" in said
        assert "The network has 256 addresses." in said
        assert "until 2099-01-01 00:00 UTC." in said
        assert "Reason: a scan" in said
        assert not checking.check(who).allowed
        row = Access.objects.get()
        record = row.history.get()
        assert (record.history_change_reason, record.history_user.username) == ("a scan", "user0")
        asked = client.post(BLOCKS, {"action": "end_now", "_selected_action": [row.pk]})
        assert "ip:203.0.113.0/24 block a scan" in text(asked)
        again = {"action": "end_now", "_selected_action": [row.pk], "_confirmed": "1"}
        assert "This field is required" in text(client.post(BLOCKS, {**again, "reason": ""}))
        assert not checking.check(who).allowed
        done = client.post(BLOCKS, {**again, "reason": "over"}, follow=True)
        assert "Ended: block ip:203.0.113.0/24." in done.content.decode()
        assert checking.check(who).allowed
        assert row.history.latest().history_change_reason == "over"
        assert LogEntry.objects.count() == 2
        over = client.post(BLOCKS, {**again, "reason": "over"}, follow=True)
        assert "There is nothing to end: every chosen row has ended already." in over.content.decode()

    def test_it_is_ended_on_its_own_page(self) -> None:
        row = Access.objects.create(target="user:1", reason="a scan", message="Write to us.")
        who, client = Identity("user:1", None, "account:1"), user_with("operate")
        assert not checking.check(who).allowed
        url = f"{BLOCKS}{row.pk}/end/"
        assert f'<a href="{url}">End now</a>' in client.get(f"{BLOCKS}{row.pk}/change/").content.decode()
        assert "user:1 block a scan" in text(client.get(url))
        for values in ({}, {"_confirmed": "1", "reason": ""}, {"reason": "over"}):
            assert client.post(url, values).status_code == 200
        assert not checking.check(who).allowed
        done = client.post(url, {"_confirmed": "1", "reason": "over"}, follow=True)
        assert done.redirect_chain == [(BLOCKS, 302)]
        assert "Ended: block user:1." in done.content.decode()
        assert checking.check(who).allowed
        record = row.history.latest()
        assert (record.history_change_reason, record.history_user.username) == ("over", "user0")
        assert "End now" not in client.get(f"{BLOCKS}{row.pk}/change/").content.decode()
        assert client.get(url, follow=True).redirect_chain == [(BLOCKS, 302)]
        viewer = user_with("view_access")
        other = Access.objects.create(target="user:2", reason="r")
        assert "End now" not in viewer.get(f"{BLOCKS}{other.pk}/change/").content.decode()
        assert viewer.get(f"{BLOCKS}{other.pk}/end/").status_code == 403
        assert viewer.post(f"{BLOCKS}{other.pk}/end/", {"_confirmed": "1", "reason": "x"}).status_code == 403
        assert user_with("operate").get(f"{BLOCKS}999/end/").status_code == 404

    def test_it_is_given_for_a_length_of_time(self) -> None:
        client, before = user_with("operate"), moments.now()
        page = client.get(BLOCK)
        assert "for an hour for a day for a week" in text(page)
        assert f"In the time zone {moments.zone_name()}. A time without a date means today, or tomorrow" in text(page)
        page, _response = confirmed(client, BLOCK, typed_block(lasts="3600"))
        row = Access.objects.get()
        assert row.valid_until is not None
        hour = timedelta(hours=1)
        assert hour - timedelta(seconds=1) <= row.valid_until - before <= moments.now() - before + hour
        assert f"until {row.valid_until:%Y-%m-%d %H:%M} UTC." in text(page)
        confirmed(client, BLOCK, typed_block(target="user:7", lasts="86400", **FROM_2099))
        later = Access.objects.get(target="user:7")
        assert later.valid_from is not None
        assert later.valid_until == later.valid_from + timedelta(days=1)
        both = typed_block(target="user:8", lasts="3600", valid_until_0="2099-01-01", valid_until_1="0:00")
        assert "Choose a length of time, or write an end, but not both." in text(client.post(BLOCK, both))
        # The end of a row that is edited was not typed. The length of time replaces it.
        page, _response = confirmed(
            client,
            f"{BLOCKS}{row.pk}/change/",
            {
                **both,
                "target": "user:9",
                "valid_until_0": f"{row.valid_until:%Y-%m-%d}",
                "valid_until_1": f"{row.valid_until:%H:%M:%S}",
                "lasts": "604800",
            },
        )
        row.refresh_from_db()
        assert row.valid_until is not None
        assert row.valid_until > moments.now() + timedelta(days=6)

    def test_a_time_without_a_date_is_its_next_occurrence(self, settings: Any) -> None:
        client = user_with("operate")
        settings.TIME_ZONE = "Asia/Tokyo"
        for shift in (-timedelta(minutes=2), timedelta(minutes=2)):
            local = moments.now().astimezone(ZoneInfo("Asia/Tokyo")) + shift
            page, _response = confirmed(client, BLOCK, typed_block(valid_until_1=f"{local:%H:%M:%S}"))
            row = Access.objects.get()
            assert row.valid_until is not None
            assert timedelta(0) < row.valid_until - moments.now() <= timedelta(days=1)
            assert row.valid_until.astimezone(ZoneInfo("Asia/Tokyo")).time() == local.time().replace(microsecond=0)
            assert f"until {row.valid_until.astimezone(ZoneInfo('Asia/Tokyo')):%Y-%m-%d %H:%M} JST" in text(page)
            row.delete()
        for typed, said in (
            ({"valid_until_0": "2099-01-01"}, "Write a time such as 18:00."),
            ({"valid_until_0": "tomorrow", "valid_until_1": "18:00"}, "leave the date empty."),
            ({"valid_until_1": "6 pm"}, "Write a time such as 18:00."),
        ):
            assert said in text(client.post(BLOCK, typed_block(**typed))), typed
        assert not Access.objects.exists()

    def test_a_name_is_blocked_as_the_key_that_has_it(self) -> None:
        client = user_with("operate", "view_account")
        Account.objects.create(identifier="acme-1", name="Acme Ltd.")
        page, _response = confirmed(client, BLOCK, typed_block(target="cme ltd"))
        assert "Every request of account:acme-1 (Acme Ltd.) is refused" in text(page)
        assert Access.objects.get().target == "account:acme-1"
        Account.objects.create(identifier="acme-2", name="Acme Inc.")
        asked = text(client.post(BLOCK, typed_block(target="acme")))
        assert (
            "Which key do you mean? Write one of these keys: account:acme-1 (Acme Ltd.), account:acme-2 (Acme Inc.)"
            in asked
        )
        assert "contains “nobody”" in text(client.post(BLOCK, typed_block(target="nobody")))

    def test_whoever_may_not_view_a_name_does_not_find_it(self) -> None:
        Account.objects.create(identifier="7", name="Acme Ltd.")
        assert "contains “Acme”" in text(user_with("operate").post(BLOCK, typed_block(target="Acme")))

    def test_whoever_blocks_themselves_is_warned(self) -> None:
        client = user_with("operate")
        for target, warned in (("127.0.0.0/8", True), (f"user:{User.objects.get().pk}", True), ("user:9999", False)):
            page = client.post(BLOCK, typed_block(target=target))
            assert ("This also blocks your own requests" in text(page)) == warned, target
        page = client.post(BLOCK, typed_block(target="127.0.0.0/8", effect="allow"))
        assert "not counted as usage and not billed" in text(page)
        assert "Your own requests" not in text(page)

    def test_whoever_would_lock_themselves_out_of_the_admin_is_warned(self, settings: Any) -> None:
        client = user_with("operate")
        assert "You can still use these admin pages." in text(client.post(BLOCK, typed_block(target="127.0.0.0/8")))
        settings.RATELIMITS = {**settings.RATELIMITS, "PATHS": {"/files/": {}, "/": {"cost": 0}}}
        page, _response = confirmed(client, BLOCK, typed_block(target="127.0.0.0/8"))
        assert "You then cannot use these admin pages either." in text(page)
        assert "You can still use" not in text(page)
        assert client.get(BLOCKS).status_code == 403

    def test_a_key_that_nobody_has_is_warned_of_before_the_confirmation(self) -> None:
        client = user_with("operate")
        Account.objects.create(identifier="acme-1")
        for target, warned in (
            ("account:acmee", True),
            ("user:9999", True),
            ("account:acme-1", False),
            ("user:1", False),
            ("203.0.113.9", False),
        ):
            for effect in ("block", "allow"):
                page = client.post(BLOCK, typed_block(target=target, effect=effect))
                said = "Until somebody has this key, the block or allow has no effect." in text(page)
                assert said == warned, (target, effect)
        page, _response = confirmed(client, BLOCK, typed_block(target="account:acmee"))
        assert "No account has the identifier “acmee”." in text(page)
        assert Access.objects.get().target == "account:acmee"
        # The page of consequences has warned. The list does not warn again.
        assert "acmee”" not in text(client.get(BLOCKS)).replace("account:acmee", "")

    def test_a_mistake_is_shown_at_its_field_before_any_confirmation(self) -> None:
        client = user_with("operate")
        for wrong, said in (
            ({"target": "203.0.113.9/24"}, "write 203.0.113.0/24 for the network"),
            ({"reason": ""}, "This field is required"),
            ({**FROM_2099, "valid_until_0": "2098-01-01", "valid_until_1": "0:00"}, "The end is not after the start"),
        ):
            assert said in text(client.post(BLOCK, typed_block(**wrong)))
        assert not Access.objects.exists()

    def test_a_change_is_confirmed_too(self) -> None:
        row = Access.objects.create(target="user:1", reason="r")
        _page, response = confirmed(user_with("operate"), f"{BLOCKS}{row.pk}/change/", typed_block(target="user:2"))
        assert response.status_code == 302
        row.refresh_from_db()
        assert (row.target, row.reason, row.history.count()) == ("user:2", "a scan", 2)

    def test_the_list_says_what_is_in_force_and_what_it_refused_by_few_queries(self) -> None:
        now = moments.now()
        Access.objects.create(target="user:1", reason="r")
        Access.objects.create(target="user:2", reason="r", valid_from=now + timedelta(hours=1))
        Access.objects.create(target="user:3", reason="r", valid_until=now)
        totals: dict[str, Any] = {"process": "p", "key": "user:1", "bin": int(time.time()), "units": 5}
        for kind, meter, requests in (("blocked", "requests", 1200), ("blocked", "tokens", 1200), ("admitted", "", 9)):
            ProcessTotal.objects.create(kind=kind, meter=meter, requests=requests, **totals)
        client = user_with("operate")
        client.get(BLOCKS)
        with CaptureQueriesContext(connection) as few:
            said = text(client.get(BLOCKS))
        assert re.search(r"user:1 block in force .* 1,200 r", said)
        assert "user:2 block later" in said
        assert "user:3 block ended" in said
        assert "1,200" in text(client.get(f"{BLOCKS}{Access.objects.get(target='user:1').pk}/change/"))
        Access.objects.bulk_create(Access(target=f"user:{n}", reason="r") for n in range(10, 60))
        with CaptureQueriesContext(connection) as many:
            client.get(BLOCKS)
        assert len(many) == len(few)


class TestResets:
    def test_a_key_is_reset_after_a_page_that_says_where_it_stands(self) -> None:
        rule("day", "fixed_window", capacity=2, period=86_400, key_kind="user")
        who = Identity("user:1", None, "account:1")
        assert [checking.check(who).allowed for _ in range(3)] == [True, True, False]
        client = user_with("operate")
        page, response = confirmed(client, RESET, {**TYPED[RESET], "rule": "day"})
        assert "day user:1 0 2" in text(page)
        assert response["Location"] == RESETS
        from_memory.denials.clear()
        assert checking.check(who).allowed
        row = KeyReset.objects.get()
        assert (row.account, row.reason, str(row.by)) == ("1", "asked", "user0")
        assert "user:1 day 1 asked user0" in text(client.get(RESETS))

    def test_what_cannot_be_reset_is_said(self, settings: Any) -> None:
        rule("all", "fixed_window", key_kind="global")
        client = user_with("operate")
        assert "No rule counts user:1 as one key" in text(client.post(RESET, TYPED[RESET]))
        page = user_with("operate", "view_line").get(f"{RESET}?key=account:1&rule=day").content.decode()
        assert '<a href="?key=user%3A1&amp;account=1&amp;rule=day">user:1</a>' in page
        assert "account=1" not in user_with("operate").get(f"{RESET}?key=account:1&rule=day").content.decode()
        client = user_with("operate")
        rule("day", "fixed_window", key_kind="user")
        for wrong, said in (
            ({"rule": "all"}, "is not one of the available choices"),
            ({"rule": "day", "key": "user:999"}, "No user has the primary key “999”"),
            ({"rule": "day", "key": "team"}, "No key or name that you may view contains “team”."),
            ({"rule": "day", "reason": ""}, "This field is required"),
        ):
            assert said in text(client.post(RESET, {**TYPED[RESET], **wrong})), wrong
        away(settings, free_port())
        assert "does not answer" in text(client.post(RESET, {**TYPED[RESET], "rule": "day"}))
        assert not KeyReset.objects.exists()

    def test_a_link_fills_the_form_with_the_rules_that_count_the_key(self) -> None:
        rule("day", "fixed_window", key_kind="user")
        rule("off", "fixed_window", key_kind="user", mode="off")
        rule("payer", "fixed_window", key_kind="account")
        rule("net", "fixed_window", key_kind="ip", ipv4_prefix=24)
        assert "net: 100 requests per minute" in text(user_with("operate").get(f"{RESET}?key=ip:203.0.113.0/24"))
        page = user_with("operate").get(f"{RESET}?key=user:1&rule=day").content.decode()
        assert 'name="key" value="user:1"' in page
        assert [(name, bool(selected)) for name, selected, _label in offered(page)] == [("day", True)]


class TestGrants:
    def test_more_is_granted_after_a_page_that_shows_the_overrides(self) -> None:
        rule("day", "fixed_window", capacity=2, period=86_400, key_kind="account")
        until = moments.now() + timedelta(hours=2)
        KeyOverride.objects.create(key="account:1", rule="day", capacity=4, valid_until=until)
        who = Identity("user:1", None, "account:1")
        assert checking.check(who).allowed
        typed = {**TYPED[GRANT], "key": "account:1", "rule": "day"}
        client = user_with("operate", "view_keyoverride")
        page, response = confirmed(client, GRANT, typed)
        assert f"Reason: {typed['reason']}" in text(page)
        said = text(page)
        assert re.search(r"UTC 4 9 ", said)
        assert re.search(r"2099-01-01 00:00 UTC 2 7 ", said)
        assert "account:1 has 5 more requests in each window of 1 day (rule day)." in said
        assert "account:1 has 3 of 4 left now, and 8 of 9 with the grant." in said
        assert "Until then, account:1 gets 5 more in each window of 1 day. So the total can be more than 5." in said
        assert 'value="Give 5 more requests in each window of 1 day"' in page.content.decode()
        assert "/keyoverride/" in response["Location"]
        shown = client.get(response["Location"])
        (message,) = map(str, shown.context["messages"])
        assert message.startswith("Until 2099-01-01 00:00 UTC, account:1 has 5 more requests in each window of 1 day")
        assert "account:1 has 8 of 9 left now. To undo this, end the override: <a href=" in message
        assert all(f"/keyoverride/{row.pk}/change/" in message for row in KeyOverride.objects.filter(reason="asked"))
        assert [checking.check(who).allowed for _ in range(9)] == [True] * 8 + [False]
        assert {str(one.history_user) for one in KeyOverride.history.filter(history_change_reason="asked")} == {"user0"}

    def test_a_rule_that_counts_single_keys_gives_more_to_each_key_of_the_account(self) -> None:
        rule("month", "calendar_window", calendar_unit="month", capacity=7, timezone="Europe/Berlin", key_kind="user")
        typed = {**TYPED[GRANT], "key": "account:1", "rule": "month"}
        page, response = confirmed(user_with("operate", "view_inspect"), GRANT, typed)
        expected = "each key of account:1 has 5 more requests in each calendar month (Europe/Berlin) (rule month)."
        assert expected in text(page)
        typed |= {"until_0": (moments.now() + timedelta(hours=1)).strftime("%Y-%m-%d"), "until_1": "23:59:59"}
        assert "So the total can be more than" not in text(CLIENT.post(GRANT, typed))
        typed["until_0"] = (moments.now() + timedelta(days=40)).strftime("%Y-%m-%d")
        each_month = "gets 5 more in each calendar month (Europe/Berlin). So the total can be more than 5."
        assert each_month in text(CLIENT.post(GRANT, typed))
        assert "user:1 has 7 of 7 left now, and 12 of 12 with the grant." in text(page)
        assert response["Location"] == "/admin/ratelimits/inspect/?q=account%3A1"
        assert sum(checking.check(Identity("user:1", None, "account:1")).allowed for _ in range(14)) == 12

    def test_only_rules_with_a_capacity_that_apply_are_offered_and_first_those_that_refused(self) -> None:
        rule("a-burst", key_kind="user")
        rule("hour", "fixed_window", key_kind="account")
        rule("smooth", "smooth_bursty", key_kind="account", max_wait=1)
        rule("place", "fixed_window", key_kind="ip")
        rule("all", "fixed_window", key_kind="global")
        gold = rule("gold", "fixed_window", key_kind="account", plan=Plan.objects.create(name="Gold", slug="gold"))
        late, early = (rule(name, "concurrency", key_kind="caller") for name in ("x-late", "x-early"))
        now = int(time.time()) // QUARTER * QUARTER
        for row, start in ((late, now), (early, now - QUARTER), (gold, now)):
            KeyTotal.objects.create(
                span=QUARTER, start=start, rule=row.pk, account="1", key="user:1", meter="requests",
                admitted_requests=0, denied_requests=3, shadow_requests=0,
            )  # fmt: skip
        page = user_with("operate").get(f"{GRANT}?key=account:1").content.decode()
        options = offered(page)
        assert [name for name, _selected, _label in options] == ["x-late", "x-early", "a-burst", "hour"]
        assert [name for name, selected, _label in options if selected] == ["x-late"]
        late_label = (
            r"x-late: .*10 requests at once.* – refused 3 in 24 hours, last at \d\d:\d\d–\d\d:\d\d UTC"
            r" – gives more at once"
        )
        assert re.fullmatch(late_label, options[0][2])
        assert re.fullmatch(r"hour: 100 requests per minute.* – gives more in each window of 1 minute", options[3][2])
        assert "No rule here has a window of a day or longer" in text(CLIENT.get(f"{GRANT}?key=account:1"))
        rule("month", "calendar_window", calendar_unit="month", key_kind="account")
        assert "No rule here has" not in text(CLIENT.get(f"{GRANT}?key=account:1"))

    def test_the_warning_fits_the_rule_and_names_each_key(self, settings: Any) -> None:
        settings.RATELIMITS = {**settings.RATELIMITS, "KEY_SEARCH": f"{__name__}.named"}
        rule("burst", capacity=20, rate=10, period=1, key_kind="caller")
        rule("places", "concurrency", capacity=3, key_kind="account")
        rule("minute", "fixed_window", key_kind="caller")
        used("api_key:7", "1")
        typed = {**TYPED[GRANT], "key": "account:1"}
        said = text(user_with("operate").post(GRANT, typed))
        assert "This raises the burst from 20 to 25. The rate does not change. So the total can be more than 5." in said
        assert "Each of the 2 keys of account:1 gets this: up to 2 × 5 = 10 in all, at once." in said
        assert "api_key:7 (phone) has 20 of 20 left now, and 25 of 25 with the grant." in said
        said = text(CLIENT.post(GRANT, {**typed, "rule": "places"}))
        assert (
            "This raises the number of requests at the same time from 3 to 8. So the total can be more than 5." in said
        )
        assert "Each key" not in said
        said = text(CLIENT.post(GRANT, {**typed, "rule": "minute"}))
        assert (
            "Until then, each key of account:1 gets 5 more in each window of 1 minute. So the total can be more" in said
        )
        assert "up to 2 × 5 = 10 in all, in each window of 1 minute." in said
        page = CLIENT.get(f"{GRANT}?key=account:1").content.decode()
        assert '<label class="required" for="id_reason">' in page or '<label for="id_reason" class="required">' in page
        assert "</a> › Give more</div>" in re.sub(r"\s+", " ", unescape(page))

    def test_the_end_of_today_in_the_time_zone_of_the_account_is_filled_in(self) -> None:
        rule(key_kind="account")
        Account.objects.create(identifier="tokyo", name="Tokyo Ltd.", timezone="Asia/Tokyo")
        page = user_with("operate").get(f"{GRANT}?key=account:tokyo")
        end = page.context["form"]["until"].value()
        local = end.astimezone(ZoneInfo("Asia/Tokyo"))
        assert (local.hour, local.minute) == (0, 0)
        assert timedelta(0) < end - moments.now() <= timedelta(days=1)
        assert "the end of today in the time zone of the account, Asia/Tokyo." in text(page)

    def test_a_mistake_is_shown_at_its_field(self) -> None:
        rule("smooth", "smooth_bursty", key_kind="user", max_wait=1)
        client = user_with("operate")
        assert "No rule with a capacity applies to user:1" in text(client.post(GRANT, TYPED[GRANT]))
        rule("day", "fixed_window", key_kind="user")
        for wrong, said in (
            ({"rule": "smooth"}, "is not one of the available choices"),
            ({"until_0": "2001-01-01"}, "Choose a moment in the future."),
            ({"extra": "0"}, "greater than or equal to 1"),
            ({"extra": "9" * 30}, "capacity"),
            ({"key": "api_key:4"}, "No API key “4” is known"),
        ):
            assert said in text(client.post(GRANT, {**TYPED[GRANT], "rule": "day", **wrong})), wrong
        assert not KeyOverride.objects.exists()

    def test_overrides_and_grants_that_run_already_are_above_the_form_and_in_the_inspector(self) -> None:
        rule("day", "fixed_window", capacity=2, period=86_400, key_kind="account")
        until = moments.now() + timedelta(hours=2)
        running = KeyOverride.objects.create(
            key="account:1", rule="day", capacity=4, mode="shadow", valid_until=until, reason="a deal"
        )
        KeyOverride.objects.create(key="account:1", rule="day", capacity=5, valid_from=until, valid_until=None)
        KeyOverride.objects.create(key="account:1", rule="day", capacity=6, valid_until=moments.now())
        KeyOverride.objects.create(key="account:2", rule="day", capacity=7)
        said = f"day for account:1: capacity 4, shadow, until {until:%Y-%m-%d %H:%M} UTC"
        later = f"day for account:1: capacity 5, from {until:%Y-%m-%d %H:%M} UTC, without an end"
        link = f'<a href="{BASE}/keyoverride/{running.pk}/change/">{said} (a deal)</a>'
        for url in (f"{GRANT}?key=account:1", f"{BASE}/inspect/?q=account:1"):
            page = user_with("operate", "view_inspect").get(url)
            assert said in text(page)
            assert later in text(page)
            assert "capacity 6" not in text(page)
            assert "capacity 7" not in text(page)
            assert "a deal" not in text(page)
            page = user_with("operate", "view_inspect", "view_keyoverride").get(url)
            assert link in page.content.decode()
        assert "capacity 4" not in text(user_with("view_inspect").get(f"{BASE}/inspect/?q=account:1"))

    def test_a_grant_is_ended_on_a_page_that_says_what_applies_then(self) -> None:
        rule("day", "fixed_window", capacity=2, period=86_400, key_kind="account")
        KeyOverride.objects.create(key="account:1", rule="day", capacity=4)
        client = user_with("operate", "view_keyoverride", "change_keyoverride")
        _page, response = confirmed(client, GRANT, {**TYPED[GRANT], "key": "account:1", "rule": "day"})
        granted = KeyOverride.objects.get(reason="asked")
        shown = client.get(response["Location"])
        (message,) = map(str, shown.context["messages"])
        url = f"{BASE}/keyoverride/{granted.pk}/end/"
        assert f'end the override: <a href="{url}">day for account:1</a>.' in message
        assert f'<a href="{url}">End now</a>' in client.get(f"{BASE}/keyoverride/{granted.pk}/change/").content.decode()
        said = text(client.get(url))
        assert "The numbers of the rule apply again from the next request on." in said
        assert "From 2099-01-01 00:00 UTC on, another override applies: capacity 4." in said
        who = Identity("user:1", None, "account:1")
        assert checking.check(who).allowed
        done = client.post(url, {"_confirmed": "1", "reason": "a mistake"}, follow=True)
        assert "Ended: day for account:1." in done.content.decode()
        assert [checking.check(who).allowed for _ in range(2)] == [True, False]
        assert granted.history.latest().history_change_reason == "a mistake"
        later = KeyOverride.objects.get(valid_from__gt=moments.now())
        assert client.get(f"{BASE}/keyoverride/{later.pk}/end/").status_code == 403, "to end it is to delete it"
        client = user_with("change_keyoverride", "delete_keyoverride")
        ending = client.post(f"{BASE}/keyoverride/{later.pk}/end/", {"_confirmed": "1", "reason": "x"})
        assert ending.status_code == 302
        assert not KeyOverride.objects.filter(pk=later.pk).exists()


class TestForWhom:
    """The first page of resets and grants."""

    @pytest.mark.parametrize("url", [RESET, GRANT])
    def test_a_name_leads_to_its_key(self, url: str) -> None:
        rule("day", "fixed_window", key_kind="account")
        Account.objects.create(identifier="c-17", name="Acme Ltd.")
        client = user_with("operate", "view_account")
        asked = text(client.get(url))
        assert "For whom" in asked
        assert "Reason" not in asked
        assert "account:c-17 (Acme Ltd.)" in text(client.get(f"{url}?key=acme"))
        Account.objects.create(identifier="acme-2", name="")
        page = client.get(f"{url}?key=acme&rule=day")
        assert "Which key do you mean? account:acme-2 account:c-17 (Acme Ltd.)" in text(page)
        assert 'href="?key=account%3Ac-17&amp;rule=day"' in page.content.decode()
        assert "No key or name that you may view contains “acme”" in text(user_with("operate").get(f"{url}?key=acme"))

    def test_the_account_of_a_user_comes_before_the_user(self, settings: Any) -> None:
        acme = User.objects.create(username="acme")
        client = user_with("operate", "view_user")
        page = text(client.get(f"{GRANT}?key=acme"))
        assert (
            f"Which key do you mean? account:{acme.pk} (acme) – the customer, with all keys"
            f" user:{acme.pk} (acme) – only requests of this user without an API key"
        ) in page
        settings.RATELIMITS = {**settings.RATELIMITS, "ACCOUNT": "tests.status.test_operating.nobody"}
        assert f"account:{acme.pk}" not in text(client.get(f"{GRANT}?key=acme"))

    def test_no_example_is_a_key_that_people_might_take_for_their_customer(self) -> None:
        for url in (GRANT, RESET, BLOCK):
            assert "account:acme" not in text(user_with("operate").get(url))
        assert "account:acme" not in text(CLIENT.get(f"{GRANT}?key=acme"))

    @pytest.mark.parametrize("url", [RESET, GRANT])
    def test_a_key_that_nobody_has_is_refused(self, url: str, settings: Any) -> None:
        rule("day", "fixed_window", key_kind="caller")
        client = user_with("operate")
        values = {**TYPED[url], "rule": "day", "_confirmed": "1"}
        for key, said in (
            ("user:999", "No user has the primary key “999”. Search for the user by name"),
            ("account:acmee", "No account has the identifier “acmee”. Search for a part"),
            ("api_key:4", "No API key “4” is known"),
            ("ip:203.0.113.9/24", "each IPv4 address is counted alone"),
            ("user:a b", "No user has the primary key “a b”"),
            ("x" * 400, "This text is too long for a key"),
            (SECRET, "This looks like a secret. Search for the name of the key instead."),
            ("user:\x00", "This text is too long for a key"),
        ):
            assert said in text(client.post(url, {**values, "key": key})), key
            assert said in text(client.get(url, {"key": key})), key
        settings.RATELIMITS = {**settings.RATELIMITS, "KEY_SEARCH": None}
        for account, said in (
            ("", "The account of api_key:4 is not known"),
            ("acmee", "No account has the identifier"),
        ):
            assert said in text(client.post(url, {**values, "key": "api_key:4", "account": account}))
        assert not KeyReset.objects.exists()
        assert not KeyOverride.objects.exists()
        assert "Somebody else" in text(client.get(url, {"key": "203.0.113.9"}))

    def test_a_key_of_several_accounts_asks_for_the_account(self, settings: Any) -> None:
        settings.RATELIMITS = {**settings.RATELIMITS, "ACCOUNT": "tests.status.test_operating.nobody"}
        rule("day", "fixed_window", key_kind="user")
        used("user:1", "acme")
        page = user_with("operate").get(f"{GRANT}?key=user:1&rule=day")
        assert "user:1 was used by several accounts (1, acme)" in text(page)
        assert 'href="?key=user%3A1&amp;account=acme&amp;rule=day"' in page.content.decode()
        page = CLIENT.get(f"{GRANT}?key=user:1&rule=day&account=acme")
        assert 'name="account" value="acme"' in page.content.decode()

    def test_an_account_is_not_asked_for_twice(self) -> None:
        rule("day", "fixed_window", key_kind="account")
        page = user_with("operate").get(f"{GRANT}?key=account:1").content.decode()
        assert 'name="account" value=""' in page
        assert 'id="id_account"' not in page


def tasks() -> dict[str, str]:
    """Return the links at the top of the admin's index, and check that each page opens."""
    page = CLIENT.get("/admin/").content.decode()
    nav = re.search(r'<nav class="ratelimits-tasks".*?</nav>', page, re.DOTALL)
    links = re.findall(r'<a href="([^"]*)">([^<]*)</a>', nav.group()) if nav is not None else []
    assert [CLIENT.get(url).status_code for url, _text in links] == [200] * len(links)
    return {text: url for url, text in links}


def test_the_index_leads_to_the_tasks_that_a_user_may_do() -> None:
    user_with("view_rule")
    assert tasks() == {}
    user_with("view_inspect")
    assert tasks() == {"Why was a request refused?": "/admin/ratelimits/inspect/"}
    user_with("operate")
    assert list(tasks().values()) == [GRANT, RESET, f"{BLOCK}?effect=block"]
    user_with("add_rule", "view_inspect", "operate")
    assert list(tasks()) == [
        "Why was a request refused?",
        "Give more",
        "Reset a key",
        "Block somebody",
        "Would a limit have refused anyone in the last 24 hours?",
    ]


def test_the_index_shows_them_to_operators_first() -> None:
    page = user_with("operate").get("/admin/").content.decode()
    assert page.index("Blocks and allows") < page.index("Resets")
    assert not Alert.objects.exists()
