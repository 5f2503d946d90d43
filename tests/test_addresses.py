"""Test how addresses are read, and which address a request has, with proxies and without."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest
from django.test import RequestFactory

from ratelimits import addresses
from ratelimits.addresses import UNKNOWN_ADDRESS, address_key, address_of
from ratelimits.checks.settings import check_proxies


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
        ("64:ff9b::203.0.113.9", "ip:203.0.113.9"),
        ("[64:ff9b::cb00:7109]:443", "ip:203.0.113.9"),
        ("::ffff:0:203.0.113.9", "ip:203.0.113.9"),
        ("2002:cb00:7109::1", "ip:203.0.113.9"),
        ("2002:cb00:7109:5:6:7:8:9", "ip:203.0.113.9"),
        ("2001:0:4136:e378:8000:63bf:34ff:8ef6", "ip:203.0.113.9"),
        ("2001:0:0102:0304::34ff:8ef6", "ip:203.0.113.9"),
        # Only these networks contain IPv4 addresses.
        ("64:ff9b::1:cb00:7109", "ip:64:ff9b::/64"),
        ("64:ff9b:1::203.0.113.9", "ip:64:ff9b:1::/64"),
        ("2001:1::34ff:8ef6", "ip:2001:1::/64"),
        ("::203.0.113.9", "ip:::/64"),
        ("fec0::cb00:7109", "ip:fec0::/64"),
        ("", None),
        ("unknown", None),
        ("203.0.113.999", None),
        ("203.0.113.9:80:90", None),
        ("/run/gunicorn.sock", None),
        ("203.0.113.9\r\nX-Evil: 1", None),
        ("9" * 1_000_000, None),
    ],
)
def test_an_address_is_a_network(text: str, key: str | None) -> None:
    assert address_key(text) == key


def test_what_is_remembered_of_texts_that_clients_choose_is_small() -> None:
    before = addresses._address_key.cache_info().currsize
    for number in range(10):
        assert address_key(f"{number}" * 8000) is None
    assert addresses._address_key.cache_info().currsize == before


def request(remote: str | None = "198.51.100.7", forwarded: str | None = None) -> HttpRequest:
    made = RequestFactory().get("/")
    made.META.pop("REMOTE_ADDR")
    if remote is not None:
        made.META["REMOTE_ADDR"] = remote
    if forwarded is not None:
        made.META["HTTP_X_FORWARDED_FOR"] = forwarded
    return made


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
    settings: Any, proxies: int, forwarded: str | None, address: str
) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "NUM_PROXIES": proxies}
    assert address_of(request(forwarded=forwarded)) == address


@pytest.mark.parametrize(
    ("configured", "address"), [(None, "ip:198.51.100.7"), (0, "ip:198.51.100.7"), (1, "ip:192.0.2.1")]
)
def test_drfs_own_setting_holds_where_ours_is_not_set(settings: Any, configured: int | None, address: str) -> None:
    settings.REST_FRAMEWORK = {**settings.REST_FRAMEWORK, "NUM_PROXIES": configured}
    assert address_of(request(forwarded="192.0.2.1")) == address


@pytest.mark.parametrize(
    ("remote", "header", "address"),
    [
        ("10.0.0.1", "192.0.2.1", "ip:192.0.2.1"),
        ("10.0.0.1:8080", "192.0.2.1", "ip:192.0.2.1"),
        ("2001:db8:9::1", "2001:db8:1:2::3", "ip:2001:db8:1:2::/64"),
        ("::ffff:10.0.0.1", "192.0.2.1", "ip:192.0.2.1"),
        ("64:ff9b::10.0.0.1", "192.0.2.1", "ip:192.0.2.1"),
        ("::ffff:0:10.0.0.1", "192.0.2.1", "ip:192.0.2.1"),
        ("10.0.0.1", "203.0.113.1, 64:ff9b::192.0.2.1, 64:ff9b::10.0.0.2", "ip:192.0.2.1"),
        # A tunnel's address says itself which IPv4 address it has. So it is trusted as this IPv4 address by nobody.
        ("2002:a00:1::1", "192.0.2.1", "ip:10.0.0.1"),
        ("2001:0:4136:e378:8000:63bf:f5ff:fffe", "192.0.2.1", "ip:10.0.0.1"),
        ("10.0.0.1", "192.0.2.1, 2002:a00:1::1", "ip:10.0.0.1"),
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
    settings: Any, name: str, remote: str, header: str | None, address: str
) -> None:
    trusted = ["10.0.0.0/8", "2001:db8:9::/48"]
    settings.RATELIMITS = {**settings.RATELIMITS, "TRUSTED_PROXIES": trusted, "ADDRESS_HEADER": name}
    headers = {} if header is None else {name: header}
    asked = RequestFactory().get("/", headers=headers, REMOTE_ADDR=remote)
    assert address_of(asked) == address


@pytest.mark.parametrize("remote", ["10.0.0.1", "::ffff:10.0.0.1", "64:ff9b::10.0.0.1"])
@pytest.mark.parametrize(
    "network", ["::ffff:10.0.0.0/104", "64:ff9b::10.0.0.0/104", "::ffff:0:10.0.0.0/104", "10.0.0.1"]
)
def test_the_networks_of_proxies_are_read_as_addresses_are(settings: Any, network: str, remote: str) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "TRUSTED_PROXIES": ["2001:db8:9::/48", network]}
    assert address_of(request(remote, "192.0.2.1")) == "ip:192.0.2.1"
    assert address_of(request("11.0.0.1", "192.0.2.1")) == "ip:11.0.0.1"
    assert address_of(request("2002:a00:1::1", "192.0.2.1")) == "ip:10.0.0.1"


def test_a_tunnel_is_trusted_if_it_is_named(settings: Any) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "TRUSTED_PROXIES": ["2002:cb00:7109::/48"]}
    assert address_of(request("2002:cb00:7109::1", "192.0.2.1")) == "ip:192.0.2.1"
    assert address_of(request("203.0.113.9", "192.0.2.1")) == "ip:203.0.113.9"


@pytest.mark.parametrize("network", ["::ffff:0:0/96", "64:ff9b::/96", "64:ff9b::/64", "::ffff:0:0:0/96"])
def test_all_ipv4_addresses_are_no_proxy(settings: Any, network: str) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "TRUSTED_PROXIES": [network]}
    with pytest.raises(ImproperlyConfigured, match=r"^RATELIMITS\['TRUSTED_PROXIES'\] has .*Write IPv4 networks"):
        address_of(request("10.0.0.1", "192.0.2.1"))
    (found,) = check_proxies(None)
    assert found.id == "ratelimits.E007"
    assert network in found.msg


@pytest.mark.parametrize(("header", "address"), [("192.0.2.1", "ip:192.0.2.1"), ("a, ?", "ip:unknown")])
def test_a_unix_socket_can_be_trusted(settings: Any, header: str, address: str) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "TRUSTED_PROXIES": ["unix"]}
    assert address_of(request("", header)) == address


@pytest.mark.parametrize("wrong", ["1", -1, True])
def test_a_number_of_proxies_that_is_none_says_what_to_write(settings: Any, wrong: Any) -> None:
    settings.REST_FRAMEWORK = {**settings.REST_FRAMEWORK, "NUM_PROXIES": wrong}
    with pytest.raises(ImproperlyConfigured, match=r"^REST_FRAMEWORK\['NUM_PROXIES'\] is .*Write a whole number"):
        address_of(request(forwarded="192.0.2.1, 192.0.2.2"))


@pytest.mark.parametrize("remote", [None, "", "unix:", "unknown", "203.0.113.999", "ip:unknown", "\ud800", "٣.٣.٣.٣"])
@pytest.mark.parametrize(("trusted", "forwarded"), [(0, "192.0.2.1"), (1, None), (1, "unknown"), (2, ",")])
def test_requests_without_an_address_that_can_be_read_have_one_key(
    settings: Any, remote: str | None, trusted: int, forwarded: str | None
) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "NUM_PROXIES": trusted}
    assert address_of(request(remote, forwarded)) == UNKNOWN_ADDRESS == "ip:unknown"


def test_the_log_says_once_what_to_set(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(addresses, "_warned", False)
    for _ in range(3):
        address_of(request("unix:"))
    (said,) = caplog.messages
    assert "REMOTE_ADDR is 'unix:'" in said
    assert "RATELIMITS['NUM_PROXIES']" in said
