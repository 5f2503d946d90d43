"""Test refusals that a process repeats from memory: how long, and that each one is counted."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from ratelimits.embedded import free_port
from ratelimits.engine import Decision, Limit, Meter, Usage, algorithm_from_json, decide
from ratelimits.engine.server import current_server
from ratelimits.quota.deny_cache import DenyCache, Sender, send
from tests.support.engine.proxy import Proxy
from tests.support.entry_points import away, short_timeout
from tests.support.raw import RawRedis
from tests.support.servers import TestServers

BUCKET = algorithm_from_json({"algorithm": "token_bucket", "capacity": 1, "rate": 1, "period": 60})
LEASES = algorithm_from_json({"algorithm": "concurrency", "capacity": 1, "lease_ttl": 60})


def usage(*meters: str) -> Usage:
    return Usage("7", "api_key:1", tuple(Meter(name) for name in meters))


def refusal(limit: Limit, *meters: str) -> Decision:
    for _ in range(2):
        decision = decide([limit], account="7", usage=usage(*meters))
    assert not decision.allowed
    return decision


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_refusal_is_repeated_until_it_may_change_and_not_longer() -> None:
    clock = Clock()
    cache = DenyCache(clock)
    cache.keep("place", refusal(Limit("api_key:1", BUCKET), "requests"), 1.0)
    assert cache.repeat("place") is not None
    clock.now += 0.999
    assert cache.repeat("place") is not None
    clock.now += 0.001
    assert cache.repeat("place") is None


def test_a_refusal_that_ends_sooner_is_repeated_no_longer_than_that() -> None:
    quick = algorithm_from_json({"algorithm": "leaky_bucket", "capacity": 1, "rate": 2, "period": 1})
    clock = Clock()
    cache = DenyCache(clock)
    cache.keep("place", refusal(Limit("api_key:1", quick), "requests"), 1.0)
    clock.now += 0.5
    assert cache.repeat("place") is None


def test_nothing_is_repeated_when_it_is_turned_off() -> None:
    cache = DenyCache()
    cache.keep("place", refusal(Limit("api_key:1", BUCKET), "requests"), 0)
    assert cache.repeat("place") is None


def test_a_refusal_for_want_of_a_lease_is_never_repeated_since_one_may_end_at_any_moment() -> None:
    cache = DenyCache()
    cache.keep("place", refusal(Limit("api_key:1", LEASES), "requests"), 1.0)
    assert cache.repeat("place") is None


def test_every_repetition_is_counted_as_denied_by_the_rule_that_refused(redis_client: RawRedis) -> None:
    cache = DenyCache()
    cache.keep("place", refusal(Limit("api_key:1", BUCKET, rule=3, version=9), "requests", "tokens"), 1.0)
    for _ in range(5):
        cache.repeat("place")
    send(current_server(), cache.take())
    (open_batch,) = redis_client.keys("*:open")
    counted = {
        field.split(b"|", 2)[2]: int(value)
        for field, value in redis_client.hgetall(open_batch).items()
        if field.startswith(b"d|")
    }
    # One refusal by the server, five from memory.
    assert counted == {
        b"requests|3|9|7|api_key:1|1": 6,
        b"tokens|3|9|7|api_key:1|1": 6,
    }
    assert cache.take() == []


def test_repetitions_of_another_cost_are_counted_as_requests_and_as_units(redis_client: RawRedis) -> None:
    decision = refusal(Limit("api_key:1", BUCKET, cost=1), "requests")
    five = decide([Limit("api_key:1", BUCKET, cost=1)], account="7", usage=usage("requests"))
    assert not five.allowed
    cache = DenyCache()
    cache.keep("place", decision, 1.0)
    cache.repeat("place")
    (counted,) = cache.take()
    counted = type(counted)(counted.usage, (5,), counted.rule, counted.version, 4)
    send(current_server(), [counted])
    (open_batch,) = redis_client.keys("*:open")
    fields = {
        field.rsplit(b"|", 1)[1]: int(value)
        for field, value in redis_client.hgetall(open_batch).items()
        if field[:2] == b"d|"
    }
    assert fields[b"n"] == 4
    assert fields[b"u"] == 20


def test_a_hundred_thousand_repetitions_send_a_handful_of_commands(redis_client: RawRedis) -> None:
    cache = DenyCache()
    cache.keep("place", refusal(Limit("api_key:1", BUCKET), "requests"), 1e9)
    before = redis_client.info("stats")["total_commands_processed"]
    known = cache.refusals["place"]
    known.until = float("inf")
    for _ in range(100_000):
        assert cache.repeat("place") is known
    send(current_server(), cache.take())
    assert redis_client.info("stats")["total_commands_processed"] - before <= 200


def test_what_was_looked_up_in_time_is_counted_even_if_it_is_repeated_late() -> None:
    clock = Clock()
    cache = DenyCache(clock)
    cache.keep("place", refusal(Limit("api_key:1", BUCKET), "requests"), 1.0)
    found = cache.repeat("place")
    assert found is not None
    clock.now += 1.5
    assert [one.requests for one in cache.take()] == [1]
    found.repetitions.append(None)  # as a thread does that was delayed between reading and this
    assert [one.requests for one in cache.take()] == [1]
    clock.now += 1.0
    assert cache.take() == []
    assert cache.refusals == {}


def test_many_threads_lose_no_count() -> None:
    cache = DenyCache()
    cache.keep("place", refusal(Limit("api_key:1", BUCKET), "requests"), 1e9)
    cache.refusals["place"].until = float("inf")
    counts: list[int] = []

    def repeat() -> None:
        for _ in range(20_000):
            cache.repeat("place")

    threads = [threading.Thread(target=repeat) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        counts += [one.requests for one in cache.take()]
    counts += [one.requests for one in cache.take()]
    assert sum(counts) == 80_000


def test_counts_that_could_not_be_sent_are_sent_later(redis_client: RawRedis, settings: Any) -> None:
    cache = DenyCache()
    sender = Sender(cache, current_server)
    cache.keep("place", refusal(Limit("api_key:1", BUCKET), "requests"), 60.0)
    for _ in range(5):
        cache.repeat("place")
    usual = settings.CACHES
    away(settings, free_port())
    sender.flush()
    cache.repeat("place")
    settings.CACHES = usual
    sender.flush()
    (open_batch,) = redis_client.keys("*:open")
    counts = [int(value) for name, value in redis_client.hgetall(open_batch).items() if name[:2] == b"d|"]
    assert sum(counts) == 1 + 6


def test_a_version_that_redis_did_not_say_is_asked_for_again_and_no_error_is_logged(
    servers: TestServers, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cache = DenyCache()
    sender = Sender(cache, current_server)
    usual = settings.CACHES
    with Proxy(servers.redis.port) as proxy, short_timeout(settings), caplog.at_level(logging.ERROR):
        away(settings, proxy.port)
        proxy.lose.set()
        for port in (proxy.port, free_port()):  # the reply is lost; the question is not sent
            away(settings, port)
            cache.asks = True
            sender.flush()
            assert (cache.asks, cache.take()) == (True, [])
            sender._send_last()
    settings.CACHES = usual
    sender.flush()
    assert not cache.asks
    assert caplog.records == []


def test_a_sending_without_counts_does_not_undo_that_another_thread_asks() -> None:
    class Noted(DenyCache):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            written.append(name)

    written: list[str] = []
    cache = Noted()
    written.clear()
    cache.take()
    assert "asks" not in written
