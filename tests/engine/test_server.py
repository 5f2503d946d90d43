"""Test that every shard knows an edit before the next decision."""

from __future__ import annotations

from typing import Any

import pytest
from redis.exceptions import RedisError

from ratelimits.embedded import free_port
from ratelimits.engine import Stale
from ratelimits.engine.server import publish_version
from tests.end_to_end.test_round_trips import commands_of_clients
from tests.support.engine.asking import KEYS, ask, limit
from tests.support.raw import RawRedis


def versions(client: RawRedis) -> list[int]:
    return [int(client.get(KEYS.head(shard)).split()[0]) for shard in range(KEYS.shards)]


def test_every_shard_has_the_version_and_it_only_rises(redis_client: RawRedis) -> None:
    assert [publish_version(number) for number in (3, 5, 4)] == [3, 5, 5]
    assert versions(redis_client) == [5] * KEYS.shards
    assert redis_client.ttl(KEYS.head(0)) == -1


def test_a_version_beyond_fourteen_digits_keeps_its_last(redis_client: RawRedis) -> None:
    assert publish_version(9_007_199_254_740_991) == 9_007_199_254_740_991
    assert set(versions(redis_client)) == {9_007_199_254_740_991}
    with pytest.raises(Stale) as caught:
        ask(limit(version=4_000_000_000))
    assert caught.value.version == 9_007_199_254_740_991


def test_publishing_is_one_round_trip(redis_url: str) -> None:
    publish_version(1)
    with commands_of_clients(redis_url) as commands:
        publish_version(2)
    assert {command.split()[0] for command in commands} == {"EVAL"}
    assert len(commands) == KEYS.shards


def test_shards_are_those_of_the_settings(settings: Any, redis_client: RawRedis) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "SHARDS": 3, "NAMESPACE": "other"}
    publish_version(2)
    assert sorted(redis_client.keys("rl:1:other:*")) == [b"rl:1:other:{%02d}:head" % shard for shard in range(3)]


def test_without_a_server_the_editor_is_told(settings: Any) -> None:
    place = {**settings.CACHES["ratelimits"], "LOCATION": f"redis://127.0.0.1:{free_port()}/0"}
    settings.CACHES = {**settings.CACHES, "ratelimits": place}
    with pytest.raises(RedisError):
        publish_version(2)
