"""Publish a new version of the rules to every shard in Redis. Each process uses it from its next decision on."""

from __future__ import annotations

import redis

from ratelimits.engine.assemble import scripts
from ratelimits.engine.server import current_server, on_each

#: One item for each version that this process has tried to publish. This is a list because appending needs no lock.
_published: list[None] = []


def publications() -> int:
    """Return how many versions this process has tried to publish.

    A caller keeps the number and compares it later. If the number has changed, this process has edited the rules in the
    meantime. The process then reads the rules again, without asking Redis whether they have changed.
    """
    return len(_published)


def publish_version(version: int) -> int:
    """Raise the version of every shard to at least `version`. Return the highest version that is now in force.

    Raise redis.exceptions.RedisError if the server does not answer. The edit then takes effect when the processes read
    the rules again. They do this every RELOAD_INTERVAL seconds (a setting).
    """
    _published.append(None)
    server, script = current_server(), scripts.read("memory/full", "publish")
    in_force: list[int] = []

    def publish(client: redis.Redis, shards: list[int]) -> None:
        with client.pipeline(transaction=False) as pipeline:
            for shard in shards:
                number_of_keys = 1
                pipeline.eval(script.text.decode(), number_of_keys, server.keyspace.head(shard), str(version))
            in_force.extend(pipeline.execute())

    on_each(server, range(server.keyspace.shards), publish)
    return max(in_force)


def version_in_force() -> int:
    """Return the highest version of the rules that any shard has; 0 if no shard has one.

    Raise redis.exceptions.RedisError if the server does not answer.
    """
    server = current_server()
    heads: list[bytes | None] = []

    def read_heads(client: redis.Redis, shards: list[int]) -> None:
        with client.pipeline(transaction=False) as pipeline:
            for shard in shards:
                pipeline.get(server.keyspace.head(shard))
            heads.extend(pipeline.execute())

    on_each(server, range(server.keyspace.shards), read_heads)
    # A head is "<version of the rules> <run of the server>".
    return max(int(head.split()[0]) if head else 0 for head in heads)
