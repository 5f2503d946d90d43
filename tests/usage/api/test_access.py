from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.test import Client

from tests.support.usage.traffic import flow
from tests.usage.api.test_usage import NOVEMBER, ask, spend

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def _two_accounts(customer: Callable[..., Client]) -> None:
    customer("acme")
    customer("globex")
    spend("2026-11-02T08:00", "acme", "api_key:1", 3)
    spend("2026-11-02T08:00", "globex", "api_key:2", 7)
    spend("2026-11-02T08:00", "", "anonymous", 11)
    flow()


def accounts(answer: dict[str, Any]) -> list[tuple[str, int]]:
    return [(row["account"], row["admitted_units"]) for row in answer["results"]]


@pytest.mark.usefixtures("_two_accounts")
def test_a_customer_sees_its_own_account_and_nobody_else_s(customer: Callable[..., Client]) -> None:
    client = customer("acme")
    assert accounts(ask(client)) == accounts(ask(client, account="acme")) == [("acme", 3)]
    assert accounts(ask(client, key="api_key:2")) == []
    assert accounts(ask(client, key="anonymous")) == []
    for other in ("globex", "nobody", "ACME", "account:globex"):
        assert client.get("/usage/", {**NOVEMBER, "account": other}).status_code == 403
    assert "globex" not in client.get("/usage/", NOVEMBER).content.decode()


@pytest.mark.usefixtures("_two_accounts")
def test_a_cursor_leads_into_no_other_account(customer: Callable[..., Client], staff: Client) -> None:
    place = ask(staff, page_size=1)["next"]
    assert accounts(customer("acme").get(place).json()) == [("acme", 3)]


@pytest.mark.usefixtures("_two_accounts")
def test_an_empty_account_is_a_bad_request_and_not_everyone(customer: Callable[..., Client], staff: Client) -> None:
    assert customer("acme").get("/usage/", {"account": ""}).status_code == 400
    assert staff.get("/usage/", {"account": ""}).status_code == 400


@pytest.mark.usefixtures("_two_accounts")
def test_staff_see_all_or_the_account_that_they_name(staff: Client) -> None:
    answer = ask(staff)
    assert accounts(answer) == [("", 11), ("acme", 3), ("globex", 7)]
    assert (answer["account"], answer["quota"]) == (None, None)
    assert accounts(ask(staff, key="api_key:2")) == [("globex", 7)]
    answer = ask(staff, account="globex")
    assert accounts(answer) == [("globex", 7)]
    assert answer["quota"]["plan"] == ""
    assert accounts(ask(staff, account="nobody")) == []


@pytest.mark.usefixtures("_two_accounts")
def test_staff_see_everyone_s_current_period(staff: Client) -> None:
    found = ask(staff, window="period", **{"from": "2026-10-25"})
    assert accounts(found) == [("", 11), ("acme", 3), ("globex", 7)]


@pytest.mark.parametrize(
    ("page", "permission", "other"),
    [("/usage/", "view_line", "view_report"), ("/usage/report/?period=2026-11", "view_report", "view_line")],
)
def test_staff_need_the_permission_to_view_the_rows(page: str, permission: str, other: str) -> None:
    client, user = Client(), get_user_model().objects.create_user(username="intern", is_staff=True)
    client.force_login(user)
    for held in ((), (other,)):
        user.user_permissions.set(Permission.objects.filter(codename__in=held))
        for more in ({}, {"account": "acme"}):
            response = client.get(page, more) if "?" not in page else client.get(f"{page}&{urlencode(more)}")
            assert response.status_code == 403
            label = "ratelimits_usage" if permission == "view_line" else "ratelimits_billing"
            assert response.json() == {"detail": f"Staff need the permission {label}.{permission}."}
    user.user_permissions.set(Permission.objects.filter(codename=permission))
    assert client.get(page).status_code == 200
    get_user_model().objects.filter(pk=user.pk).update(is_superuser=True)
    user.user_permissions.clear()
    assert client.get(page).status_code == 200


@pytest.mark.usefixtures("_two_accounts")
def test_a_user_without_a_named_account_is_an_account_itself_and_sees_no_other(customer: Callable[..., Client]) -> None:
    client = Client()
    user = get_user_model().objects.create_user(username="visitor")
    client.force_login(user)
    for one in (customer(None), client):
        assert accounts(ask(one)) == []
        assert one.get("/usage/", {"account": "acme"}).status_code == 403
    assert ask(client)["account"] == f"user:{user.pk}"


def test_whoever_is_not_known_is_asked_who_it_is() -> None:
    assert Client().get("/usage/").status_code == 401


def test_it_is_read_only(customer: Callable[..., Client]) -> None:
    assert customer().post("/usage/").status_code == 405
