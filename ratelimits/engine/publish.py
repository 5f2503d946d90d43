"""Telling every shard of a new configuration version, so that the next decision anywhere is by the new rules."""

from __future__ import annotations

import redis

from ratelimits.engine import scripts
from ratelimits.engine.server import current_server, on_each

#: How often this process has published a version, the number of them being the length.
_published: list[None] = []


def publications() -> int:
    """How many versions this process has published: it need not wait to be told of what it edited itself."""
    return len(_published)


def publish_version(version: int) -> int:
    """Raise every shard's configuration version to at least `version`; returns the highest that is now in force.

    Raises redis.exceptions.RedisError when the server is away; the edit then takes effect with the periodic reload.
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
    """Return the highest configuration version that any shard asks for, 0 if none does; changes nothing.

    Raises redis.exceptions.RedisError when the server is away.
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
