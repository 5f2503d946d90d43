"""Test choices that are completed while they are typed: what they list for those without JavaScript."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client

from ratelimits.admin import suggestions
from ratelimits.models import Account, Plan, PlanMembership
from ratelimits.usage.models import KeyTotal
from ratelimits.usage.models.totals import DAY
from tests.support.below import SITE
from tests.support.own_apps import list_path
from tests.support.rows import rule

pytestmark = pytest.mark.django_db


def select(client: Client, model: str, name: str) -> tuple[str, list[str]]:
    """Return the tag of a select, and the texts of its choices."""
    page = client.get(f"{list_path(model)}add/").content.decode()
    tag, inside = re.findall(rf'(<select[^>]*name="{name}".*?>)(.*?)</select>', page, re.DOTALL)[0]
    return tag, re.findall(r"<option[^>]*>([^<]*)</option>", inside)


@pytest.mark.parametrize(
    ("model", "name"),
    [("planmembership", "plan"), ("account", "plan"), ("rule", "plan"), ("alertchannel", "account")],
)
def test_a_choice_is_completed_and_can_be_made_without_javascript(
    admin_client: Client, monkeypatch: pytest.MonkeyPatch, model: str, name: str
) -> None:
    monkeypatch.setattr(suggestions, "MAX_LISTED", 2)
    for number in range(2):
        Plan.objects.create(name=f"Plan {number}", slug=f"plan{number}")
        Account.objects.create(identifier=f"Account {number}")
    tag, choices = select(admin_client, model, name)
    assert "admin-autocomplete" in tag
    assert choices[-2:] == [f"{name.title()} {number}" for number in range(2)]
    Plan.objects.create(name="Plan 2", slug="plan2")
    Account.objects.create(identifier="Account 2")
    tag, choices = select(admin_client, model, name)
    assert "admin-autocomplete" in tag
    assert not any("2" in choice for choice in choices)


def test_who_may_not_view_plans_has_a_plain_select() -> None:
    Plan.objects.create(name="Pro", slug="pro")
    user = User.objects.create(username="ada", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename="add_planmembership"))
    client: Any = Client()
    client.force_login(user)
    tag, choices = select(client, "planmembership", "plan")
    assert "admin-autocomplete" not in tag
    assert choices[1:] == ["Pro"], "the first stands for no choice, with another text in each version of Django"


def test_a_plan_in_the_list_has_the_numbers_of_what_is_on_it(admin_client: Client) -> None:
    plan = Plan.objects.create(name="Pro", slug="pro")
    Plan.objects.create(name="Free", slug="free")
    for number in range(3):
        PlanMembership.objects.create(key=f"user:{number}", plan=plan)
    for number in range(2):
        Account.objects.create(identifier=f"a{number}", plan=plan)
    rule(plan=plan)
    page = admin_client.get("/admin/ratelimits/plan/?o=-5").content.decode()
    cells = re.findall(r'<td class="field-(\w+_count)">(\d+)</td>', page)
    assert cells == [
        *[("rule_count", "1"), ("key_count", "3"), ("account_count", "2")],
        *[("rule_count", "0"), ("key_count", "0"), ("account_count", "0")],
    ]


KEY_FORMS = [
    *[("planmembership/add", "key", "keys"), ("keyoverride/add", "key", "keys"), ("access/add", "target", "keys")],
    *[("keyreset/add", "key", "keys"), ("keyreset/add", "account", "accounts")],
    *[("access/grant", "key", "keys"), ("access/grant", "account", "accounts")],
    *[("adjustment/add", "key", "keys"), ("adjustment/add", "account", "accounts")],
]


def test_keys_and_accounts_are_suggested_to_those_who_may_use_the_inspector(client: Client) -> None:
    user = User.objects.create(username="ada", is_staff=True)
    client.force_login(user)
    names = ["add_planmembership", "add_keyoverride", "add_adjustment", "operate"]
    forms = Permission.objects.filter(codename__in=names)
    for extra, suggested in ((["view_account"], False), (["view_account", "view_inspect"], True)):
        user.user_permissions.set([*forms, *Permission.objects.filter(codename__in=extra)])
        for form, name, kind in KEY_FORMS:
            page = client.get(f"{list_path(form.partition('/')[0])}{form.partition('/')[2]}/").content.decode()
            assert ("ratelimits/keys.js" in page) == suggested, form
            (tag,) = re.findall(rf'<input[^>]*name="{name}"[^>]*>', page)
            assert (f'data-ratelimits-keys="{SITE}/admin/ratelimits/inspect/{kind}/"' in tag) == suggested
            assert 'maxlength="' in tag
            assert (f'<datalist id="id_{name}_keys">' in page) == suggested


def test_accounts_are_suggested_by_their_identifiers_from_their_rows_and_from_usage(client: Client) -> None:
    user = User.objects.create(username="ada", is_staff=True)
    client.force_login(user)
    Account.objects.create(identifier="acme-1", name="Acme")
    PlanMembership.objects.create(key="account:acme-2", plan=Plan.objects.create(name="Pro", slug="pro"))
    today = int(time.time()) // DAY * DAY
    sums = {"admitted_requests": 1, "denied_requests": 0, "shadow_requests": 0}
    KeyTotal.objects.create(span=DAY, start=today, account="acme-3", key="user:acme", rule=1, meter="requests", **sums)
    url = "/admin/ratelimits/inspect/accounts/"
    for may, found in ((["view_account"], ["acme-1"]), (["view_account", "view_line"], ["acme-1", "acme-3"])):
        user.user_permissions.set(Permission.objects.filter(codename__in=[*may, "view_inspect"]))
        assert [key for key, _name in client.get(url, {"q": "acme"}).json()["keys"]] == found
    assert client.get(url, {"q": "ACME"}).json()["keys"][0] == ["acme-1", "Acme"]
    for text in ("", "x" * 301, "a\0"):
        assert client.get(url, {"q": text}).json() == {"keys": []}


def test_the_suggestions_are_the_keys_that_a_user_may_see(client: Client) -> None:
    user = User.objects.create(username="ada", is_staff=True)
    client.force_login(user)
    Account.objects.create(identifier="acme-1", name="Acme")
    PlanMembership.objects.create(key="user:acme-2", plan=Plan.objects.create(name="Pro", slug="pro"))
    user.user_permissions.set(Permission.objects.filter(codename__in=["view_account", "view_inspect"]))
    url = "/admin/ratelimits/inspect/keys/"
    assert client.get(url, {"q": "acme"}).json() == {"keys": [["account:acme-1", "Acme"]]}
    for text in ("", "x" * 301, "a\0"):
        assert client.get(url, {"q": text}).json() == {"keys": []}
