"""Test that a run of a server stays the same while nothing of it can be lost, whatever connections remember."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from ratelimits.conf import conf
from ratelimits.embedded import EmbeddedServer as RunningServer
from ratelimits.engine import Meter, Usage
from ratelimits.engine.call import Call, new_nonce, shard_of_usage
from ratelimits.engine.counting import Count, RefusalCount
from ratelimits.engine.decide import call_for, decide_call
from ratelimits.engine.server import Server, current_server
from ratelimits.engine.transport.wire import Wire
from ratelimits.usage.ledger.drain import drain
from ratelimits.usage.ledger.seal import seal
from ratelimits.usage.models import Batch, DurabilityGap
from tests.support.engine.asking import limit
from tests.support.eventually import until
from tests.support.servers import TestServers, server_binary

pytestmark = pytest.mark.django_db(transaction=True)

USAGE = Usage("acme", "api_key:1", (Meter("requests"),))


def request() -> Call:
    return call_for([limit("fixed_window", key="api_key:1", capacity=10**6)], account="acme", usage=USAGE)


def another() -> Server:
    """Return the same server, over separate connections."""
    return Server(Wire(conf.CACHE_ALIAS, 5.0), current_server().keyspace)


def refused(server: Server) -> None:
    """Make a refusal that a process counts by itself."""
    shard = shard_of_usage(server.keyspace, USAGE)
    command = Count(server.keyspace.head(shard), server.keyspace.open(shard))
    command.add(RefusalCount(USAGE, (1,), 1, 1, 1))
    server.wire.call(command, new_nonce())


def decided(server: Server) -> None:
    assert decide_call(server, request()).allowed


@contextmanager
def second(servers: TestServers, path: Path) -> Iterator[RunningServer]:
    running = RunningServer(path / "second", binary=server_binary(servers.redis_kind))
    try:
        yield running
    finally:
        running.stop()


def follow(replica: RunningServer, primary: RunningServer) -> None:
    """Make a server replicate another one, and wait until it does."""
    with redis.Redis.from_url(replica.url) as client:
        client.execute_command("REPLICAOF", "127.0.0.1", str(primary.port))
        until(lambda: client.info("replication")["master_link_status"] == "up", "the replica is there")


@pytest.mark.parametrize("count", [decided, refused])
def test_attaching_the_first_replica_is_no_restart(
    count: Callable[[Server], None], always_server: RunningServer, servers: TestServers, tmp_path: Path
) -> None:
    old = another()
    count(old)
    with redis.Redis.from_url(always_server.url) as client, second(servers, tmp_path) as replica:
        before = client.info("replication")["master_replid"]
        follow(replica, always_server)
        assert client.info("replication")["master_replid"] != before
        new = another()
        for _ in range(50):
            count(old)
            count(new)
        seal()
        drain()
    assert Batch.objects.count() == 1
    assert not DurabilityGap.objects.exists()


@pytest.mark.parametrize("count", [decided, refused])
def test_a_promotion_is_another_run_once_though_connections_stay_open(
    count: Callable[[Server], None], always_server: RunningServer, servers: TestServers, tmp_path: Path
) -> None:
    old = another()
    count(old)
    seal()
    drain()
    count(old)
    with redis.Redis.from_url(always_server.url) as client, second(servers, tmp_path) as primary:
        follow(primary, always_server)
        with redis.Redis.from_url(primary.url) as promoted:
            promoted.execute_command("REPLICAOF", "NO", "ONE")
        follow(always_server, primary)
        client.execute_command("REPLICAOF", "NO", "ONE")
        new = another()
        for _ in range(50):
            count(old)
            count(new)
        seal()
        drain()
    assert Batch.objects.count() == 3
    # The last counts before the promotion may be missing in any shard, whatever the fsync policy is.
    gap = DurabilityGap.objects.get()
    assert (gap.kind, gap.shard, gap.harmless) == ("restart", None, False)
