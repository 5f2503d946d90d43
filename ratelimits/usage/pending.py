"""The batches of a shard (a part of the accounts) that wait in Redis to be drained, at one moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import time_ns

from redis.exceptions import ResponseError

from ratelimits.engine import scripts
from ratelimits.engine.server import Server

#: Maximum number of batches of one shard in one pass. The batches of a pass are listed, fenced and applied together.
BATCHES_PER_PASS = 64


@dataclass(frozen=True, slots=True)
class Pending:
    """The batches of one shard that waited at one moment, and their server's state. Moments are µs since 1970 UTC."""

    shard: int
    #: The server's run (its life until it restarts), when that run started, and the server's time.
    run: str
    up_since: int
    now: int
    #: The newest batch that was ever opened in the shard: its numbering, and its number in it.
    incarnation: str
    seq: int
    #: When the shard was last sealed.
    sealed_at: int
    #: The number of batches that wait, and the names of the oldest of them.
    count: int
    batches: tuple[str, ...]
    #: This machine's time after the server's reply, and the sealing machine's time when it sealed.
    clock: int
    sealed_clock: int
    #: When the shard was first sealed with the server's present data; 0 if unknown.
    first_sealed: int
    #: Whether a batch is open.
    is_open: bool

    @property
    def lead(self) -> int:
        """Return by how many µs the server's clock is ahead: of the sealing machine's clock, or of this machine's."""
        return self.sealed_at - min(self.clock, self.sealed_clock or self.clock)


def read_pending(
    server: Server, shards: Sequence[int], refused: dict[int, ResponseError], clock: int | None = None
) -> list[Pending]:
    """Return the pending batches of these shards of one server, in one round trip.

    The errors of shards that the server refuses are added to `refused`. `clock` is µs since 1970 UTC, by default this
    machine's clock.
    """
    text = scripts.read("run", "pending").text.decode()
    with server.wire.client_of(server.keyspace, shards[0]).pipeline(transaction=False) as pipeline:
        for shard in shards:
            pipeline.eval(text, 1, server.keyspace.meta(shard), str(BATCHES_PER_PASS))
        replies = dict(zip(shards, pipeline.execute(raise_on_error=False), strict=True))
    clock = time_ns() // 1000 if clock is None else clock
    refused |= {shard: reply for shard, reply in replies.items() if isinstance(reply, ResponseError)}
    answered = {shard: reply for shard, reply in replies.items() if not isinstance(reply, ResponseError)}
    return [
        Pending(
            *(shard, run.decode(), int(up), int(now), incarnation.decode(), int(seq or 0), int(at or 0), int(count)),
            tuple(map(bytes.decode, names)),
            clock,
            int(sealed_clock or 0),
            int(first or 0),
            bool(is_open),
        )
        for shard, (run, up, now, incarnation, seq, at, count, names, sealed_clock, first, is_open) in answered.items()
    ]
