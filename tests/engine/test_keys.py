"""Test the name of every Redis key."""

from __future__ import annotations

from zlib import crc32

import pytest

from ratelimits.algorithms.limits import ALGORITHMS
from ratelimits.conf import conf
from ratelimits.engine import ANY
from ratelimits.engine.keys import LONGEST, Keyspace, bounded, name_id, own_name, quoted, shard_of
from tests.support.engine.asking import ask, limit, usage
from tests.support.raw import RawRedis

KEYS = Keyspace("shop", 64)


def test_all_keys_of_a_shard_carry_its_hash_tag() -> None:
    names = [
        KEYS.head(7),
        KEYS.open(7),
        KEYS.meta(7),
        KEYS.sealed(7),
        KEYS.batch(7, "9f:3"),
        KEYS.state(7, "user:42"),
        KEYS.receipts(7),
        KEYS.own(7, "w:1f", "user:42"),
    ]
    behind = ["head", "open", "meta", "sealed", "b:9f:3", "s:user:42", "receipts", "w:1f:user:42:"]
    assert names == [f"rl:1:shop:{{07}}:{rest}" for rest in behind]


def test_a_shard_is_the_crc_of_its_owner() -> None:
    assert shard_of("account:7", 64) == crc32(b"account:7") % 64
    assert {shard_of(f"account:{number}", 64) for number in range(2000)} == set(range(64))
    assert Keyspace("shop", 16384).head(16383) == "rl:1:shop:{16383}:head"


@pytest.mark.parametrize("namespace", ["", "a b", "a:b", "a{b}", "ü", "x" * 41, "a\n"])
def test_a_namespace_that_would_break_a_key_is_refused(namespace: str) -> None:
    with pytest.raises(ValueError, match=r"^namespace .* must be 1 to 40 letters, digits, '_', '.' or '-'$"):
        Keyspace(namespace, 64)


@pytest.mark.parametrize("shards", [0, -1, 16385])
def test_shards_are_as_many_as_a_cluster_has_slots_at_most(shards: int) -> None:
    with pytest.raises(ValueError, match=r"^shards must be from 1 to 16384, not"):
        Keyspace("shop", shards)


class TestLongNames:
    def test_a_name_of_the_greatest_length_stays_as_it_is(self) -> None:
        for text in ("user:42", "x" * LONGEST, "ü" * (LONGEST // 2)):
            assert bounded(text) == text

    @pytest.mark.parametrize("text", ["user:" + "x" * LONGEST, "x" * 200, "ü" * 49, "k" * 17 + ":" + "x" * 90])
    def test_a_longer_one_is_digested(self, text: str) -> None:
        assert len(bounded(text).encode()) <= LONGEST
        assert bounded(text) == bounded(text)

    def test_a_digest_keeps_the_kind(self) -> None:
        assert bounded("user:" + "x" * 200).startswith("user:~")

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ("x" * 200 + "a", "x" * 200 + "b"),
            ("user:" + "x" * 200, "api_key:" + "x" * 200),
            ("k" * 20 + "a:" + "x" * 100, "k" * 20 + "b:" + "x" * 100),
            ("会" * 60 + "社", "会" * 60 + "员"),
        ],
    )
    def test_two_long_names_are_two(self, one: str, other: str) -> None:
        assert bounded(one) != bounded(other)
        assert quoted(one) != quoted(other)

    def test_the_state_of_a_long_key_is_its_own(self, redis_client: RawRedis) -> None:
        one, other = "user:" + "x" * 500 + "1", "user:" + "x" * 500 + "2"
        for name in ALGORITHMS:
            for key in (one, other):
                ask(limit(name, key=key, name=name), timeout=ANY)
            assert ask(limit(name, key="user:3", name=name), timeout=ANY).remaining == (
                ask(limit(name, key="user:4", name=name), timeout=ANY).remaining
            )
        assert max(map(len, redis_client.keys("*"))) < 150


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("api_key:9f3c", "api_key:9f3c"),
        ("a@b.example", "a@b.example"),
        ("a|b", "a%7Cb"),
        ("#i", "%23i"),
        ("50%", "50%25"),
        ("a\tb\r\n", "a%09b%0D%0A"),
        ("ü", "%C3%BC"),
        ("", ""),
    ],
)
def test_a_text_in_a_usage_field_holds_no_separator(text: str, part: str) -> None:
    assert quoted(text) == part


def test_a_rules_name_is_its_crc_and_its_own_state_tells_the_algorithm() -> None:
    assert name_id("burst") == crc32(b"burst")
    names = {own_name(kind.storage.own, "burst") for kind in ALGORITHMS.values() if kind.storage.own}
    assert names == {f"{letter}:{crc32(b'burst'):x}" for letter in "wlc"}


class TestSharding:
    """The keys of an account are in its shard; every other key is in a shard of its own."""

    @pytest.mark.parametrize("key", ["user:1", "api_key:2", "account:acme"])
    def test_a_key_of_an_account_lives_in_the_accounts_shard(self, redis_client: RawRedis, key: str) -> None:
        ask(limit(key=key), account="acme", usage=usage())
        tag = f"{{{shard_of('account:acme', conf.SHARDS):02d}}}".encode()
        assert all(tag in name for name in redis_client.keys("*"))

    @pytest.mark.parametrize("key", ["ip:192.0.2.1", "global", "job:5"])
    def test_any_other_lives_in_its_own(self, redis_client: RawRedis, key: str) -> None:
        ask(limit(key=key), account="acme", usage=usage())
        (state,) = redis_client.keys("*:s:*")
        assert f"{{{shard_of(key, conf.SHARDS):02d}}}".encode() in state
        heads = {name.split(b"{")[1][:2] for name in redis_client.keys("*head")}
        assert heads == {b"%02d" % shard_of(key, conf.SHARDS), b"%02d" % shard_of("account:acme", conf.SHARDS)}

    def test_without_an_account_a_key_lives_in_its_own_shard(self, redis_client: RawRedis) -> None:
        ask(limit(key="user:1"))
        (state,) = redis_client.keys("*:s:*")
        assert f"{{{shard_of('user:1', conf.SHARDS):02d}}}".encode() in state

    def test_an_accounts_own_limit_is_the_same_with_and_without_naming_the_account(self) -> None:
        ask(limit(key="account:acme"))
        assert ask(limit(key="account:acme"), account="acme").remaining == 8
