"""Sealing: turn the open batches of all shards into sealed ones, which can be drained."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from time import time_ns
from typing import Any

import redis
from redis.exceptions import ResponseError

from ratelimits.engine import scripts
from ratelimits.engine.server import current_server, on_each
from ratelimits.usage import crash

#: Number of shards in one round trip: a full batch takes the server 7 ms, and all must fit in RATELIMITS["TIMEOUT"].
_CHUNK = 8


@dataclass(frozen=True, slots=True)
class SealResult:
    """The result for one shard: server time (µs), the server's run, the sealed batch ("" for none), batches waiting."""

    shard: int
    at: int
    run: str
    batch: str
    waiting: int


def seal() -> list[SealResult]:
    """Seal the open batch of every shard, and return a result for each shard.

    Sealing twice, or in several processes at once, is harmless. Raises redis.exceptions.RedisError if a server does not
    answer or refuses a shard; in the second case all other shards were sealed. A sealed batch stays sealed.
    """
    server, text = current_server(), scripts.read("run", "batch", "seal").text.decode()
    crash.reached("seal:before")
    replies: dict[int, Any] = {}

    def one_server(client: redis.Redis, shards: list[int]) -> None:
        for first in range(0, len(shards), _CHUNK):
            chunk, clock = shards[first : first + _CHUNK], str(time_ns() // 1000)
            with client.pipeline(transaction=False) as pipeline:
                for shard in chunk:
                    pipeline.eval(text, 1, server.keyspace.meta(shard), secrets.token_hex(12), "", clock)
                replies.update(zip(chunk, pipeline.execute(raise_on_error=False), strict=True))

    on_each(server, range(server.keyspace.shards), one_server)
    for reply in replies.values():
        # A refusal of one shard, for example while its slot moves to another node, is raised after all others are
        # sealed.
        if isinstance(reply, ResponseError):
            raise reply
    crash.reached("seal:after")
    return [
        SealResult(shard, int(at), run.decode(), batch.decode(), int(waiting))
        for shard, (at, run, batch, waiting) in sorted(replies.items())
    ]
