"""Test the pages that import and export rows as CSV files: what they show, what they do, and for whom."""

from __future__ import annotations

import gc
import re
from collections.abc import Collection
from html import unescape
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from ratelimits.admin.operate.confirming import AsksBeforeSaving
from ratelimits.admin.row_files.shown import PER_PAGE
from ratelimits.models import Account, ConfigVersion, KeyOverride, Name, Plan, PlanMembership, Upload
from ratelimits.models.row_files.uploads import MAX_AGE
from ratelimits.row_files.comparing import ComparedLine
from tests.support.rows import rule

pytestmark = pytest.mark.django_db(transaction=True)

MEMBERSHIPS, OVERRIDES, ACCOUNTS = (
    f"/admin/ratelimits/{name}/" for name in ("planmembership", "keyoverride", "account")
)
#: One client for all users, because making a client reads all static files.
CLIENT = Client()


@pytest.fixture(autouse=True)
def plans() -> tuple[Plan, Plan]:
    return Plan.objects.create(name="Free", slug="free"), Plan.objects.create(name="Pro", slug="pro")


def user_with(*permissions: str) -> Client:
    user = User.objects.create(username=f"user{User.objects.count()}", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    CLIENT.cookies.clear()
    CLIENT.force_login(user)
    return CLIENT


def importer(model: str = "planmembership") -> Client:
    return user_with(f"view_{model}", f"add_{model}", f"change_{model}")


def upload(client: Client, url: str, *texts: str) -> Any:
    file = SimpleUploadedFile("rows.csv", "\n".join(texts).encode())
    return client.post(f"{url}import/", {"file": file})


def shown(client: Client, url: str, *texts: str) -> Any:
    """Return the page of differences of a file."""
    answer = upload(client, url, *texts)
    assert answer.status_code == 302, text(answer)
    return client.get(answer["Location"])


def confirmed(client: Client, page: Any, **typed: str) -> Any:
    """Post what the page's form has, and go where it leads."""
    assert page.status_code == 200
    inputs = re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', page.content.decode())
    address = page.request["PATH_INFO"] + "?" + page.request["QUERY_STRING"]
    return client.post(address, {**{name: unescape(value) for name, value in inputs}, **typed}, follow=True)


def text(page: Any) -> str:
    content = unescape(page.content.decode()).partition('<div id="content"')[2]
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", content))


def messages(page: Any) -> list[str]:
    return [str(message) for message in page.context["messages"]]


def rows() -> list[tuple[Any, ...]]:
    return list(PlanMembership.objects.values_list("key", "plan__slug"))


def test_500_memberships_with_3_wrong_lines(plans: tuple[Plan, Plan]) -> None:
    PlanMembership.objects.bulk_create(PlanMembership(key=f"user:{n}", plan=plans[n % 2]) for n in range(100))
    before = ConfigVersion.read("default")[0]
    texts = [f"user:{n},pro" for n in range(500)]
    texts[110], texts[220], texts[330] = "user:110,gold", "110", "user 330,pro"
    client = importer()
    page = shown(client, MEMBERSHIPS, "key,plan", *texts)
    said = text(page)
    for part in ("Wrong lines: 3", "Rows that change: 50", "New rows: 397", "Unchanged rows: 50"):
        assert part in said
    assert "112 user:110 plan: There is no plan with the slug “gold”. These slugs exist: free, pro." in said
    assert "2 user:0 plan: free → pro" in said
    assert len(rows()) == 100
    refused = confirmed(client, page, change_reason="OPS-17")
    assert "tick the box that leaves them out" in messages(refused)[0]
    assert 'value="OPS-17"' in refused.content.decode()
    assert (len(rows()), ConfigVersion.read("default")[0]) == (100, before)

    done = confirmed(client, refused, change_reason="OPS-17", good_only="on")
    assert messages(done) == ["447 rows were imported: 397 new, 50 changed. 3 wrong lines were left out."]
    assert len(rows()) == 497
    assert ConfigVersion.read("default")[0] == before + 1
    record = PlanMembership.objects.get(key="user:499").history.get()
    assert record.history_change_reason == "OPS-17"
    assert record.history_user.pk == LogEntry.objects.latest("pk").user_id
    assert LogEntry.objects.count() == 447
    assert not Upload.objects.exists()


def test_keys_that_nobody_has_are_named_before_the_import() -> None:
    pk = User.objects.create(username="ann").pk
    Account.objects.create(identifier="acme")
    rule("burst")
    client = importer("keyoverride")
    keys = [f"user:{pk}", "account:acme", "api_key:4", "account:acmee", f"user:{pk}000"]
    page = shown(client, OVERRIDES, "key,rule,capacity", *(f"{key},burst,5" for key in keys), "user:x,gold,5")
    said = text(page)
    assert "2 lines name users or accounts that do not exist. They can be imported." in said
    assert "Line 5: No account has the identifier “acmee”" in said
    assert f"Line 6: No user has the primary key “{pk}000”" in said
    assert "Line 7: No user" not in said, "this line is wrong"
    confirmed(client, page, good_only="on")
    assert KeyOverride.objects.count() == 5
    accounts = importer("account")
    assert "do not exist" not in text(shown(accounts, ACCOUNTS, "identifier,name", "new,New"))


def test_accounts_that_were_deleted_are_named_before_the_import() -> None:
    Account.objects.create(identifier="acme")
    token = Name.objects.get(identifier="acme").customer.token
    Account.objects.all().delete()
    client = importer("account")
    page = shown(client, ACCOUNTS, "identifier,name", "acme,Acme", "bolt,Bolt")
    said = text(page)
    assert "1 line adds an account that was deleted before. It is about the same customer." in said
    assert f"Its customer {token} still has this text" in said
    confirmed(client, page)
    assert "deleted before" not in text(shown(client, ACCOUNTS, "identifier,name", "acme,Other", "bolt,Bolt"))


def test_the_other_lines_are_on_other_pages() -> None:
    client = importer()
    page = shown(client, MEMBERSHIPS, "key,plan", *(f"user:{n},pro" for n in range(450)))
    assert "Show all rows" in text(page)
    last = client.get(f"{page.request['PATH_INFO']}?{page.request['QUERY_STRING']}&show=new&page=3")
    assert "451 user:449 key: user:449" in text(last)
    assert "user:399" not in text(last)
    assert len(confirmed(client, last).redirect_chain) == 1
    assert len(rows()) == 450


def test_the_page_keeps_only_the_lines_that_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[tuple[int, int]] = []

    def compare_bills(accounts: Collection[str]) -> None:
        gc.collect()
        kept.append((len(accounts), sum(isinstance(each, ComparedLine) for each in gc.get_objects())))

    monkeypatch.setattr(AsksBeforeSaving, "compare_bills", staticmethod(compare_bills))
    shown(importer("account"), ACCOUNTS, "identifier", *(f"acme-{n}" for n in range(3 * PER_PAGE)))
    assert kept == [(3 * PER_PAGE, PER_PAGE + 1)]  # and the last line


def test_what_somebody_changed_meanwhile_is_said_and_nothing_is_imported(plans: tuple[Plan, Plan]) -> None:
    row = PlanMembership.objects.create(key="user:1", plan=plans[0])
    client = importer()
    page = shown(client, MEMBERSHIPS, "key,plan", "user:2,pro", "user:1,pro")
    PlanMembership.objects.filter(pk=row.pk).update(valid_until="2126-01-01T00:00Z")
    again = confirmed(client, page)
    (said,) = messages(again)
    assert said.startswith("Nothing was imported: the file would now make other changes than you have seen")
    assert said.endswith("Since then, somebody has changed the rows of these lines: 3 (user:1).")
    assert rows() == [("user:1", "free")]
    assert "2 rows were imported: 1 new, 1 changed." in messages(confirmed(client, again))


def test_a_bad_file_is_refused_on_the_form() -> None:
    client = importer()
    page = upload(client, MEMBERSHIPS, "key,colour", "user:1,red")
    assert "There is no column “colour”: remove it from the file." in text(page)
    assert "This field is required." in text(client.post(f"{MEMBERSHIPS}import/"))
    large = upload(client, MEMBERSHIPS, "key,plan", "x" * 20_000_000)
    assert "This file has 19.1 MB, but a file can have at most 10 MB: split it into several files." in text(large)
    assert not Upload.objects.exists()


def test_a_file_that_changes_nothing_has_no_button(plans: tuple[Plan, Plan]) -> None:
    PlanMembership.objects.create(key="user:1", plan=plans[1])
    page = shown(importer(), MEMBERSHIPS, "key,plan", "user:1,pro")
    assert "There is nothing to import: the file would change no row." in text(page)
    assert "<form" not in page.content.decode().partition('id="content-main"')[2]


def test_an_export_can_be_imported_and_has_no_formulae(plans: tuple[Plan, Plan]) -> None:
    rule()
    KeyOverride.objects.create(key="user:1", rule="burst", capacity=5, reason='=HYPERLINK("x")')
    Account.objects.create(identifier="acme", name="+41", plan=plans[1])
    PlanMembership.objects.create(key="user:1", plan=plans[0], valid_until="2126-01-01T00:00Z")
    client = user_with(
        *(f"{may}_{name}" for may in ("view", "add", "change") for name in ("keyoverride", "account", "planmembership"))
    )
    expected = {
        OVERRIDES: [
            "key,rule,capacity,rate,period,mode,valid_from,valid_until,reason",
            'user:1,burst,5,,,,,,"\'=HYPERLINK(""x"")"',
        ],
        ACCOUNTS: ["identifier,name,plan,timezone,billing_anchor", "acme,'+41,pro,UTC,"],
        MEMBERSHIPS: ["key,plan,valid_from,valid_until", "user:1,free,,2126-01-01T00:00:00+00:00"],
    }
    for url, lines in expected.items():
        answer: Any = client.get(f"{url}export/")
        file = b"".join(answer.streaming_content).decode()
        assert file.splitlines() == lines
        assert "attachment; filename=" in answer["Content-Disposition"]
        assert "There is nothing to import" in text(shown(client, url, file))


def test_an_export_has_the_rows_of_the_list(plans: tuple[Plan, Plan]) -> None:
    for n in range(3):
        PlanMembership.objects.create(key=f"user:{n}", plan=plans[n % 2])
    client = importer()
    query = f"?plan__id__exact={plans[0].pk}"
    page = client.get(f"{MEMBERSHIPS}{query}")
    (url,) = re.findall(r'href="([^"]*/export/[^"]*)"', page.content.decode())
    with CaptureQueriesContext(connection) as captured:
        answer: Any = client.get(unescape(url))
        file = b"".join(answer.streaming_content).decode()
    assert re.findall(r"^user:\d,free", file, re.MULTILINE) == ["user:0,free", "user:2,free"]
    PlanMembership.objects.bulk_create(PlanMembership(key=f"user:{n}", plan=plans[0]) for n in range(10, 60))
    with CaptureQueriesContext(connection) as more:
        b"".join(client.get(unescape(url)).streaming_content)  # type: ignore[attr-defined]
    assert len(more) == len(captured)
    assert client.get(f"{MEMBERSHIPS}export/?valid_until__gt=soon").status_code == 302


class TestWhoMay:
    @pytest.mark.parametrize("held", [["view"], ["view", "add"], ["view", "change"], ["add", "change"]])
    def test_a_file_is_shown_and_imported_for_those_who_may_add_and_change(self, held: list[str]) -> None:
        client = importer()
        page = shown(client, MEMBERSHIPS, "key,plan", "user:1,pro")
        user = User.objects.latest("pk")
        user.user_permissions.set(Permission.objects.filter(codename__in=[f"{may}_planmembership" for may in held]))
        url = page.request["PATH_INFO"] + "?" + page.request["QUERY_STRING"]
        expected = 200 if {"add", "change"} <= {*held} else 403
        assert client.get(url).status_code == expected
        hidden = dict(re.findall(r'name="(digest|version)" value="([^"]*)"', page.content.decode()))
        assert client.post(url, hidden).status_code == (302 if expected == 200 else 403)
        assert len(rows()) == (expected == 200)

    def test_a_file_is_for_the_one_who_chose_it_and_for_its_table(self) -> None:
        client = importer()
        page = shown(client, MEMBERSHIPS, "key,plan", "user:1,pro")
        query = page.request["QUERY_STRING"]
        other = user_with("add_planmembership", "change_planmembership", "add_account", "change_account")
        for url in (f"{MEMBERSHIPS}import/?{query}", f"{ACCOUNTS}import/?{query}", f"{MEMBERSHIPS}import/?file=x"):
            answer = other.get(url, follow=True)
            assert "This file is no longer stored: choose it again." in messages(answer)
        assert rows() == []

    def test_a_file_waits_for_a_day(self) -> None:
        client = importer()
        page = shown(client, MEMBERSHIPS, "key,plan", "user:1,pro")
        Upload.objects.update(at=timezone.now() - MAX_AGE)
        assert "This file is no longer stored: choose it again." in messages(confirmed(client, page))
        upload(client, MEMBERSHIPS, "key,plan", "user:2,pro")
        assert Upload.objects.count() == 1
        assert rows() == []

    def test_links_are_shown_to_those_who_may_follow_them(self) -> None:
        assert "import/" not in user_with("view_account").get(ACCOUNTS).content.decode()
        assert "import/" in importer("account").get(ACCOUNTS).content.decode()
