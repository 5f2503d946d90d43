"""Test who a request is from, and that no secret appears."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any
from uuid import UUID

import pytest
from django.contrib.auth.models import AnonymousUser, User
from django.db import models
from django.http import HttpRequest
from django.test import AsyncRequestFactory, RequestFactory
from django.utils.functional import SimpleLazyObject
from rest_framework.request import Request

from project.models import ApiKey
from ratelimits import identity
from ratelimits.addresses import UNKNOWN_ADDRESS
from ratelimits.engine.keys import ledger_name
from ratelimits.identity import Identity, NotAName, aidentify, api_key_of, identify
from ratelimits.quota import checking
from tests.support.entry_points import begin_afresh


class Token(models.Model):
    """A token like DRF's own, whose primary key is the secret."""

    key = models.CharField(max_length=40, primary_key=True)

    class Meta:
        app_label = "tests"
        managed = False

    def __str__(self) -> str:
        return "a token"


def request(remote: str | None = "198.51.100.7", forwarded: str | None = None, user: Any = None) -> HttpRequest:
    made = RequestFactory().get("/")
    made.META.pop("REMOTE_ADDR")
    if remote is not None:
        made.META["REMOTE_ADDR"] = remote
    if forwarded is not None:
        made.META["HTTP_X_FORWARDED_FOR"] = forwarded
    made.user = AnonymousUser() if user is None else user
    return made


def digest(secret: str) -> str:
    return hashlib.blake2b(secret.encode(), digest_size=12).hexdigest()


class TestApiKeys:
    def test_a_row_is_its_model_and_its_number(self) -> None:
        assert api_key_of(ApiKey(pk=7)) == "api_key:project.apikey:7"

    def test_an_anonymous_user_is_no_key(self) -> None:
        # Wagtail's API has it as the result of the authentication of a request without a token.
        assert api_key_of(AnonymousUser()) is None
        assert api_key_of(SimpleLazyObject(AnonymousUser)) is None
        made = request()
        made.auth = AnonymousUser()  # type: ignore[attr-defined]
        assert identify(made).unreadable == ()

    def test_a_row_whose_key_is_its_secret_is_a_digest(self) -> None:
        token = Token(key="9944b09199c62bcf9418ad846dd0e4bbdfc6ee4b")
        assert api_key_of(token) == f"api_key:tests.token:{digest(token.key)}"
        assert token.key not in str(api_key_of(token))

    @pytest.mark.parametrize(
        ("auth", "key"),
        [
            (5, "api_key:5"),
            (UUID(int=5), f"api_key:{UUID(int=5)}"),
            ("secret", f"api_key:{digest('secret')}"),
            (b"secret", f"api_key:{digest('secret')}"),
            ("ключ", f"api_key:{digest('ключ')}"),
            (None, None),
            ("", None),
            (b"", None),
        ],
    )
    def test_whatever_authenticates_is_an_id_or_a_digest_or_none(self, auth: object, key: str | None) -> None:
        assert api_key_of(auth) == key

    @pytest.mark.parametrize(
        "auth", [True, {"sub": "42", "exp": 1}, object(), ApiKey(), pytest.param(10**5000, id="huge")]
    )
    def test_what_is_no_name_is_an_error(self, auth: object) -> None:
        with pytest.raises(NotAName):
            api_key_of(auth)


class TestIdentities:
    def test_nobody_is_an_address(self) -> None:
        assert identify(request()) == Identity(address="ip:198.51.100.7")
        assert identify(HttpRequest()) == Identity(address=UNKNOWN_ADDRESS)

    def test_the_address_follows_the_settings_of_proxies(self, settings: Any) -> None:
        forwarded = request("198.51.100.7", "192.0.2.1")
        assert identify(forwarded).address == "ip:198.51.100.7"
        settings.RATELIMITS = {**settings.RATELIMITS, "NUM_PROXIES": 1}
        assert identify(forwarded).address == "ip:192.0.2.1"
        settings.RATELIMITS = {**settings.RATELIMITS, "NUM_PROXIES": None, "TRUSTED_PROXIES": ["198.51.100.0/24"]}
        assert identify(forwarded).address == "ip:192.0.2.1"
        settings.RATELIMITS = {**settings.RATELIMITS, "TRUSTED_PROXIES": []}
        assert identify(forwarded).address == "ip:198.51.100.7"

    def test_what_is_remembered_of_long_addresses_is_small(self) -> None:
        before = identity._identity_at.cache_info().currsize
        assert identify(request("9" * 8000)).address == UNKNOWN_ADDRESS
        assert identity._identity_at.cache_info().currsize == before

    def test_a_user_is_its_own_account_where_nothing_is_said(self, settings: Any) -> None:
        settings.RATELIMITS = {**settings.RATELIMITS, "ACCOUNT": None}
        who = identify(request(user=User(pk=42)))
        assert who == Identity(user="user:42", account="account:42", address="ip:198.51.100.7")
        assert (who.account_id, who.narrowest_key) == ("42", "user:42")

    @pytest.mark.parametrize(("account", "key"), [("acme", "account:acme"), (7, "account:7"), (None, None), ("", None)])
    def test_the_account_is_what_the_project_says(self, settings: Any, account: object, key: str | None) -> None:
        settings.RATELIMITS = {**settings.RATELIMITS, "ACCOUNT": lambda request: account}
        assert identify(request()).account == key

    @pytest.mark.parametrize(
        ("account", "key"),
        [
            (0, "account:0"),
            (UUID(int=5), f"account:{UUID(int=5)}"),
            (User(pk=42, username="Acme, Inc."), "account:user:42"),
            (SimpleLazyObject(lambda: User(pk=42)), "account:user:42"),
            (ApiKey(pk=7), "account:project.apikey:7"),
            (AnonymousUser(), None),
            ("nul \0", "account:=nul %00"),
            ("\ud800", "account:=%ED%A0%80"),
            ("user:42", "account:=user:42"),
            ("project.apikey:7", "account:=project.apikey:7"),
            ("~b835", "account:=~b835"),
            ("=user:42", "account:==user:42"),
            ("é" * 250, "account:" + "é" * 250),
            ("é" * 100_000, f"account:{ledger_name('é' * 100_000)}"),
            ("anonymous", f"account:{ledger_name('anonymous')}"),
            ("~anonymous", "account:=~anonymous"),
        ],
        ids=lambda value: str(value)[:20],
    )
    @pytest.mark.django_db(transaction=True)
    def test_any_account_has_the_ledgers_name(
        self, settings: Any, monkeypatch: pytest.MonkeyPatch, account: object, key: str | None
    ) -> None:
        begin_afresh(monkeypatch)
        settings.RATELIMITS = {**settings.RATELIMITS, "ACCOUNT": lambda request: account}
        who = identify(request())
        assert who.account == key
        assert ledger_name(who.account_id) == who.account_id
        answer = checking.check(who)
        assert (answer.allowed, answer.decision is not None) == (True, True)

    def test_drfs_request_brings_its_credential(self, settings: Any) -> None:
        settings.RATELIMITS = {**settings.RATELIMITS, "ACCOUNT": lambda request: request.auth.account}
        wrapped = Request(request())
        wrapped.user, wrapped.auth = User(pk=3), ApiKey(pk=9, account="acme")
        who = identify(wrapped)
        assert (who.user, who.api_key, who.account) == ("user:3", "api_key:project.apikey:9", "account:acme")
        assert (who.narrowest_key, who.account_id) == ("api_key:project.apikey:9", "acme")

    def test_a_user_that_is_not_saved_cannot_be_read(self) -> None:
        who = identify(request(user=User()))
        assert (who.user, who.account, who.unreadable) == (None, None, ("user", "account"))

    async def test_async_code_loads_the_user_first(self) -> None:
        made = AsyncRequestFactory().get("/")

        async def auser() -> User:
            return User(pk=5)

        made.auser = auser
        assert (await aidentify(made)).user == "user:5"

    @pytest.mark.django_db(transaction=True)
    def test_async_code_may_ask_the_database_for_the_account(self, settings: Any) -> None:
        settings.RATELIMITS = {**settings.RATELIMITS, "ACCOUNT": lambda request: f"one of {User.objects.count()}"}
        sync, awaited = RequestFactory().get("/"), AsyncRequestFactory().get("/")
        assert identify(sync).account == asyncio.run(aidentify(awaited)).account == "account:one of 0"
