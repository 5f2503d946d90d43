"""Test whether anybody has a key, and which name the project gives to a key."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.http import HttpRequest

from project.models import ApiKey
from ratelimits.models import Account, KeyOverride
from ratelimits.status.keys import no_owner_text, searched_name
from ratelimits.usage.models import KeyTotal
from ratelimits.usage.models.totals import DAY, SUMS, newest_days
from tests.support.rows import rule

pytestmark = pytest.mark.django_db


def names(text: str) -> Iterator[tuple[str, str]]:
    """Search as a project may: by a part of the name, or by the id."""
    if text == "broken":
        raise ValueError(text)
    yield from ((key, name) for key, name in (("api_key:4", "web"), ("api_key:44", "app")) if text in (key[8:], name))


def account_of(request: HttpRequest) -> str:
    return "acme"


def searched(settings: Any, search: str | None, account: str | None = None) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "KEY_SEARCH": search, "ACCOUNT": account}


def used(key: str, account: str, day: int = 1) -> None:
    subject = {"account": account, "key": key, "rule": 0, "meter": "requests"}
    start = newest_days(time.time(), 10)[day]
    KeyTotal.objects.create(span=DAY, start=start, **subject, **dict.fromkeys(SUMS, 1))


def test_users_and_accounts_are_known_by_their_rows_and_by_their_usage(settings: Any) -> None:
    searched(settings, None, f"{__name__}.account_of")
    user, account = User.objects.create(username="ann"), Account.objects.create(identifier="acme")
    used("user:900", "globex")
    used("user:901", "initech", day=5)
    known = (f"user:{user.pk}", f"account:{account.identifier}", "user:900", "account:globex", "ip:203.0.113.9")
    assert [no_owner_text(key) for key in known] == [""] * 5
    for key in ("user:901", "account:initech", f"user:0{user.pk}", "account:ACME", f"account:{user.pk}"):
        assert no_owner_text(key), key


def test_a_user_of_another_model_is_known_by_its_row() -> None:
    device, _secret = ApiKey.objects.issue(name="pump", user=User.objects.create(username="ann"))
    assert no_owner_text(f"user:project.apikey:{device.pk}") == ""
    for name in (f"project.apikey:{device.pk + 1}", f"project.apikey:0{device.pk}", "no.such:1", "project.apikey:"):
        assert f"No user has the primary key “{name}”" in no_owner_text(f"user:{name}")


def test_each_user_is_an_account_if_the_project_names_no_account(settings: Any) -> None:
    searched(settings, None)
    user = User.objects.create(username="ann")
    assert no_owner_text(f"account:{user.pk}") == ""


def test_accounts_that_are_a_user_an_api_key_or_a_row_are_known(settings: Any) -> None:
    searched(settings, None, f"{__name__}.account_of")
    user = User.objects.create(username="ann")
    for name in (f"user:{user.pk}", "api_key:shop.device:3", f"auth.user:{user.pk}"):
        assert no_owner_text(f"account:{name}") == ""
    for name in ("user:999999", "auth.user:999999", f"{user.pk}"):
        assert no_owner_text(f"account:{name}"), name
    settings.RATELIMITS = {**settings.RATELIMITS, "ACCOUNT_MODEL": "auth.User"}
    assert no_owner_text(f"account:{user.pk}") == ""


def test_api_keys_are_known_by_search_usage_and_rows(settings: Any) -> None:
    searched(settings, f"{__name__}.names")
    rule("day", "fixed_window", key_kind="api_key")
    KeyOverride.objects.create(key="api_key:7", rule="day", capacity=5)
    used("api_key:8", "acme")
    assert [no_owner_text(f"api_key:{name}") for name in (4, 44, 7, 8)] == [""] * 4
    assert "No API key “9” is known" in no_owner_text("api_key:9")
    assert no_owner_text("api_key:broken")
    searched(settings, None)
    assert no_owner_text("api_key:9") == ""


def test_the_name_is_that_of_exactly_this_key(settings: Any) -> None:
    searched(settings, f"{__name__}.names")
    assert [searched_name(f"api_key:{name}") for name in (4, 44, 9, "broken")] == ["web", "app", "", ""]
    searched(settings, None)
    assert searched_name("api_key:4") == ""
