"""Test failovers of Sentinel and of a cluster under load: what was not replicated is lost, and declared."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import redis
from django_redis.pool import ConnectionFactory

from ratelimits.engine.call import shard
from ratelimits.engine.server import current_server
from ratelimits.usage.counting import process_totals
from tests.chaos.compared import row_of
from tests.chaos.load import CALLERS, Load
from tests.chaos.row import Row
from tests.support.cluster import Cluster
from tests.support.entry_points import own_breaker
from tests.support.eventually import until
from tests.support.sentinel import Watched
from tests.support.servers import TestServers, server_binary
from tests.support.usage.traffic import flow

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.long]

#: The most requests in a second.
RATE = 2_000
#: A primary is replaced after it has not answered for this number of milliseconds.
AWAY = 1_000
#: Seconds from the moment when the new primary is known until each request gets a decision.
BACK = 2.0

Fail = Callable[[], None]
PLANNED, GUARDED, KILLED = "planned failover", "planned failover, `min-replicas-to-write 1`", "`kill -9` of a primary"


@contextmanager
def sentinel(folder: Path, binary: Path, how: str) -> Iterator[Fail]:
    """Use a server that a sentinel watches. Yield what lets its replica take over."""
    watched = Watched(folder, binary, AWAY)

    def fail() -> None:
        if how == GUARDED:
            for each in watched.servers:
                with redis.Redis(port=each.port) as client:
                    client.config_set("min-replicas-to-write", 1)
        if how != KILLED:
            watched.failover()
            return
        before = watched.primary()
        before.kill()
        until(lambda: watched.primary() is not before, "the sentinel names the new primary")

    try:
        with watched.settings():
            yield fail
            current_server().wire.client.close()
    finally:
        # django-redis stores pools by URL, whichever sentinels they asked.
        for url in [url for url in ConnectionFactory._pools if url.startswith("redis://quota/")]:
            ConnectionFactory._pools.pop(url).disconnect()
        watched.stop()


@contextmanager
def cluster(folder: Path, binary: Path, how: str) -> Iterator[Fail]:
    """Use a cluster whose node with the shared limit has a replica. Yield what lets the replica take over."""
    nodes = Cluster(folder, binary, AWAY)
    try:
        with nodes.settings():
            number = nodes.node_of(shard(current_server().keyspace, "global", ""))
            with nodes.replica(number, folder, binary) as replica:

                def fail() -> None:
                    if how == PLANNED:
                        nodes.fail_over(replica)
                        return
                    nodes.servers[number].kill()
                    until(lambda: replica.info("replication")["role"] == "master", "the replica takes over")

                yield fail
                if how == KILLED:
                    nodes.servers[number].start()
                    until(lambda: _follows(nodes.clients[number]), "the old primary follows the new one")
    finally:
        nodes.stop()


def _follows(client: redis.Redis) -> bool:
    return bool(client.info("replication").get("master_link_status") == "up")


@pytest.mark.parametrize(
    ("kind", "how"),
    [(sentinel, PLANNED), (sentinel, GUARDED), (sentinel, KILLED), (cluster, PLANNED), (cluster, KILLED)],
    ids=["sentinel planned", "sentinel guarded", "sentinel killed", "cluster planned", "cluster killed"],
)
def test_a_failover_under_load(
    kind: Callable[[Path, Path, str], AbstractContextManager[Fail]],
    how: str,
    servers: TestServers,
    tmp_path: Path,
    load_rules: None,
    process_environment: Callable[[], dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    reliability: Callable[[Row], None],
) -> None:
    own_breaker(monkeypatch)
    process_totals._forget_all()
    with kind(tmp_path, server_binary(servers.redis_kind), how) as fail:
        flow()
        with Load(20261, CALLERS / RATE, process_environment()).running() as load:
            load.wait(2)
            fail()
            ended = time.monotonic()
            load.wait(BACK + 2)
        row = row_of(f"{kind.__name__.capitalize()}: {how}", load, ended)
    reliability(row)
    assert (row.errors, row.doubled) == (0, 0), load.errors[:3]
    assert row.declared
    # A permit whose charge was not replicated is free again.
    assert row.over <= row.lost
    assert row.back <= BACK
