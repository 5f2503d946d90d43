"""Verification of watermarks: no batch that was opened before a shard's watermark may still wait in Redis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import redis
from redis.exceptions import RedisError

from ratelimits.engine import Unavailable
from ratelimits.engine.server import Server, current_server, on_each
from ratelimits.models.ledger import ArchivedRange, Batch, QuarantinedBatch, ShardState, when
from ratelimits.usage.pending import BATCHES_PER_PASS
from ratelimits.usage.watermark import TOLERANCE


@dataclass(frozen=True, slots=True)
class _Opened:
    """A batch in Redis: its name ("incarnation:seq") and when it was opened (µs since 1970 UTC)."""

    shard: int
    name: str
    at: int


def verify_watermarks(
    using: str, *, checked: Counter[str] | None = None, unasked: list[str] | None = None
) -> Iterator[str]:
    """Yield an error for each shard that has a batch in Redis which was opened before the shard's watermark.

    The number of watermarks is added to `checked`. If Redis does not answer, the error is appended to `unasked`.
    """
    # Read the watermarks before the batches in Redis: a watermark advances only after earlier batches are drained.
    marks = dict(ShardState.objects.using(using).order_by("shard").values_list("shard", "watermark"))
    try:
        passed = list(_passed(current_server(), marks))
    except (RedisError, Unavailable, OSError) as error:
        if unasked is not None:
            unasked.append(str(error))
        return
    if checked is not None:
        checked["watermarks"] += len(marks)
    for batch in passed:
        if not _is_known(using, batch):
            yield (
                f"shard {batch.shard:02d} says that its usage is complete until {when(marks[batch.shard])}, but batch"
                f" {batch.name}, opened at {when(batch.at)}, still waits in Redis"
            )


def _passed(server: Server, marks: Mapping[int, int]) -> Iterator[_Opened]:
    """Yield the oldest batch in Redis of each shard, if it was opened before the shard's watermark."""
    waiting: list[_Opened] = []

    def one_server(client: redis.Redis, shards: list[int]) -> None:
        waiting.extend(_waiting(server, client, [shard for shard in shards if marks.get(shard)]))

    on_each(server, range(server.keyspace.shards), one_server)
    shards = set()
    for batch in sorted(waiting, key=lambda batch: (batch.shard, batch.at)):
        # After a failover the clocks of the two servers may differ a little.
        if batch.shard not in shards and batch.at < marks[batch.shard] - TOLERANCE:
            shards.add(batch.shard)
            yield batch


def _waiting(server: Server, client: redis.Redis, shards: list[int]) -> Iterator[_Opened]:
    """Yield the open batch of each shard and its oldest sealed batches."""
    keyspace, oldest = server.keyspace, BATCHES_PER_PASS - 1
    lists = _replies(client, [("LRANGE", keyspace.sealed(shard), 0, oldest) for shard in shards])
    keys = [(shard, keyspace.open(shard)) for shard in shards]
    for shard, names in zip(shards, lists, strict=True):
        keys += [(shard, keyspace.batch(shard, name.decode())) for name in names or ()]
    heads = _replies(client, [("HMGET", key, "#i", "#s", "#o") for _shard, key in keys])
    for (shard, _key), head in zip(keys, heads, strict=True):
        incarnation, seq, at = head or (None, None, None)
        # A key that is not a batch is left to the drain: it quarantines the key, and the watermark stops.
        if incarnation and seq and at and at.isdigit():
            yield _Opened(shard, f"{incarnation.decode(errors='replace')}:{seq.decode(errors='replace')}", int(at))


def _replies(client: redis.Redis, commands: list[tuple[Any, ...]]) -> list[Any]:
    """Return the replies to some commands in one round trip; None for a command that the server refused."""
    with client.pipeline(transaction=False) as pipeline:
        queue: Any = pipeline.execute_command
        for command in commands:
            queue(*command)
        answers = pipeline.execute(raise_on_error=False)
    return [None if isinstance(answer, Exception) else answer for answer in answers]


def _is_known(using: str, batch: _Opened) -> bool:
    """Return whether a batch is in the ledger, archived or quarantined. A restored server may list it again."""
    incarnation, _colon, seq = batch.name.rpartition(":")
    if not seq.isdigit() or QuarantinedBatch.objects.using(using).filter(shard=batch.shard, name=batch.name).exists():
        return True
    same = {"shard": batch.shard, "incarnation": incarnation}
    rows = Batch.objects.using(using).filter(**same, first_seq__lte=int(seq), seq__gte=int(seq))
    archived = ArchivedRange.objects.using(using).filter(**same, first_seq__lte=int(seq), last_seq__gte=int(seq))
    return rows.exists() or archived.exists()
