"""Sealing: the open batches of all shards become sealed ones, which can be drained."""

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

#: Shards in one round trip: sealing a full batch takes the server 7 ms, and a call may take RATELIMITS["TIMEOUT"].
_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Sealing:
    """What sealing a shard answered: the server's time (µs), its run, the batch sealed ("" = none), batches waiting."""

    shard: int
    at: int
    run: str
    batch: str
    waiting: int


def seal() -> list[Sealing]:
    """Seal the open batch of every shard.

    Doing it again, or at once from several processes, is harmless. Raises redis.exceptions.RedisError when the server
    is away or refuses a shard for now, when all others were sealed; a batch that was sealed meanwhile stays sealed.
    """
    server, text = current_server(), scripts.read("run", "batch", "seal").text.decode()
    crash.reached("seal:before")
    replies: dict[int, Any] = {}

    def one_server(client: redis.Redis, shards: list[int]) -> None:
        for first in range(0, len(shards), _AT_ONCE):
            some, clock = shards[first : first + _AT_ONCE], str(time_ns() // 1000)
            with client.pipeline(transaction=False) as pipeline:
                for shard in some:
                    pipeline.eval(text, 1, server.keyspace.meta(shard), secrets.token_hex(12), "", clock)
                replies.update(zip(some, pipeline.execute(raise_on_error=False), strict=True))

    on_each(server, range(server.keyspace.shards), one_server)
    for reply in replies.values():
        # What one shard refuses (its slot is on the move, say) keeps no other from being sealed.
        if isinstance(reply, ResponseError):
            raise reply
    crash.reached("seal:after")
    return [
        Sealing(shard, int(at), run.decode(), batch.decode(), int(waiting))
        for shard, (at, run, batch, waiting) in sorted(replies.items())
    ]
