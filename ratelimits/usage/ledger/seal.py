"""Sealing: end the open batches of all shards. A sealed batch does not change any more and can be drained."""

from __future__ import annotations

import logging
import secrets
from contextlib import nullcontext
from dataclasses import dataclass
from time import time_ns
from typing import Any

import redis
from django.db import DatabaseError, transaction
from redis.exceptions import ResponseError

from ratelimits.conf import conf
from ratelimits.engine.assemble import scripts
from ratelimits.engine.server import current_server, on_each
from ratelimits.moments import moment
from ratelimits.usage.ledger import crash, gaps
from ratelimits.usage.models.gaps import GapKind
from ratelimits.usage.models.ledger import ShardState

logger = logging.getLogger(__name__)

#: Minimum time to live of the key by which a jump of the server's clock is noticed, in seconds.
_CLOCK_SECONDS = 600
#: How many shards are sealed in one round trip. The server needs a few ms to seal a full batch, and the replies for all
#: these shards must come within RATELIMITS["TIMEOUT"].
_SHARDS_PER_TRIP = 8


@dataclass(frozen=True, slots=True)
class SealResult:
    """The result of sealing one shard."""

    shard: int
    #: The moment of the call by the server's clock (µs since 1970 UTC).
    sealed_at: int
    #: The server's run: the time from its last start until its next restart.
    run: str
    #: The name of the batch that was sealed; "" if no batch was open.
    batch: str
    #: How many sealed batches of the shard wait to be drained.
    waiting: int
    #: The moment of the first seal after the server last lost its data (µs since 1970 UTC); 0 if it is not known.
    first_sealed: int


def seal() -> list[SealResult]:
    """Seal the open batch of every shard, and return a result for each shard.

    Sealing twice, or in several processes at once, is harmless. A server whose memory is full seals too. Raise
    redis.exceptions.RedisError if a server does not answer. Raise it also if a server answers with an error for one
    shard, after all other shards were sealed.
    """
    server, script = current_server(), scripts.read("memory/full", "run", "batch", "seal").text.decode()
    crash.reached("seal:before")
    clock_ttl = str(round(max(_CLOCK_SECONDS, conf.SEAL_INTERVAL * 10) * 1000))
    replies: dict[int, Any] = {}

    def seal_on_server(client: redis.Redis, shards: list[int]) -> None:
        for first in range(0, len(shards), _SHARDS_PER_TRIP):
            together, clock = shards[first : first + _SHARDS_PER_TRIP], str(time_ns() // 1000)
            with client.pipeline(transaction=False) as pipeline:
                for shard in together:
                    new_incarnation = secrets.token_hex(12)  # the name of a new incarnation, if the script begins one
                    server_time = ""  # let the script ask the server for its time
                    number_of_keys, meta = 1, server.keyspace.meta(shard)
                    pipeline.eval(script, number_of_keys, meta, new_incarnation, server_time, clock, clock_ttl)
                answers = dict(zip(together, pipeline.execute(raise_on_error=False), strict=True))
            for shard, answer in answers.items():
                if not isinstance(answer, ResponseError) and answer[4] != b"0":
                    _declare_jump(client, server.keyspace.meta(shard), shard, int(answer[4]), int(answer[0]))
            replies.update(answers)

    on_each(server, range(server.keyspace.shards), seal_on_server)
    for reply in replies.values():
        # A server can answer for one shard with an error, for example while the shard's slot moves to another node.
        if isinstance(reply, ResponseError):
            raise reply
    crash.reached("seal:after")
    if evicted := sum(reply[6] for reply in replies.values()):
        logger.error(
            "The server evicted keys of %d shards since the last seal: it has perhaps forgotten counts of limits, and"
            " can lose usage. Set maxmemory-policy noeviction",
            evicted,
        )
    results = [
        SealResult(shard, int(sealed_at), run.decode(), batch.decode(), int(waiting), int(first_sealed))
        for shard, (sealed_at, run, batch, waiting, _jumped, first_sealed, _evicted) in sorted(replies.items())
    ]
    _note_first_seals(results)
    return results


def _note_first_seals(results: list[SealResult]) -> None:
    """Note in the database in which run, and when, each shard was first sealed. So a loss before the first drain shows.

    Only seals before the first drain write. If the database does not answer, the next seal tries again.
    """
    using = conf.DATABASE
    rows = ShardState.objects.using(using).filter(shard__in=[result.shard for result in results])
    try:
        noted = set(rows.exclude(watermark=0, first_sealed=0).values_list("shard", flat=True))
        new = [result for result in results if result.shard not in noted and result.first_sealed]
        states = [ShardState(shard=each.shard, run=each.run, first_sealed=each.first_sealed) for each in new]
        with transaction.atomic(using=using) if new else nullcontext():
            ShardState.objects.using(using).bulk_create(states, ignore_conflicts=True)
            for each in new:
                rows.filter(shard=each.shard, watermark=0, first_sealed=0).update(first_sealed=each.first_sealed)
    except DatabaseError as error:
        logger.warning("The first seal could not be noted in the database; the next seal tries again: %s", error)


def _declare_jump(client: redis.Redis, meta: str, shard: int, since: int, until: int) -> None:
    """Declare that a server's clock was ahead for a moment, between `since` and `until` (µs since 1970 UTC).

    If the gap cannot be declared, the field `jumped` stays, and the next seal declares the gap.
    """
    detail = (
        "the server's clock jumped ahead: the server may have forgotten counts of limits, and usage may be counted at"
        " a later time than it happened"
    )
    event = f"{shard}:{since}:jumped"
    logger.error("The clock of shard %02d's server jumped ahead after %s", shard, moment(since))
    try:
        gaps.declare(conf.DATABASE, GapKind.CLOCK, event, shard=shard, since=since, until=until, detail=detail)
    except DatabaseError as error:
        logger.warning("The gap of this jump could not be declared; the next seal tries again: %s", error)
    else:
        client.hset(meta, "jumped", "0")
