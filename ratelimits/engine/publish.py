"""Publish a new version of the rules to every shard in Redis. The next decision of any process then uses the new rules.

The version is a number that each edit of the rules raises.
"""

from __future__ import annotations

import redis

from ratelimits.engine import scripts
from ratelimits.engine.server import current_server, on_each

#: One item for each version that this process has published. A list counts them because appending needs no lock.
_published: list[None] = []


def publications() -> int:
    """Return how many versions this process has published.

    A change of this number tells the process about its own edits without asking Redis.
    """
    return len(_published)


def publish_version(version: int) -> int:
    """Raise the version of every shard to at least `version`. Return the highest version that is now in force.

    Raise redis.exceptions.RedisError if the server does not answer. The edit then takes effect when the processes next
    read the rules, which they do every RELOAD_INTERVAL seconds.
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
    """Return the highest version of the rules that any shard has; 0 if no shard has one.

    Raise redis.exceptions.RedisError if the server does not answer.
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
