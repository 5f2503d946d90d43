"""Test that usage reaches the ledger although the server's memory is full, and stays full."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from redis.exceptions import OutOfMemoryError

from ratelimits.engine.call import new_nonce
from ratelimits.engine.counting import Count, RefusalCount
from ratelimits.engine.server import current_server, publish_version, version_in_force
from ratelimits.usage.models import Batch, DurabilityGap, Line
from tests.support.engine.asking import KEYS, home, usage
from tests.support.raw import RawRedis
from tests.support.usage.traffic import flow, use

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def full(redis_client: RawRedis) -> Iterator[RawRedis]:
    """Yield a client. `CONFIG SET maxmemory 1` makes the server refuse writes until the end of the test."""
    yield redis_client
    redis_client.config_set("maxmemory", 0)


def fill(client: RawRedis) -> None:
    """Let the server's memory be full for ever: no deletion ever makes it less than full."""
    client.config_set("maxmemory", 1)
    with pytest.raises(OutOfMemoryError):
        client.set("n", 0)


def test_usage_is_sealed_and_drained_by_a_server_without_memory(full: RawRedis) -> None:
    use()
    fill(full)
    assert flow().batches == 1
    assert Line.objects.get().admitted_units == 1
    assert not DurabilityGap.objects.exists()
    assert full.keys("*:b:*") == []


def test_it_does_so_again_and_again(full: RawRedis) -> None:
    for number in range(3):
        full.config_set("maxmemory", 0)
        use(key=f"api_key:{number}")
        fill(full)
        assert flow().batches == 1
    assert [batch.seq for batch in Batch.objects.order_by("seq")] == [1, 2, 3]


def test_a_batch_without_an_identity_is_sealed_too(full: RawRedis) -> None:
    use()
    full.hdel(KEYS.open(home("acme")), "#i", "#s", "#o", "#r", "#p", "#f")
    full.delete(KEYS.meta(home("acme")))
    fill(full)
    assert flow().batches == 1
    assert Line.objects.get().admitted_units == 1


def test_an_edit_is_published_to_a_server_without_memory(full: RawRedis) -> None:
    fill(full)
    assert publish_version(7) == version_in_force() == 7


def test_refusals_from_memory_are_counted_by_a_server_without_memory(full: RawRedis) -> None:
    fill(full)
    server, shard = current_server(), home("acme")
    command = Count(server.keyspace.head(shard), server.keyspace.open(shard))
    command.add(RefusalCount(usage(), (1,), rule=1, version=1, requests=5))
    server.wire.call(command, new_nonce())
    assert flow().batches == 1
    assert Line.objects.get().denied_requests == 5
