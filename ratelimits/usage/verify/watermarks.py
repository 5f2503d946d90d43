"""Verifying watermarks: none has passed a batch that still waits in Redis."""

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
    """A batch in Redis, "incarnation:seq", and when it was opened (µs since 1970 UTC)."""

    shard: int
    name: str
    at: int


def verify_watermarks(
    using: str, *, checked: Counter[str] | None = None, unasked: list[str] | None = None
) -> Iterator[str]:
    """Say which shards are not complete until their watermark, since a batch from before it still waits in Redis.

    `checked` is given the number of watermarks. `unasked` is given why Redis could not be asked, if that is so.
    """
    # Before Redis is asked: a watermark is only moved once no batch from before it waits tserver.
    marks = dict(ShardState.objects.using(using).order_by("shard").values_list("shard", "watermark"))
    try:
        found = list(_passed(current_server(), marks))
    except (RedisError, Unavailable, OSError) as error:
        if unasked is not None:
            unasked.append(str(error))
        return
    if checked is not None:
        checked["watermarks"] += len(marks)
    for each in found:
        if not _is_known(using, each):
            yield (
                f"shard {each.shard:02d} says that its usage is complete until {when(marks[each.shard])}, but batch"
                f" {each.name}, opened at {when(each.at)}, still waits in Redis"
            )


def _passed(server: Server, marks: Mapping[int, int]) -> Iterator[_Opened]:
    """Yield, for each shard, the oldest of the batches in Redis that were opened before its watermark."""
    found: list[_Opened] = []

    def one_server(client: redis.Redis, shards: list[int]) -> None:
        found.extend(_waiting(server, client, [shard for shard in shards if marks.get(shard)]))

    on_each(server, range(server.keyspace.shards), one_server)
    shards = set()
    for each in sorted(found, key=lambda each: (each.shard, each.at)):
        # Clocks of servers that take turns may differ a little.
        if each.shard not in shards and each.at < marks[each.shard] - TOLERANCE:
            shards.add(each.shard)
            yield each


def _waiting(server: Server, client: redis.Redis, shards: list[int]) -> Iterator[_Opened]:
    """Yield the open batch of each shard and the oldest sealed ones."""
    keyspace, oldest = server.keyspace, BATCHES_PER_PASS - 1
    lists = _replies(client, [("LRANGE", keyspace.sealed(shard), 0, oldest) for shard in shards])
    keys = [(shard, keyspace.open(shard)) for shard in shards]
    for shard, names in zip(shards, lists, strict=True):
        keys += [(shard, keyspace.batch(shard, name.decode())) for name in names or ()]
    heads = _replies(client, [("HMGET", key, "#i", "#s", "#o") for _shard, key in keys])
    for (shard, _key), head in zip(keys, heads, strict=True):
        incarnation, seq, at = head or (None, None, None)
        # What is no batch the drain puts in quarantine, which holds the watermark.
        if incarnation and seq and at and at.isdigit():
            yield _Opened(shard, f"{incarnation.decode(errors='replace')}:{seq.decode(errors='replace')}", int(at))


def _replies(client: redis.Redis, commands: list[tuple[Any, ...]]) -> list[Any]:
    """Return the answers to some commands in one round trip; None to one that the server refused."""
    with client.pipeline(transaction=False) as pipeline:
        queue: Any = pipeline.execute_command
        for command in commands:
            queue(*command)
        answers = pipeline.execute(raise_on_error=False)
    return [None if isinstance(answer, Exception) else answer for answer in answers]


def _is_known(using: str, each: _Opened) -> bool:
    """Return whether the ledger has a batch, or set it aside: a server that was put back may list it once more."""
    incarnation, _colon, seq = each.name.rpartition(":")
    if not seq.isdigit() or QuarantinedBatch.objects.using(using).filter(shard=each.shard, name=each.name).exists():
        return True
    mine = {"shard": each.shard, "incarnation": incarnation}
    held = Batch.objects.using(using).filter(**mine, first_seq__lte=int(seq), seq__gte=int(seq))
    moved = ArchivedRange.objects.using(using).filter(**mine, first_seq__lte=int(seq), last_seq__gte=int(seq))
    return held.exists() or moved.exists()
