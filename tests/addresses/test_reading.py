"""Test how addresses are read."""

from __future__ import annotations

import pytest

from ratelimits.addresses import reading
from ratelimits.addresses.reading import address_key


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
    before = reading._address_key.cache_info().currsize
    for number in range(10):
        assert address_key(f"{number}" * 8000) is None
    assert reading._address_key.cache_info().currsize == before
