"""What waits in Redis to be drained, as one shard of a server tells it at one moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import time_ns

from redis.exceptions import ResponseError

from ratelimits.engine import scripts
from ratelimits.engine.server import Server

#: Batches of one shard that one pass takes: they are listed, fenced and applied together.
BATCHES_PER_PASS = 64


@dataclass(frozen=True, slots=True)
class Waiting:
    """What waited in one shard at one moment (times in µs).

    The server's run, since when it is up and its time; the newest batch ever opened; when the shard was last sealed;
    how many batches wait, and the oldest of them; what this machine's clock said when the server had answered, and the
    clock of the machine that sealed when it did.
    """

    shard: int
    run: str
    up_since: int
    now: int
    incarnation: str
    seq: int
    sealed_at: int
    count: int
    batches: tuple[str, ...]
    clock: int
    sealed_clock: int

    @property
    def lead(self) -> int:
        """By how much (µs) the seal is ahead: of the clock of who sealed, or of this machine's."""
        return self.sealed_at - min(self.clock, self.sealed_clock or self.clock)


def waiting(
    server: Server, shards: Sequence[int], refused: dict[int, ResponseError], clock: int | None = None
) -> list[Waiting]:
    """Return what waits in these shards of one server, in one round trip; add those that cannot be asked to `refused`.

    `clock` is µs since 1970 UTC, by default this machine's clock.
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
        Waiting(
            *(shard, run.decode(), int(up), int(now), incarnation.decode(), int(seq or 0), int(at or 0), int(count)),
            tuple(map(bytes.decode, names)),
            clock,
            int(sealed_clock or 0),
        )
        for shard, (run, up, now, incarnation, seq, at, count, names, sealed_clock) in answered.items()
    ]
