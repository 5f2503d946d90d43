"""Test what docs/security.md says about the app as a whole. Each room has the tests of its own defences."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.core import serializers
from django.test import Client
from rest_framework.authentication import BaseAuthentication
from rest_framework.request import Request

from project.api import TimeView
from project.authentication import ApiKeyAuthentication
from project.models import ApiKey
from ratelimits.models import Account, Rule
from ratelimits.rules.keyed import billing_around
from ratelimits.usage.models import Line
from tests.support.entry_points import begin_afresh
from tests.support.raw import RawRedis
from tests.support.rows import rule
from tests.support.snippets import snippet
from tests.support.usage.traffic import flow, use

pytestmark = pytest.mark.django_db(transaction=True)
#: The settings as docs/security.md shows it.
_SHOWN: dict[str, Any] = {}
exec(snippet('"api_views": True').text, {"RATELIMITS": _SHOWN})


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch, fsync_at_once: None) -> None:
    begin_afresh(monkeypatch)


def limit(name: str, **more: Any) -> Rule:
    return rule(name, "fixed_window", period=10**6, window_start="first_hit", **more)


def everything_in(server: RawRedis) -> bytes:
    """Return all keys and values of a server as one text."""
    texts: list[bytes] = []
    for key in server.keys("*"):
        kind = server.type(key)
        if kind == b"hash":
            texts += [part for item in server.hgetall(key).items() for part in item]
        elif kind == b"string":
            texts.append(server.get(key) or b"")
        elif kind == b"list":
            texts += server.lrange(key, 0, -1)
        else:
            texts += [str(server.zrange(key, 0, -1)).encode()]
        texts.append(key)
    return b"\n".join(texts)


class TextAuthentication(BaseAuthentication):
    """Authenticate a request by its key, and give the text of the key to the app, as some projects do."""

    def authenticate(self, request: Request) -> tuple[Any, str]:
        return get_user_model().objects.get(username="ada"), request.headers["Authorization"].partition(" ")[2]


@pytest.mark.parametrize("authentication", [ApiKeyAuthentication, TextAuthentication])
def test_a_secret_is_in_no_key_no_log_and_no_line(
    redis_client: RawRedis,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    authentication: type[BaseAuthentication],
) -> None:
    monkeypatch.setattr(TimeView, "authentication_classes", [authentication])
    caplog.set_level(logging.DEBUG)
    limit("few", capacity=1, key_kind="api_key")
    user = get_user_model().objects.create_user(username="ada", password="correct horse")
    account = Account.objects.create(identifier="acme")
    _key, secret = ApiKey.objects.issue(name="phone", user=user, account=account.identifier)
    client = Client(headers={"Authorization": f"Api-Key {secret}"})
    assert [client.get("/api/time/").status_code for _request in range(2)] == [200, 429]
    inside = everything_in(redis_client)
    flow()
    inside += everything_in(redis_client)
    inside += serializers.serialize("json", Line.objects.all()).encode()
    inside += "\n".join(caplog.messages).encode()
    assert b"api_key:" in inside
    assert secret.encode() not in inside


def test_failed_logins_of_an_api_are_limited_by_the_middleware_alone(settings: Any) -> None:
    limit("addresses", capacity=2, key_kind="ip")
    wrong = Client(headers={"Authorization": "Api-Key wrong"})
    assert [wrong.get("/api/time/").status_code for _request in range(4)] == [401] * 4
    settings.RATELIMITS = {**settings.RATELIMITS, **_SHOWN}
    limit("attempts", capacity=2, key_kind="ip", scope="attempts", meter="attempts")
    assert [wrong.get("/api/time/").status_code for _request in range(3)] == [401, 401, 429]


def test_failed_logins_of_the_admin_are_limited(settings: Any, client: Client) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, **_SHOWN}
    limit("logins", capacity=2, key_kind="ip", scope="login:POST")
    guess = {"username": "ada", "password": "guess"}
    statuses = [client.post("/admin/login/", guess).status_code for _request in range(3)]
    assert statuses == [200, 200, 429]


def test_a_line_break_in_an_account_forges_no_line_of_the_log() -> None:
    logged: list[str] = []
    billing_around(0, "acme\nERROR:root:all is lost", "Europe/Nowhere", None, (), logged.append)
    assert len(logged) == 1
    assert "\n" not in logged[0]


@pytest.mark.parametrize("shard", ["²", "٣", "-1", "9" * 30, "1 or 1", "\0"])
def test_a_shard_that_is_no_number_is_no_error(admin_client: Client, shard: str) -> None:
    use("acme")
    flow()  # without a batch, the list has no filter
    assert admin_client.get("/admin/ratelimits_usage/batch/", {"shard": shard}).status_code == 200
