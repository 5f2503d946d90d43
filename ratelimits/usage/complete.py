"""Tell people until when the ledger is complete, and how many batches wait in Redis."""

from __future__ import annotations

import redis
from django.db.models import Min
from redis.exceptions import RedisError

from ratelimits.conf import conf
from ratelimits.engine import Unavailable
from ratelimits.engine.keys import account_shard
from ratelimits.engine.server import current_server, on_each
from ratelimits.engine.transport.refused import cause
from ratelimits.models.ledger import ShardState, when


def complete_until(using: str, account: str = "") -> int | None:
    """Return the moment (µs since 1970 UTC) until which the ledger is complete; None if a shard was never drained.

    If `account` is not "", look only at the shard of this account.
    """
    shards = ShardState.objects.using(using)
    if account:
        shards = shards.filter(shard=account_shard(account, conf.SHARDS))
    oldest: int | None = shards.aggregate(oldest=Min("watermark"))["oldest"]
    return oldest or None


def completeness(using: str) -> str:
    """Return a sentence that says until when the ledger is complete, and how many batches wait in Redis."""
    shards = range(conf.SHARDS)
    drained = ShardState.objects.using(using).filter(shard__in=shards, watermark__gt=0)
    watermarks = list(drained.values_list("watermark", flat=True))
    if len(watermarks) == len(shards):
        until = f"Usage is complete until {when(min(watermarks))};"
    elif watermarks:
        missing = len(shards) - len(watermarks)
        until = f"Usage is not complete yet, since nothing was drained yet from {missing} of {len(shards)} shards;"
    else:
        until = (
            "No usage was drained to the ledger yet (a Celery worker with beat drains it every"
            f" {conf.SEAL_INTERVAL:g} seconds; to drain it now, run ratelimits_seal and then ratelimits_drain);"
        )
    return f"{until} {_waiting_batches()}."


def _waiting_batches() -> str:
    try:
        sealed, unsealed = _count_batches()
    except (RedisError, Unavailable, OSError) as error:
        return f"the number of batches in Redis is unknown, since {cause(error)}"
    return f"{_batches(sealed, 'sealed')} and {_batches(unsealed, 'open')} wait in Redis"


def _batches(count: int, kind: str) -> str:
    return f"{count} {kind} {'batch' if count == 1 else 'batches'}"


def _count_batches() -> tuple[int, int]:
    """Return how many sealed batches and how many open batches are in Redis."""
    server, sealed, unsealed = current_server(), 0, 0

    def count_on_server(client: redis.Redis, shards: list[int]) -> None:
        nonlocal sealed, unsealed
        with client.pipeline(transaction=False) as pipeline:
            for shard in shards:
                pipeline.llen(server.keyspace.sealed(shard))
                pipeline.exists(server.keyspace.open(shard))
            replies = pipeline.execute()
        # The replies to LLEN and to EXISTS alternate.
        sealed += sum(replies[::2])
        unsealed += sum(replies[1::2])

    on_each(server, range(server.keyspace.shards), count_on_server)
    return sealed, unsealed
