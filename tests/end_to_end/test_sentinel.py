"""Test deciding, sealing and draining through Sentinel, before and after a failover."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from django_redis.pool import ConnectionFactory

from ratelimits import engine
from ratelimits.doctor.diagnosis import diagnose
from ratelimits.engine import NotSent, Unanswered
from ratelimits.engine.server import current_server
from ratelimits.engine.transport.ages import IDLE, LIFETIME
from ratelimits.usage.models import Batch, DurabilityGap, Line
from ratelimits.usage.models.gaps import GapKind, of_shard
from tests.support.engine.asking import KEYS, home, limit, usage
from tests.support.engine.proxy import Proxy
from tests.support.engine.rotating import Callers, Provider, Streaming, Users
from tests.support.engine.saying import let_be_old, let_pool_be_idle, let_pool_be_old
from tests.support.engine.tls import Certificate
from tests.support.eventually import PATIENCE, until
from tests.support.sentinel import Watched
from tests.support.servers import TestServers, server_binary
from tests.support.usage.traffic import flow, use

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def watched(request: pytest.FixtureRequest, servers: TestServers, tmp_path: Path) -> Iterator[Watched]:
    """Start a primary and its replica; the engine asks a sentinel for their addresses during the test.

    With the parameter "tls", all of them speak TLS, on Redis 7.
    """
    if getattr(request, "param", "") == "tls":
        running = Watched(tmp_path, server_binary("redis7"), certificate=Certificate(tmp_path))
    else:
        running = Watched(tmp_path, server_binary(servers.redis_kind))
    try:
        with running.settings():
            yield running
            current_server().wire.client.close()
    finally:
        # django-redis stores pools by URL, whichever sentinels they asked.
        for url in [url for url in ConnectionFactory._pools if url.startswith("redis://quota/")]:
            ConnectionFactory._pools.pop(url).disconnect()
        running.stop()


def incarnation(port: int) -> bytes | None:
    with redis.Redis(port=port) as client:
        found: Any = client.hget(KEYS.meta(home("acme")), "incarnation")
        return bytes(found) if found is not None else None


def evalsha_calls(port: int) -> int:
    with redis.Redis(port=port) as client:
        return int(client.info("commandstats").get("cmdstat_evalsha", {"calls": 0})["calls"])


@pytest.mark.parametrize("watched", ["plain", pytest.param("tls", marks=pytest.mark.system)], indirect=True)
def test_a_failover_loses_nothing_that_was_replicated_and_is_declared(watched: Watched) -> None:
    old = watched.primary()
    first = limit("fixed_window", period=1_000_000, capacity=1000)
    assert engine.decide([first], account="acme").remaining == 999
    assert asyncio.run(engine.adecide([first], account="acme")).remaining == 998
    receipt = engine.decide([first], account="acme").receipt
    assert receipt is not None
    assert engine.refund(receipt).remaining == 998
    acknowledged, unanswered = 0, 0
    for _ in range(20):
        acknowledged += use(now=None).allowed
    assert flow().batches == 1
    for _ in range(20):
        acknowledged += use(now=None).allowed
    before = incarnation(old.port)
    watched.replicated()

    watched.failover()
    new = watched.primary()
    failures: list[Exception] = []
    deadline = time.monotonic() + PATIENCE
    while acknowledged < 60:
        assert time.monotonic() < deadline
        try:
            acknowledged += use(now=None).allowed
        except NotSent as error:
            failures.append(error)
        except Unanswered as error:
            failures.append(error)
            unanswered += 1
    assert len(failures) <= 1
    assert asyncio.run(engine.apeek([first], account="acme")).remaining == 998
    assert incarnation(new.port) not in (None, before)
    # The old primary decided each of these once: 3 windows, a refund, and 40 requests.
    assert evalsha_calls(old.port) <= 44 + 2 * 5 + len(failures)
    (diagnosis,) = diagnose()
    assert (diagnosis.findings, diagnosis.address) == ((), "quota (Sentinel)")

    flow()
    ledger = sum(Line.objects.values_list("admitted_requests", flat=True))
    assert acknowledged <= ledger <= acknowledged + unanswered
    assert len(set(Batch.objects.values_list("incarnation", flat=True))) == 2
    assert DurabilityGap.objects.filter(of_shard(home("acme")), kind=GapKind.RESTART).exists()


@pytest.mark.parametrize("watched", ["plain", pytest.param("tls", marks=pytest.mark.system)], indirect=True)
def test_async_code_follows_a_failover_on_the_connection_of_its_loop(watched: Watched) -> None:
    some = limit("fixed_window", period=1_000_000, capacity=1000)
    with asyncio.Runner() as runner:
        for remaining in (999, 998):
            assert runner.run(engine.adecide([some], account="acme")).remaining == remaining
        watched.replicated()
        watched.failover()
        assert runner.run(engine.adecide([some], account="acme")).remaining == 997
        wire: Any = current_server().wire
        ((shared, _end),) = wire._loops.values()
        _host, port = shared._link._transport.get_extra_info("peername")
        assert port == watched.ports[watched.servers.index(watched.primary())]


def test_a_primary_without_its_replica_is_left_where_it_is_told_to_refuse(watched: Watched) -> None:
    """What it refuses is decided by the new primary, in the same call."""
    old = watched.primary()
    with redis.Redis(port=old.port) as client, asyncio.Runner() as runner:
        client.config_set("min-replicas-to-write", 1)
        some = limit("fixed_window", period=1_000_000, capacity=1000)
        engine.decide([some], account="acme")
        runner.run(engine.adecide([some], account="acme"))
        watched.replicated()
        watched.failover(follows=False)
        assert engine.decide([some], account="acme").remaining == 997
        assert runner.run(engine.adecide([some], account="acme")).remaining == 996
        assert client.info("replication")["role"] == "master"


def test_a_primary_that_became_a_replica_was_sent_nothing_and_the_way_is_asked_for_anew(watched: Watched) -> None:
    some = limit("fixed_window", period=1_000_000, capacity=1000)

    async def twice() -> None:
        await engine.adecide([some], account="acme")
        await asyncio.to_thread(demote)
        with pytest.raises(NotSent):
            await engine.adecide([some], account="acme")
        await asyncio.to_thread(promote)
        assert (await engine.adecide([some], account="acme")).remaining == 996

    def demote() -> None:
        watched.replicated()
        with redis.Redis(port=watched.servers[0].port) as client:
            client.replicaof("127.0.0.1", watched.servers[1].port)

    def promote() -> None:
        with redis.Redis(port=watched.servers[0].port) as client:
            client.replicaof("NO", "ONE")

    engine.decide([some], account="acme")
    demote()
    with pytest.raises(NotSent):
        engine.decide([some], account="acme")
    promote()
    assert engine.decide([some], account="acme").remaining == 998
    asyncio.run(twice())


def test_without_a_sentinel_nothing_is_sent_and_nobody_waits_long(watched: Watched) -> None:
    engine.decide([limit()], account="acme", usage=usage())
    watched.process.kill()
    watched.process.wait()
    assert engine.decide([limit()], account="acme").allowed
    for each in watched.servers:
        each.kill()
    # The process sees that the connection is closed before it uses it.
    with pytest.raises(NotSent):
        engine.decide([limit()], account="acme")
    started = time.monotonic()
    with pytest.raises(NotSent):
        engine.decide([limit()], account="acme")
    with pytest.raises(NotSent):
        asyncio.run(engine.adecide([limit()], account="acme"))
    assert time.monotonic() - started < 2, "nobody waits for a reply"


def test_a_sentinels_connection_that_was_dropped_while_it_was_idle_is_replaced(watched: Watched, settings: Any) -> None:
    """A process asks a sentinel only when it makes a connection, so the one to the sentinel is idle for long."""
    settings.RATELIMITS = {**settings.RATELIMITS, "TIMEOUT": 1.0}
    with (
        Proxy(watched.port) as proxy,
        asyncio.Runner() as runner,
        redis.Redis(port=watched.primary().port) as admin,
        watched.settings(SENTINELS=[("127.0.0.1", proxy.port)]),
    ):
        for ask in (
            lambda: engine.decide([limit()], account="acme"),
            lambda: runner.run(engine.adecide([limit()], account="acme")),
        ):
            assert ask().allowed
            wire: Any = current_server().wire
            for sentinel in wire._pool.sentinel_manager.sentinels:
                let_pool_be_idle(sentinel.connection_pool, 2 * IDLE)
            proxy.forget()
            admin.client_kill_filter(_type="normal", skipme=True)
            assert ask().allowed
        current_server().wire.client.close()


def test_connections_that_are_too_old_are_replaced_with_those_of_the_sentinel(watched: Watched) -> None:
    with (
        Proxy(watched.port) as proxy,
        asyncio.Runner() as runner,
        redis.Redis(port=watched.primary().port) as admin,
        watched.settings(SENTINELS=[("127.0.0.1", proxy.port)]),
    ):

        def clients() -> set[str]:
            return {one["id"] for one in admin.client_list(_type="normal")}

        def ended(before: set[str]) -> bool:
            return before.isdisjoint(clients())

        for ask in (
            lambda: engine.decide([limit()], account="acme"),
            lambda: runner.run(engine.adecide([limit()], account="acme")),
        ):
            before = clients()
            assert ask().allowed
            its = clients() - before
            wire: Any = current_server().wire
            asked = proxy.connections
            let_be_old(wire, LIFETIME)
            for sentinel in wire._pool.sentinel_manager.sentinels:
                let_pool_be_old(sentinel.connection_pool, LIFETIME)
            assert ask().allowed
            until(partial(ended, its), "the old connection is closed")
            assert (len(its), proxy.connections) == (1, asked + 1)
        current_server().wire.client.close()


@pytest.mark.parametrize("provider", [Provider, Streaming])
def test_credentials_of_the_primary_change_under_load(watched: Watched, provider: type[Provider]) -> None:
    users = Users([server.port for server in watched.servers], provider())
    with watched.settings(CONNECTION_POOL_KWARGS={"credential_provider": users.provider}):
        wire: Any = current_server().wire
        if provider is Provider:
            wire._pool.ages.lifetime = 0.0
        with Callers(
            lambda: engine.decide([limit()], account="acme"), lambda: engine.adecide([limit()], account="acme")
        ) as callers:
            users.rotate(callers.a_round)
        current_server().wire.client.close()
    assert callers.errors == []
