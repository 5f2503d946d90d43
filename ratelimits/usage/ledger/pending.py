"""The batches of a shard that wait in Redis to be drained. A shard is a part of the accounts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import time_ns

from redis.exceptions import ResponseError

from ratelimits.engine.assemble import scripts
from ratelimits.engine.server import Server

#: Maximum number of batches of one shard in one pass. The batches of a pass are listed, fenced and applied together.
BATCHES_PER_PASS = 64


@dataclass(frozen=True, slots=True)
class PendingBatches:
    """The waiting batches of one shard, and the state of the shard's server. Moments are in µs since 1970 UTC."""

    shard: int
    #: The server's run: the time from its last start until its next restart.
    run: str
    #: The run started at this moment or earlier.
    up_since: int
    #: The server's time.
    now: int
    #: The incarnation (the numbering) of the newest batch that was opened in the shard.
    incarnation: str
    #: The number of this newest batch.
    seq: int
    #: The moment at which the shard was last sealed, by the server's clock.
    sealed_at: int
    #: How many sealed batches wait.
    count: int
    #: The names of the oldest sealed batches, at most `BATCHES_PER_PASS`.
    batches: tuple[str, ...]
    #: This machine's time after the server's reply.
    clock: int
    #: The time of the machine that sealed last, at this seal; 0 if this time is not known.
    sealed_clock: int
    #: The moment of the shard's first seal after the server last lost its data; 0 if this moment is not known.
    first_sealed: int
    #: Whether a batch is open. True also if the server cannot tell, while the shard's slot moves to another node.
    is_open: bool

    @property
    def lead(self) -> int:
        """Return by how many µs the server's clock was ahead of the sealing machine's clock at the last seal.

        If the sealing machine's time is unknown, or later than this machine's time, use this machine's time instead.
        """
        return self.sealed_at - min(self.clock, self.sealed_clock or self.clock)


def read_pending(
    server: Server, shards: Sequence[int], refused: dict[int, Exception], clock: int | None = None
) -> list[PendingBatches]:
    """Return the pending batches of some shards, in one round trip. All `shards` must be on one server.

    If the server answers for a shard with an error, the error is added to `refused`. `clock` replaces this machine's
    time after the reply (µs since 1970 UTC).
    """
    text = scripts.read("run", "pending").text.decode()
    with server.wire.client_of(server.keyspace, shards[0]).pipeline(transaction=False) as pipeline:
        for shard in shards:
            number_of_keys = 1
            pipeline.eval(text, number_of_keys, server.keyspace.meta(shard), str(BATCHES_PER_PASS))
        replies = dict(zip(shards, pipeline.execute(raise_on_error=False), strict=True))
    clock = time_ns() // 1000 if clock is None else clock
    refused |= {shard: reply for shard, reply in replies.items() if isinstance(reply, ResponseError)}
    answered = {shard: reply for shard, reply in replies.items() if not isinstance(reply, ResponseError)}
    return [
        PendingBatches(
            shard=shard,
            run=run.decode(),
            up_since=int(up),
            now=int(now),
            incarnation=incarnation.decode(),
            seq=int(seq or 0),
            sealed_at=int(at or 0),
            count=int(count),
            batches=tuple(map(bytes.decode, names)),
            clock=clock,
            sealed_clock=int(sealed_clock or 0),
            first_sealed=int(first or 0),
            is_open=bool(is_open),
        )
        for shard, (run, up, now, incarnation, seq, at, count, names, sealed_clock, first, is_open) in answered.items()
    ]
