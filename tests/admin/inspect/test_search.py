"""Test what the inspector finds for a text: a key, a part of one, a name; and what it says of other texts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from ratelimits.models import Access, Account, KeyOverride, Plan, PlanMembership
from ratelimits.usage.models import KeyTotal
from ratelimits.usage.models.totals import DAY, SUMS, newest_days
from tests.admin.inspect.test_page import html, text, user_with
from tests.admin.test_operate import SECRET
from tests.support.below import SITE

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _account_is_the_user(settings: Any) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "ACCOUNT": None}


def used(key: str, account: str, days: int = 0) -> None:
    subject = {"account": account, "key": key, "rule": 0, "meter": "requests"}
    start = newest_days(time.time(), days + 1)[days]
    KeyTotal.objects.create(span=DAY, start=start, **subject, **dict.fromkeys(SUMS, 1))


def matches(client: Client, q: str) -> list[str]:
    response = client.get("/admin/ratelimits/inspect/", {"q": q})
    assert response.status_code == 200
    return [one.key for one, _url in response.context.get("matches") or ()]


def project_names(part: str) -> Iterator[tuple[str, str]]:
    if part == "broken":
        raise RuntimeError("no directory")
    for number in range(60 if part == "many" else 2):
        yield f"api_key:{number}", f"<i>Ada's {part} {number}"
    yield "team:1", "not a key"


def test_every_table_is_searched_by_a_part_of_the_key_or_name(admin_client: Client) -> None:
    ada = User.objects.create(username="ada-lovelace", email="countess@example.com")
    Account.objects.create(identifier="lovelace-ltd", name="Analytical")
    pro = Plan.objects.create(name="Pro", slug="pro")
    PlanMembership.objects.create(key="api_key:lovelace-1", plan=pro)
    KeyOverride.objects.create(key="api_key:lovelace-2", rule="x", capacity=1)
    Access.objects.create(target="account:lovelace-3", reason="r")
    used("api_key:lovelace-4", "babbage")
    used("api_key:lovelace-5", "babbage", days=5)
    assert matches(admin_client, "LoveLace") == [
        "account:lovelace-3",
        "account:lovelace-ltd",
        "api_key:lovelace-1",
        "api_key:lovelace-2",
        "api_key:lovelace-4",
        f"user:{ada.pk}",
    ]
    assert f"user:{ada.pk} (ada-lovelace)" in text(html(admin_client, "countess"))
    assert "account:lovelace-ltd (Analytical)" in text(html(admin_client, "nalytic"))
    assert "account:babbage" in text(html(admin_client, "babb"))


def test_what_is_exactly_the_text_comes_first_and_50_are_listed(admin_client: Client) -> None:
    for number in range(60):
        Account.objects.create(identifier=f"acme{number:02}")
    Account.objects.create(identifier="zz-acme")
    Account.objects.create(identifier="acme")
    found = matches(admin_client, "acme")
    assert found[:2] == ["account:acme", "account:acme00"]
    assert len(found) == 50
    assert "There are more keys: at most 50 are listed" in text(html(admin_client, "acme"))
    assert matches(admin_client, "acme%") == matches(admin_client, "acme_") == []


def test_a_table_that_the_user_may_not_view_is_not_searched() -> None:
    User.objects.create(username="lovelace")
    Account.objects.create(identifier="lovelace-1")
    Account.objects.create(identifier="lovelace-2")
    used("api_key:lovelace-4", "")
    used("api_key:lovelace-5", "")
    assert matches(user_with("view_inspect"), "lovelace") == []
    assert matches(user_with("view_inspect", "view_account"), "lovelace") == [
        "account:lovelace-1",
        "account:lovelace-2",
    ]
    assert matches(user_with("view_inspect", "view_line"), "lovelace") == ["api_key:lovelace-4", "api_key:lovelace-5"]
    number = User.objects.get(username="lovelace").pk
    assert f"user:{number} (lovelace)" in text(html(user_with("view_inspect", "view_user"), "lovelace"))
    assert "lovelace)" not in text(html(user_with("view_inspect"), f"user:{number}"))


class TestKeySearch:
    @pytest.fixture(autouse=True)
    def _hook(self, settings: Any) -> None:
        settings.RATELIMITS = {**settings.RATELIMITS, "KEY_SEARCH": f"{__name__}.project_names"}

    def test_a_project_s_names_are_found(self) -> None:
        client = user_with("view_inspect")
        page = html(client, "phone")
        assert matches(client, "phone") == ["api_key:0", "api_key:1"], "what is not a key is left out"
        assert "api_key:0</a> &lt;i&gt;Ada&#x27;s phone 0" in page
        assert len(matches(client, "many")) == 50
        assert "at most 50" in text(html(client, "many"))

    def test_the_names_of_a_key_and_its_account_stay_visible(self) -> None:
        Account.objects.create(identifier="acme", name="Acme Ltd.")
        client = user_with("view_inspect", "view_account")
        said = text(html(client, "api_key:1", account="acme"))
        assert "Ada's api_key:1 1)" in said
        assert "Account: acme (Acme Ltd.)" in said
        said = text(html(user_with("view_inspect"), "api_key:1", account="acme"))
        assert "Acme Ltd." not in said

    def test_one_that_fails_is_said_and_the_tables_are_searched(
        self, admin_client: Client, caplog: pytest.LogCaptureFixture
    ) -> None:
        Account.objects.create(identifier="broken-1")
        Account.objects.create(identifier="broken-2")
        assert matches(admin_client, "broken") == ["account:broken-1", "account:broken-2"]
        assert "KEY_SEARCH'] failed" in text(html(admin_client, "broken"))
        assert "no directory" in caplog.text


@pytest.mark.parametrize(
    ("q", "said"),
    [
        ("", "This page shows which rules limit a key and why"),
        ("   ", "This page shows which rules limit a key and why"),
        ("x" * 301, "at most 300 characters"),
        ("user:1\0", "characters that no key can have"),
        ("nobody-has-this", "No key or name that you may view contains this"),
        ("user:1, user:2", "No key or name that you may view contains this"),
        ("203.0.113.0/24", "203.0.113.0/24 is a network"),
        ("ip:203.0.113.0/24", "203.0.113.0/24 is a network"),
        ("2001:db8::/32", "2001:db8::/32 is a network"),
        ("203.0.113.9/32", "ip:203.0.113.9"),
        ("2001:db8::/64", "ip:2001:db8::/64"),
        ("ip:999.0.113.1", "No key or name that you may view contains this"),
        ("<script>alert(1)</script>", "No key or name that you may view contains this"),
        ("api_key:never-used", "The account of api_key:never-used is not known"),
        ("9" * 299, "No key or name that you may view contains this"),
        (f"user:{'9' * 200}", f"user:{'9' * 200}"),
        ("user:\u0669", "user:\u0669"),
        ("ip:unknown", "No rule applies to this key."),
        ("[2001:db8::1]:443", "ip:2001:db8::/64"),
        ("198.51.100.7:8080", "ip:198.51.100.7"),
        ("account:a b", "account:a b"),
    ],
)
def test_what_the_page_says_of_a_text(admin_client: Client, q: str, said: str) -> None:
    page = html(admin_client, q)
    assert said in text(page)
    assert "<script>alert" not in page


def test_a_key_of_unknown_or_several_accounts_is_asked_about(admin_client: Client) -> None:
    used("api_key:9", "acme")
    used("api_key:9", "beta")
    page = html(admin_client, "api_key:9")
    assert "was used by several accounts (acme, beta)" in text(page)
    for one in ("acme", "beta", "-"):
        assert f'href="{SITE}/admin/ratelimits/inspect/?q=api_key%3A9&amp;account={one}"' in page
    assert "api_key:9 Account: acme" in text(html(admin_client, "api_key:9", account="acme"))
    assert "Without an account." in text(html(admin_client, "api_key:9", account="-"))
    assert "at most 300" in text(html(admin_client, "api_key:9", account="x" * 301))
    # A whole key is found even if nothing is known of it.
    page = html(admin_client, "nobody-has-this")
    secret = html(admin_client, SECRET)
    assert "This looks like a secret. Search for the name of the key instead." in text(secret)
    assert f"api_key%3A{SECRET}" not in secret
    assert f'href="{SITE}/admin/ratelimits/inspect/?q=api_key%3Anobody-has-this"' in page
