from __future__ import annotations

import pytest
from django.core.exceptions import ValidationError

from ratelimits.models.access.targets import address_count, canonical


@pytest.mark.parametrize(
    ("typed", "stored"),
    [
        ("user:42", "user:42"),
        (" api_key:9f3c ", "api_key:9f3c"),
        ("account:Acme Ltd", "account:Acme Ltd"),
        ("203.0.113.9", "ip:203.0.113.9"),
        ("203.0.113.9/32", "ip:203.0.113.9"),
        ("ip:203.0.113.0/24", "ip:203.0.113.0/24"),
        ("0.0.0.0/0", "ip:0.0.0.0/0"),
        ("2001:DB8::/32", "ip:2001:db8::/32"),
        ("ip:2001:db8:0:1::/64", "ip:2001:db8:0:1::/64"),
        ("::ffff:203.0.113.9", "ip:203.0.113.9"),
        ("::ffff:203.0.113.0/120", "ip:203.0.113.0/24"),
        ("64:ff9b::203.0.113.9", "ip:203.0.113.9"),
        ("ip:64:ff9b::cb00:7100/120", "ip:203.0.113.0/24"),
        ("::ffff:0:203.0.113.0/120", "ip:203.0.113.0/24"),
        ("2002:cb00:7109::/48", "ip:203.0.113.9"),
        ("2002:cb00:7109:5::/64", "ip:203.0.113.9"),
        ("2002:cb00:7109::1", "ip:203.0.113.9"),
        ("2002:cb00:7100::/40", "ip:203.0.113.0/24"),
        ("2001:0:4136:e378:8000:63bf:34ff:8ef6", "ip:203.0.113.9"),
        ("2001:0:4136:e378:8000:63bf:34ff:8e00/120", "ip:203.0.113.0/24"),
        ("64:ff9b:1::/48", "ip:64:ff9b:1::/48"),
        ("fec0::/10", "ip:fec0::/10"),
        ("::/64", "ip:::/64"),
        ("::/0", "ip:::/0"),
        ("ip:unknown", "ip:unknown"),
    ],
)
def test_a_target_has_one_form(typed: str, stored: str) -> None:
    assert canonical(typed) == stored
    assert canonical(stored) == stored


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("203.0.113.7/24", "write 203.0.113.0/24"),
        ("::ffff:203.0.113.7/120", "write 203.0.113.0/24"),
        ("64:ff9b::203.0.113.7/120", "write 203.0.113.0/24"),
        ("2002:cb00:7109::1/48", "write 203.0.113.9/32"),
        # The requests from these networks are counted under IPv4 addresses, so no block of the network can find them.
        ("64:ff9b::/96", "counted as IPv4"),
        ("64:ff9b::/64", "counted as IPv4"),
        ("64:ff9b::/48", "counted as IPv4"),
        ("::ffff:0:0/96", "counted as IPv4"),
        ("2002::/16", "counted as IPv4"),
        ("2001::/32", "counted as IPv4"),
        ("ip:2001:0:4136:e378::/64", "counted as IPv4"),
        ("2001:db8::1", "write ip:2001:db8::/64"),
        ("ip:2001:db8::7/128", "write ip:2001:db8::/64"),
        ("ip:nowhere", "not an address or network"),
        ("300.1.1.1", "not a key"),
        ("team:4", "not a key"),
        ("global:", "not a key"),
        ("", "not a key"),
        ("user:1, user:2", "2 keys"),
    ],
)
def test_what_is_no_target_is_refused_with_what_to_write(typed: str, said: str) -> None:
    with pytest.raises(ValidationError) as refused:
        canonical(typed)
    assert said in "; ".join(refused.value.messages)


@pytest.mark.parametrize(
    ("target", "count"),
    [("ip:203.0.113.9", 1), ("ip:203.0.113.0/24", 256), ("ip:2001:db8::/32", 2**32), ("user:1", None)],
)
def test_a_network_has_so_many_addresses(target: str, count: int | None) -> None:
    assert address_count(target) == count
