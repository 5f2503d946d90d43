"""Test who a request is from, and that no secret appears."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any
from uuid import UUID

import pytest
from django.contrib.auth.models import AnonymousUser, User
from django.core.exceptions import ImproperlyConfigured
from django.db import models
from django.http import HttpRequest
from django.test import AsyncRequestFactory, RequestFactory
from django.utils.functional import SimpleLazyObject
from rest_framework.request import Request

from project.models import ApiKey
from ratelimits import identity
from ratelimits.engine.keys import ledger_name
from ratelimits.identity import Identity, address_key, address_of, aidentify, api_key_of, identify
from ratelimits.models.keys import UNKNOWN_ADDRESS
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
    def test_a_row_is_its_number(self) -> None:
        assert api_key_of(ApiKey(pk=7)) == "api_key:7"

    def test_a_row_whose_key_is_its_secret_is_a_digest(self) -> None:
        token = Token(key="9944b09199c62bcf9418ad846dd0e4bbdfc6ee4b")
        assert api_key_of(token) == f"api_key:{digest(token.key)}"
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
            (True, None),
            ({"sub": "42", "exp": 1}, None),
            (object(), None),
            (ApiKey(), None),
        ],
    )
    def test_whatever_authenticates_is_an_id_or_a_digest_or_none(self, auth: object, key: str | None) -> None:
        assert api_key_of(auth) == key


class TestAddresses:
    @pytest.mark.parametrize(
        ("text", "key"),
        [
            ("203.0.113.9", "ip:203.0.113.9"),
            ("2001:db8:1:2:3:4:5:6", "ip:2001:db8:1:2::/64"),
            ("2001:db8:1:2::ffff", "ip:2001:db8:1:2::/64"),
            ("2001:db8:1:3::1", "ip:2001:db8:1:3::/64"),
            ("::1", "ip:::/64"),
            ("::ffff:203.0.113.9", "ip:203.0.113.9"),
            ("fe80::1%eth0", "ip:fe80::/64"),
            ("[2001:db8::1]", "ip:2001:db8::/64"),
            ("[2001:db8::1]:443", "ip:2001:db8::/64"),
            ("203.0.113.9:51234", "ip:203.0.113.9"),
            ("", None),
            ("unknown", None),
            ("203.0.113.999", None),
            ("203.0.113.9:80:90", None),
            ("/run/gunicorn.sock", None),
            ("203.0.113.9\r\nX-Evil: 1", None),
            ("9" * 1_000_000, None),
        ],
    )
    def test_an_address_is_a_network(self, text: str, key: str | None) -> None:
        assert address_key(text) == key

    @pytest.mark.parametrize(
        ("proxies", "forwarded", "address"),
        [
            # No proxy is configured: any client can write that header, so it is not trusted.
            (0, "192.0.2.1", "ip:198.51.100.7"),
            (0, None, "ip:198.51.100.7"),
            (1, None, "ip:198.51.100.7"),
            (1, "192.0.2.1", "ip:192.0.2.1"),
            (1, "10.0.0.1, 192.0.2.1", "ip:192.0.2.1"),
            (2, "10.0.0.1, 192.0.2.1, 192.0.2.2", "ip:192.0.2.1"),
            (2, "192.0.2.1", "ip:192.0.2.1"),
            (1, "192.0.2.1:5000", "ip:192.0.2.1"),
            (1, "[2001:db8::1]:5000", "ip:2001:db8::/64"),
            # Text that is not an address is not trusted either.
            (1, "192.0.2.1, unknown", "ip:198.51.100.7"),
            (1, "", "ip:198.51.100.7"),
            (1, ",", "ip:198.51.100.7"),
            (1, "192.0.2.1\0", "ip:198.51.100.7"),
            (1, "\ud800", "ip:198.51.100.7"),
            (1, "9" * 100_000, "ip:198.51.100.7"),
            (1, "," * 100_000, "ip:198.51.100.7"),
            (1, "10.0.0.1," * 11_000 + "192.0.2.1", "ip:192.0.2.1"),
            (3, "10.0.0.1," * 11_000 + "192.0.2.1, 192.0.2.2, 192.0.2.3", "ip:192.0.2.1"),
            (100, "192.0.2.1, 192.0.2.2", "ip:192.0.2.1"),
        ],
    )
    def test_as_many_proxies_are_believed_as_there_are(
        self, settings: Any, proxies: int, forwarded: str | None, address: str
    ) -> None:
        settings.RATELIMITS = {**settings.RATELIMITS, "NUM_PROXIES": proxies}
        assert address_of(request(forwarded=forwarded)) == address

    @pytest.mark.parametrize(
        ("configured", "address"), [(None, "ip:198.51.100.7"), (0, "ip:198.51.100.7"), (1, "ip:192.0.2.1")]
    )
    def test_drfs_own_setting_holds_where_ours_is_not_set(
        self, settings: Any, configured: int | None, address: str
    ) -> None:
        settings.REST_FRAMEWORK = {**settings.REST_FRAMEWORK, "NUM_PROXIES": configured}
        assert address_of(request(forwarded="192.0.2.1")) == address

    @pytest.mark.parametrize(
        ("remote", "header", "address"),
        [
            ("10.0.0.1", "192.0.2.1", "ip:192.0.2.1"),
            ("10.0.0.1:8080", "192.0.2.1", "ip:192.0.2.1"),
            ("2001:db8:9::1", "2001:db8:1:2::3", "ip:2001:db8:1:2::/64"),
            ("::ffff:10.0.0.1", "192.0.2.1", "ip:192.0.2.1"),
            # The last entry that is no trusted proxy counts. A client may have written the entries before it.
            ("10.0.0.1", "203.0.113.1, 192.0.2.1, 10.0.0.2", "ip:192.0.2.1"),
            ("10.0.0.1", "10.0.0.3, 10.0.0.2", "ip:10.0.0.3"),
            ("10.0.0.1", "10.0.0.2," * 11_000 + "10.0.0.3", "ip:10.0.0.2"),
            # Anybody else may have written the header.
            ("198.51.100.7", "192.0.2.1", "ip:198.51.100.7"),
            ("11.0.0.1", "192.0.2.1", "ip:11.0.0.1"),
            # Without a readable address, the request is counted under the proxy's address.
            ("10.0.0.1", None, "ip:10.0.0.1"),
            ("10.0.0.1", "192.0.2.1, unknown", "ip:10.0.0.1"),
            ("10.0.0.1", "9" * 100_000, "ip:10.0.0.1"),
            # A unix socket is trusted only if the setting says so.
            ("", "192.0.2.1", "ip:unknown"),
        ],
    )
    @pytest.mark.parametrize("name", ["X-Forwarded-For", "CF-Connecting-IP"])
    def test_a_header_counts_if_a_trusted_proxy_sends_it(
        self, settings: Any, name: str, remote: str, header: str | None, address: str
    ) -> None:
        trusted = ["10.0.0.0/8", "2001:db8:9::/48"]
        settings.RATELIMITS = {**settings.RATELIMITS, "TRUSTED_PROXIES": trusted, "ADDRESS_HEADER": name}
        headers = {} if header is None else {name: header}
        asked = RequestFactory().get("/", headers=headers, REMOTE_ADDR=remote)
        assert address_of(asked) == address

    @pytest.mark.parametrize(("header", "address"), [("192.0.2.1", "ip:192.0.2.1"), ("a, ?", "ip:unknown")])
    def test_a_unix_socket_can_be_trusted(self, settings: Any, header: str, address: str) -> None:
        settings.RATELIMITS = {**settings.RATELIMITS, "TRUSTED_PROXIES": ["unix"]}
        assert address_of(request("", header)) == address

    @pytest.mark.parametrize("wrong", ["1", -1, True])
    def test_a_number_of_proxies_that_is_none_says_what_to_write(self, settings: Any, wrong: Any) -> None:
        settings.REST_FRAMEWORK = {**settings.REST_FRAMEWORK, "NUM_PROXIES": wrong}
        with pytest.raises(ImproperlyConfigured, match=r"^REST_FRAMEWORK\['NUM_PROXIES'\] is .*Write a whole number"):
            address_of(request(forwarded="192.0.2.1, 192.0.2.2"))

    @pytest.mark.parametrize(
        "remote", [None, "", "unix:", "unknown", "203.0.113.999", "ip:unknown", "\ud800", "٣.٣.٣.٣"]
    )
    @pytest.mark.parametrize(("trusted", "forwarded"), [(0, "192.0.2.1"), (1, None), (1, "unknown"), (2, ",")])
    def test_requests_without_an_address_that_can_be_read_have_one_key(
        self, settings: Any, remote: str | None, trusted: int, forwarded: str | None
    ) -> None:
        settings.RATELIMITS = {**settings.RATELIMITS, "NUM_PROXIES": trusted}
        assert address_of(request(remote, forwarded)) == UNKNOWN_ADDRESS == "ip:unknown"

    def test_the_log_says_once_what_to_set(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(identity, "_warned", False)
        for _ in range(3):
            address_of(request("unix:"))
        (said,) = caplog.messages
        assert "REMOTE_ADDR is 'unix:'" in said
        assert "RATELIMITS['NUM_PROXIES']" in said

    def test_what_is_remembered_of_texts_that_clients_choose_is_small(self) -> None:
        before = identity._address_key.cache_info().currsize
        for number in range(10):
            assert address_key(f"{number}" * 8000) is None
        assert identity._address_key.cache_info().currsize == before


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
            (User(pk=42, username="Acme, Inc."), "account:42"),
            (SimpleLazyObject(lambda: User(pk=42)), "account:42"),
            (User(), None),
            (AnonymousUser(), None),
            ("nul \0", "account:nul \ufffd"),
            ("\ud800", "account:\ufffd"),
            ("é" * 250, "account:" + "é" * 250),
            ("é" * 100_000, f"account:{ledger_name('é' * 100_000)}"),
            ("anonymous", f"account:{ledger_name('anonymous')}"),
        ],
        ids=["0", "uuid", "row", "lazy row", "row not saved", "nobody", "nul", "surrogate", "250", "huge", "anonymous"],
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
        settings.RATELIMITS = {**settings.RATELIMITS, "ACCOUNT": lambda request: request.auth.account_id}
        wrapped = Request(request())
        wrapped.user, wrapped.auth = User(pk=3), ApiKey(pk=9, account_id="acme")
        who = identify(wrapped)
        assert (who.user, who.api_key, who.account) == ("user:3", "api_key:9", "account:acme")
        assert (who.narrowest_key, who.account_id) == ("api_key:9", "acme")

    def test_a_user_that_is_not_saved_is_nobody(self) -> None:
        assert identify(request(user=User())).user is None

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
