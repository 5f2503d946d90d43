"""Publish a new configuration version to every shard, so that the next decision of any process uses the new rules."""

from __future__ import annotations

import redis

from ratelimits.engine import scripts
from ratelimits.engine.server import current_server, on_each

#: One item for each version that this process has published: appending needs no lock.
_published: list[None] = []


def publications() -> int:
    """Return how many versions this process has published. It knows its own edits without asking Redis."""
    return len(_published)


def publish_version(version: int) -> int:
    """Raise every shard's configuration version to at least `version`. Return the highest one that is now in force.

    Raise redis.exceptions.RedisError if the server is away. The edit then takes effect with the periodic reload.
    """
    _published.append(None)
    server, script = current_server(), scripts.read("publish")
    in_force: list[int] = []

    def one_server(client: redis.Redis, shards: list[int]) -> None:
        with client.pipeline(transaction=False) as pipeline:
            for shard in shards:
                pipeline.eval(script.text.decode(), 1, server.keyspace.head(shard), str(version))
            in_force.extend(pipeline.execute())

    on_each(server, range(server.keyspace.shards), one_server)
    return max(in_force)


def version_in_force() -> int:
    """Return the highest configuration version of any shard; 0 if no shard has one.

    Raise redis.exceptions.RedisError if the server is away.
    """
    server = current_server()
    heads: list[bytes | None] = []

    def one_server(client: redis.Redis, shards: list[int]) -> None:
        with client.pipeline(transaction=False) as pipeline:
            for shard in shards:
                pipeline.get(server.keyspace.head(shard))
            heads.extend(pipeline.execute())

    on_each(server, range(server.keyspace.shards), one_server)
    return max(int(head.split()[0]) if head else 0 for head in heads)
