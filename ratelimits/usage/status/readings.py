"""The metrics about Redis, gaps, and usage that is not yet in the ledger. They do not come from decisions."""

from __future__ import annotations

import time
from collections.abc import Iterable

from django.db import DatabaseError
from django.db.models import Count, Min, Sum
from redis.exceptions import RedisError

from ratelimits.conf import conf
from ratelimits.engine.keys import BIN_SECONDS
from ratelimits.logs import bounded
from ratelimits.status.redis_state import read_redis
from ratelimits.telemetry import Reading
from ratelimits.usage.models import DurabilityGap, GapKind, PeriodUsage, QuarantinedBatch, ShardState
from ratelimits.usage.models.gaps import ProcessTotal

logger = bounded(__name__)

#: Number of bins whose unmetered and unanswered requests are added up: one day.
_BINS = 96


def read() -> Iterable[Reading]:
    """Return all numbers, except those of a server or database that does not answer."""
    found = _redis()
    try:
        found += _ledger()
    except (DatabaseError, RedisError) as error:
        logger.warning("The state of the ledger cannot be read: %s", error)
    return found


def _redis() -> list[Reading]:
    redis = read_redis()
    found = [Reading("redis_up", "1 if every Redis server answers, otherwise 0", float(redis.answers))]
    if redis.servers:
        sealed = sum(server.sealed for server in redis.servers)
        found.append(Reading("backlog_batches", "Sealed batches of usage that wait in Redis for the ledger", sealed))
        memories = [
            (server.said.memory, server.said.max_memory) for server in redis.servers if server.said.memory is not None
        ]
        if len(memories) == len(redis.servers):
            total, share = (
                sum(used for used, _most in memories),
                max(used / most if most else 0 for used, most in memories),
            )
            found += [
                Reading("redis_memory_bytes", "Memory used by the Redis servers", total),
                Reading("redis_memory_share", "Share of maxmemory that the fullest Redis server uses", share),
            ]
    return found


def _ledger() -> list[Reading]:
    using = conf.DATABASE
    shards = ShardState.objects.using(using).filter(shard__lt=conf.SHARDS)
    totals = shards.aggregate(Count("pk"), Min("watermark"))
    found = []
    if totals["pk__count"] >= conf.SHARDS and totals["watermark__min"]:
        age = max(time.time() - totals["watermark__min"] / 1_000_000, 0)
        found.append(Reading("watermark_age_seconds", "Age of the moment until which the ledger is complete", age))
    quarantined = QuarantinedBatch.objects.using(using).filter(resolved_at=None).count()
    meaning = "Batches that cannot be written to the ledger, and wait for a person's decision"
    found.append(Reading("quarantined_batches", meaning, quarantined))
    meaning = "Totals of usage that reached the largest number, 2^63 - 1: their periods are never closed"
    found.append(Reading("full_totals", meaning, PeriodUsage.full(using).count()))
    gaps = dict(
        DurabilityGap.objects.using(using)
        .filter(recovered_at=None, acknowledged_at=None, harmless=False)
        .exclude(kind=GapKind.FENCE)
        .order_by()
        .values_list("kind")
        .annotate(Count("pk"))
    )
    found += [
        Reading(
            "gaps",
            "Gaps that are not recovered, acknowledged or harmless: spans for which usage is perhaps missing",
            gaps.get(kind, 0),
            (("kind", kind),),
        )
        for kind in sorted({*gaps, "restart"})  # Always name one kind, so that the metric exists without gaps too.
    ]
    since = (int(time.time()) // BIN_SECONDS - _BINS) * BIN_SECONDS
    requests_by_kind = dict(
        ProcessTotal.objects.using(using)
        .filter(kind__in=("unmetered", "unanswered"), bin__gte=since)
        .order_by()
        .values_list("kind")
        .annotate(Sum("requests"))
    )
    found += [
        Reading(f"{kind}_requests_day", meaning, requests_by_kind.get(kind, 0))
        for kind, meaning in (
            ("unmetered", "Requests of the last day that a failure policy let pass without counting them"),
            ("unanswered", "Requests of the last day of which it is not known whether they were counted"),
        )
    ]
    return found
