"""Test which block or allow decides a request, and that the number of rows does not matter."""

from __future__ import annotations

import logging
import random
from ipaddress import IPv4Address, IPv6Address, ip_network
from typing import Any

import pytest

from ratelimits.addresses import address_key
from ratelimits.identity import Identity
from ratelimits.models.access.targets import canonical
from ratelimits.rules.access import AccessIndex, AccessRow
from ratelimits.rules.keyed import NEVER

WHO = Identity("user:1", "api_key:9", "account:acme", "ip:203.0.113.9")


def row(pk: int, target: str, *, blocks: bool = True, begins: int = 0, ends: int = NEVER) -> AccessRow:
    return AccessRow(pk, target, blocks, 403, "", begins, ends)


def found(*rows: AccessRow, who: Identity = WHO, now: int = 50) -> int | None:
    one = AccessIndex(rows).find(who, now)
    return None if one is None else one.pk


def test_the_nearest_row_decides_and_a_block_of_key_or_address_is_stronger() -> None:
    account, key = row(1, "account:acme"), row(2, "api_key:9", blocks=False)
    wide, narrow = row(3, "ip:203.0.0.0/16"), row(4, "ip:203.0.113.0/24", blocks=False)
    exact = row(5, "ip:203.0.113.9")
    assert found(account, key) == 2
    assert found(row(6, "user:1"), account) == 6
    assert found(wide, narrow) == 4
    assert found(wide, narrow, exact) == 5
    assert found(account, narrow) == 1
    assert found(key, wide) == 3
    assert found(key, narrow) == 2
    assert found(row(7, "user:2"), row(8, "ip:198.51.100.0/24")) is None
    assert found(wide, exact, who=Identity("user:1")) is None


def test_rows_count_in_their_time_alone() -> None:
    later, over = row(1, "user:1", begins=60), row(2, "user:1", ends=50)
    assert found(later, over) is None
    assert found(later, over, now=49) == 2
    assert found(later, over, now=60) == 1
    outer = row(3, "ip:203.0.0.0/16")
    assert found(outer, row(4, "ip:203.0.113.0/24", blocks=False, ends=50)) == 3
    index = AccessIndex([later, over, outer])
    assert [index.next_start(now) for now in (0, 59, 60)] == [60, 60, NEVER]


def test_changes_replace_rows_and_leave_the_others() -> None:
    index = AccessIndex([row(1, "user:1"), row(2, "ip:203.0.113.0/24"), row(3, "user:3")])
    newer = index.changed([row(1, "user:4"), row(5, "ip:2001:db8::/32")], {1, 2})
    assert [newer.find(Identity(f"user:{n}"), 0) is not None for n in (1, 3, 4)] == [False, True, True]
    assert newer.find(Identity(address="ip:203.0.113.9"), 0) is None
    assert newer.find(Identity(address="ip:2001:db8:5::/64"), 0) is not None
    assert index.find(WHO, 0) is not None
    assert newer.changed([], ()) is newer
    assert (len(index), len(newer), bool(newer.changed([], {1, 3, 5}))) == (3, 3, False)


@pytest.mark.parametrize("target", ["ip:203.0.113.0/nine", "ip:nowhere/24", "ip:203.0.113.0/40"])
def test_a_row_that_cannot_be_read_is_logged_and_the_others_hold(target: str, caplog: Any) -> None:
    with caplog.at_level(logging.ERROR):
        assert found(row(1, target), row(2, "user:1")) == 2
    assert target in caplog.text


def test_an_address_that_cannot_be_read_is_in_no_network() -> None:
    everyone = row(1, "ip:0.0.0.0/0"), row(2, "ip:::/0")
    unknown = Identity(address="ip:unknown")
    assert found(*everyone, who=unknown) is None
    assert found(*everyone, row(3, "ip:unknown"), who=unknown) == 3


@pytest.mark.parametrize(
    "address",
    [
        "203.0.113.9",
        "::ffff:203.0.113.9",
        "::ffff:0:203.0.113.9",
        "64:ff9b::203.0.113.9",
        "2002:cb00:7109:5::1",
        "2001:0:4136:e378:8000:63bf:34ff:8ef6",
    ],
)
def test_a_block_finds_its_address_in_each_form(address: str) -> None:
    who = Identity(address=address_key(address))
    for target in ("ip:203.0.113.9", "ip:203.0.113.0/24", canonical(address)):
        assert found(row(1, target), who=who) == 1
    for target in ("ip:203.0.113.8", "ip:198.51.100.0/24", "ip:::/0", "ip:2000::/3"):
        assert found(row(1, target), who=who) is None


@pytest.mark.parametrize(
    "target", ["ip:64:ff9b::/96", "ip:64:ff9b::/64", "ip:2002::/16", "ip:2002:cb00:7109:5::/64", "ip:2001:0:1:2::/64"]
)
def test_a_network_under_which_nobody_is_counted_is_named_in_the_log(
    target: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert found(row(1, target), row(2, "user:1")) == 2
    assert target in caplog.text


def test_the_narrowest_network_is_found_as_the_standard_library_finds_it() -> None:
    draw = random.Random(20261)
    for _ in range(300):
        bits, narrowest = draw.choice([(32, 32), (128, 64)])
        kind: Any = IPv4Address if bits == 32 else IPv6Address
        address = kind(draw.getrandbits(bits))
        near = [kind(int(address) ^ 1 << draw.randrange(bits)) for _ in range(3)]
        typed = [(one, draw.randint(0, narrowest)) for one in (*near, address, address)]
        networks = list(dict.fromkeys(ip_network(one, strict=False) for one in typed))
        rows = [row(n, canonical(str(one))) for n, one in enumerate(networks)]
        inside = [one for one in networks if address in one]
        expected = networks.index(max(inside, key=lambda one: one.prefixlen))
        assert found(*rows, who=Identity(address=address_key(str(address)))) == expected, (address, networks)
        others = [one for one in rows if networks[one.pk] not in inside]
        assert found(*others, who=Identity(address=address_key(str(address)))) is None, (address, others)


@pytest.mark.parametrize("target", ["user:1", "ip:203.0.113.0/24"])
def test_of_two_rows_for_one_target_the_block_decides(target: str) -> None:
    allow, block = row(1, target, blocks=False), row(2, target)
    assert found(allow, block) == found(block, allow) == 2
    assert found(allow, row(2, target, ends=1)) == 1
