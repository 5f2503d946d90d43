"""Test values typed into the admin's forms: read correctly, refused with a hint, or warned about as unknown names."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from datetime import time, timedelta
from threading import Barrier
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connections
from django.test import Client

from ratelimits import moments
from ratelimits.models import KeyOverride, Plan, PlanMembership, Rule
from tests.admin.test_rules import BUCKET, errors
from tests.support.rows import rule

pytestmark = pytest.mark.django_db(transaction=True)

RULES, OVERRIDES, MEMBERSHIPS, PLANS = (
    f"/admin/ratelimits/{name}/add/" for name in ("rule", "keyoverride", "planmembership", "plan")
)


def inputs(client: Client, url: str) -> dict[str, str]:
    """Return the type of each input of a page's form."""
    page = client.get(url).content.decode()
    found = [
        (re.search(r'name="([^"]*)"', tag), re.search(r'type="([^"]*)"', tag))
        for tag in re.findall(r"<input[^>]*>", page)
    ]
    return {name[1]: kind[1] for name, kind in found if name and kind}


@pytest.mark.parametrize("url", [RULES, OVERRIDES, PLANS, "/admin/ratelimits_billing/adjustment/add/"])
def test_no_browser_drops_letters_from_a_number(admin_client: Client, url: str) -> None:
    found = inputs(admin_client, url)
    assert found
    assert "number" not in found.values()


def test_a_length_of_time_is_typed_with_its_unit(admin_client: Client) -> None:
    admin_client.post(RULES, {**BUCKET, "period": "1 day", "max_wait": "5 min"})
    row = Rule.objects.get()
    assert (row.period, row.max_wait) == (86_400, 300)
    admin_client.post(OVERRIDES, {"key": "user:1", "rule": "burst", "period": "1h", "mode": ""})
    assert KeyOverride.objects.get().period == 3_600
    page = admin_client.get(f"/admin/ratelimits/rule/{row.pk}/change/")
    assert page.context["adminform"].form["period"].value() == 86_400


def test_a_capacity_of_zero_is_taken_as_what_lets_nothing_pass(admin_client: Client) -> None:
    closed = {**BUCKET, "capacity": "0"}
    assert "Everyone would be refused." in errors(admin_client.post(RULES, closed))["__all__"]
    assert not Rule.objects.exists()
    assert admin_client.post(RULES, {**closed, "_everyone_meant": "1"}).status_code == 302
    assert Rule.objects.get().sentence() == "nothing passes, per API key"
    typed = {"key": "api_key:4", "rule": "burst", "capacity": "0", "mode": ""}
    assert admin_client.post(OVERRIDES, typed).status_code == 302
    assert KeyOverride.objects.get().capacity == 0


@pytest.mark.parametrize("typed", [{"period": "1 mo"}, {"max_wait": "soon"}, {"rate": "5/mo"}, {"capacity": "10k"}])
def test_what_could_be_misread_is_refused(admin_client: Client, typed: dict[str, str]) -> None:
    assert typed.keys() <= errors(admin_client.post(RULES, {**BUCKET, **typed})).keys()
    assert not Rule.objects.exists()


@pytest.mark.parametrize(("url", "model"), [(OVERRIDES, KeyOverride), (MEMBERSHIPS, PlanMembership)])
def test_several_keys_in_one_field_are_refused(admin_client: Client, url: str, model: Any) -> None:
    rule()
    plan = Plan.objects.create(name="Pro", slug="pro")
    typed = {"key": "api_key:4, api_key:5", "rule": "burst", "capacity": "5", "mode": "", "plan": plan.pk}
    assert "These are 2 keys: write only api_key:4 here" in errors(admin_client.post(url, typed))["key"]
    assert not model.objects.exists()


@pytest.mark.parametrize("url", [OVERRIDES, MEMBERSHIPS])
def test_what_ended_does_not_block_what_is_new(admin_client: Client, url: str) -> None:
    rule()
    plan = Plan.objects.create(name="Pro", slug="pro")
    typed = {"key": "user:42", "rule": "burst", "capacity": "5", "mode": "", "plan": plan.pk}
    ended = {"valid_until_0": "2025-06-01", "valid_until_1": "00:00:00"}
    assert admin_client.post(url, {**typed, **ended}).status_code == 302
    assert admin_client.post(url, typed).status_code == 302
    assert "key" in errors(admin_client.post(url, typed))


@pytest.mark.parametrize(("url", "model"), [(OVERRIDES, KeyOverride), (MEMBERSHIPS, PlanMembership)])
def test_a_time_without_a_date_is_today_or_tomorrow(admin_client: Client, url: str, model: Any) -> None:
    rule()
    plan = Plan.objects.create(name="Pro", slug="pro")
    typed = {"key": "user:42", "rule": "burst", "capacity": "5", "mode": "", "plan": plan.pk}
    assert f"In the time zone {moments.zone_name()}." in admin_client.get(url).content.decode()
    assert admin_client.post(url, {**typed, "valid_until_1": "23:59:59"}).status_code == 302
    until = model.objects.get().valid_until
    assert moments.local(until).time() == time(23, 59, 59)
    assert timedelta(0) < until - moments.now() <= timedelta(days=1)


@pytest.mark.parametrize(("url", "model"), [(OVERRIDES, KeyOverride), (MEMBERSHIPS, PlanMembership)])
def test_of_people_who_save_at_once_one_is_first(admin_user: User, url: str, model: Any) -> None:
    rule()
    plan = Plan.objects.create(name="Pro", slug="pro")
    ends = {"valid_until_0": "2126-06-01", "valid_until_1": "00:00:00"}
    typed = {"key": "api_key:4", "rule": "burst", "capacity": "5", "mode": "", "plan": plan.pk, **ends}
    clients = [Client() for _ in range(4)]
    for client in clients:
        client.force_login(admin_user)
        client.get(url)  # the modules that a first request loads would sort them
    together = Barrier(len(clients))

    def save(client: Client) -> int:
        try:
            together.wait()
            return client.post(url, typed).status_code
        finally:
            connections.close_all()

    with ThreadPoolExecutor(len(clients)) as pool:
        assert sorted(pool.map(save, clients)) == [200, 200, 200, 302]
    assert model.objects.count() == 1


def warnings(client: Client, url: str, values: dict[str, Any]) -> list[str]:
    """Return the warnings on the page after a save."""
    response = client.post(url, values, follow=True)
    return [str(message) for message in response.context["messages"] if message.level_tag == "warning"]


def test_a_scope_that_no_view_has_is_saved_and_warned_of(admin_client: Client) -> None:
    (said,) = warnings(admin_client, RULES, {**BUCKET, "scope": "serach:POST"})
    assert "No view has the scope “serach”" in said
    assert "Scopes of views: stream, text, time" in said
    row = Rule.objects.get()
    change = f"/admin/ratelimits/rule/{row.pk}/change/"
    assert len(warnings(admin_client, change, {**BUCKET, "scope": "serach"})) == 1
    assert warnings(admin_client, change, {**BUCKET, "scope": "text:POST"}) == []


def test_a_meter_of_no_view_is_warned_of(admin_client: Client, settings: Any) -> None:
    settings.ROOT_URLCONF = "tests.admin.urls"
    (said,) = warnings(admin_client, RULES, {**BUCKET, "meter": "tokenz"})
    assert "No view has a cost in “tokenz”" in said
    inline = {"inclusions-TOTAL_FORMS": "1", "inclusions-INITIAL_FORMS": "0", "inclusions-0-quantity": "5"}
    inline |= {"prices-TOTAL_FORMS": "0", "prices-INITIAL_FORMS": "0"}
    typed = {"name": "Pro", "slug": "pro", **inline, "inclusions-0-meter": "tokenz"}
    assert warnings(admin_client, PLANS, typed) == [said]


@pytest.mark.parametrize("url", [OVERRIDES, MEMBERSHIPS])
def test_a_key_of_nobody_is_saved_and_warned_of(admin_client: Client, admin_user: User, url: str) -> None:
    rule()
    plan = Plan.objects.create(name="Pro", slug="pro")
    typed = {"key": f"user:{admin_user.pk}", "rule": "burst", "capacity": "5", "mode": "", "plan": plan.pk}
    assert warnings(admin_client, url, typed) == []
    (said,) = warnings(admin_client, url, {**typed, "key": "user:999"})
    assert "No user has the primary key “999”" in said
