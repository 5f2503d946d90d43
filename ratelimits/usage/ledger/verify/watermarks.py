"""Verification of watermarks: a batch that was opened before its shard's watermark must not wait in Redis any more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import redis
from redis.exceptions import RedisError

from ratelimits.engine import Unavailable
from ratelimits.engine.server import Server, current_server, on_each
from ratelimits.engine.transport.refused import cause
from ratelimits.moments import when
from ratelimits.usage.ledger.pending import BATCHES_PER_PASS
from ratelimits.usage.ledger.watermark import TOLERANCE
from ratelimits.usage.models.ledger import ArchivedRange, Batch, QuarantinedBatch, ShardState


@dataclass(frozen=True, slots=True)
class _WaitingBatch:
    """A batch in Redis."""

    shard: int
    #: The name has the form "incarnation:seq".
    name: str
    #: The moment at which the batch was opened, in µs since 1970 UTC.
    opened_at: int


def verify_watermarks(
    using: str, *, checked: Counter[str] | None = None, redis_errors: list[str] | None = None
) -> Iterator[str]:
    """Yield an error for each shard with a batch in Redis that was opened before the shard's watermark.

    The number of watermarks is added to `checked`. If Redis cannot be asked, the reason is appended to `redis_errors`.
    """
    # Read the watermarks before Redis. A watermark advances only after the batches before it are drained. So no batch
    # that Redis then has should be older than the watermark that was read.
    watermarks = dict(ShardState.objects.using(using).order_by("shard").values_list("shard", "watermark"))
    try:
        before_watermark = list(_before_watermark(current_server(), watermarks))
    except (RedisError, Unavailable, OSError) as error:
        if redis_errors is not None:
            redis_errors.append(cause(error))
        return
    if checked is not None:
        checked["watermarks"] += len(watermarks)
    for batch in before_watermark:
        if not _is_known(using, batch):
            yield (
                f"shard {batch.shard:02d} says that its usage is complete until {when(watermarks[batch.shard])}, but"
                f" batch {batch.name}, opened at {when(batch.opened_at)}, still waits in Redis"
            )


def _before_watermark(server: Server, watermarks: Mapping[int, int]) -> Iterator[_WaitingBatch]:
    """Yield, for each shard, the oldest batch in Redis, if it was opened before the shard's watermark."""
    waiting: list[_WaitingBatch] = []

    def read_from_server(client: redis.Redis, shards: list[int]) -> None:
        waiting.extend(_waiting_batches(server, client, [shard for shard in shards if watermarks.get(shard)]))

    on_each(server, range(server.keyspace.shards), read_from_server)
    shards = set()
    for batch in sorted(waiting, key=lambda batch: (batch.shard, batch.opened_at)):
        # After a failover, the clock of the new server can differ a little from the clock of the old server.
        if batch.shard not in shards and batch.opened_at < watermarks[batch.shard] - TOLERANCE:
            shards.add(batch.shard)
            yield batch


def _waiting_batches(server: Server, client: redis.Redis, shards: list[int]) -> Iterator[_WaitingBatch]:
    """Yield the open batch and the oldest sealed batches of each shard."""
    keyspace, last_index = server.keyspace, BATCHES_PER_PASS - 1
    lists = _replies(client, [("LRANGE", keyspace.sealed(shard), 0, last_index) for shard in shards])
    keys = [(shard, keyspace.open(shard)) for shard in shards]
    for shard, names in zip(shards, lists, strict=True):
        keys += [(shard, keyspace.batch(shard, name.decode())) for name in names or ()]
    # The fields #i, #s and #o of a batch are its incarnation, its number and the moment of its opening.
    identities = _replies(client, [("HMGET", key, "#i", "#s", "#o") for _shard, key in keys])
    for (shard, _key), identity in zip(keys, identities, strict=True):
        incarnation, seq, opened_at = identity or (None, None, None)
        # Skip a key that is not a batch: the drain quarantines it, and then the watermark does not advance.
        if incarnation and seq and opened_at and opened_at.isdigit():
            name = f"{incarnation.decode(errors='replace')}:{seq.decode(errors='replace')}"
            yield _WaitingBatch(shard, name, int(opened_at))


def _replies(client: redis.Redis, commands: list[tuple[Any, ...]]) -> list[Any]:
    """Return the replies to these commands, in one round trip. The reply to a refused command is None."""
    with client.pipeline(transaction=False) as pipeline:
        queue: Any = pipeline.execute_command
        for command in commands:
            queue(*command)
        answers = pipeline.execute(raise_on_error=False)
    return [None if isinstance(answer, Exception) else answer for answer in answers]


def _is_known(using: str, batch: _WaitingBatch) -> bool:
    """Return whether a batch is in the ledger, archived or quarantined.

    If the server's data was restored from a backup, a drained batch can be in Redis again. Also return true if the part
    of the name after the colon is not a number: the drain quarantines a batch with such a name.
    """
    incarnation, _colon, seq = batch.name.rpartition(":")
    if not seq.isdigit() or QuarantinedBatch.objects.using(using).filter(shard=batch.shard, name=batch.name).exists():
        return True
    numbering = {"shard": batch.shard, "incarnation": incarnation}
    rows = Batch.objects.using(using).filter(**numbering, first_seq__lte=int(seq), seq__gte=int(seq))
    archived = ArchivedRange.objects.using(using).filter(**numbering, first_seq__lte=int(seq), last_seq__gte=int(seq))
    return rows.exists() or archived.exists()
