"""System checks of what usage depends on until it is in the ledger: the server's settings, and a worker that drains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import time
from typing import Any

from django.apps import AppConfig
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError
from redis.exceptions import RedisError

from ratelimits.conf import conf
from ratelimits.engine import Unavailable
from ratelimits.engine.server import current_server
from ratelimits.models import PeriodUsage, Rule, ShardState
from ratelimits.models.ledger import moment

#: Intervals of sealing after which a watermark that stands still is a worker that does not run.
_INTERVALS = 10


@checks.register("ratelimits", checks.Tags.database)
def check_usage(
    app_configs: Sequence[AppConfig] | None, databases: Sequence[str] | None = None, **kwargs: Any
) -> list[checks.CheckMessage]:
    """Warn where metered usage may be lost, or never reaches the ledger; with `--database` only."""
    try:
        if not databases or conf.DATABASE not in databases or not _is_metered():
            return []
        return [*_server(), *_worker(), *_shards()]
    except (DatabaseError, RedisError, Unavailable, OSError, ImproperlyConfigured):
        return []  # not migrated yet, a server away, or settings that another check names


def _is_metered() -> bool:
    return Rule.objects.using(conf.DATABASE).filter(bills=True).exists()


def _server() -> Iterator[checks.CheckMessage]:
    server = current_server()
    info: dict[str, Any] = server.wire.client_of(server.keyspace, 0).info()
    if conf.FENCE != "none" and not info.get("aof_enabled"):
        yield checks.Warning(
            "Rules bill, and the Redis server keeps no append-only file: no usage reaches the ledger.",
            hint="Set `appendonly yes` on the server (RATELIMITS['FENCE'] = 'none' is for development only).",
            id="ratelimits.W030",
        )
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        yield checks.Warning(
            f"Rules bill, and the Redis server's maxmemory-policy is {policy}: it may drop usage that is not drained.",
            hint="Set `maxmemory-policy noeviction`, on a server of its own if others need another policy.",
            id="ratelimits.W031",
        )


def _worker() -> Iterator[checks.CheckMessage]:
    states = ShardState.objects.using(conf.DATABASE).filter(shard__lt=conf.SHARDS)
    ahead = states.filter(ahead__gt=0).order_by("-ahead").values_list("ahead", flat=True).first()
    if ahead:
        yield checks.Warning(
            f"The Redis server's clock is {ahead // 1_000_000:,} seconds ahead of the worker's: usage may be counted at"
            " wrong times, and no billing period is closed.",
            hint="Put the wrong clock right (NTP): the next seal and drain go on by themselves.",
            id="ratelimits.W033",
        )
        return
    marks = states.filter(frozen=False)
    newest = marks.order_by("-watermark").values_list("watermark", flat=True).first()
    if newest and time() - newest / 1_000_000 <= _INTERVALS * conf.SEAL_INTERVAL:
        return
    since = f"since {moment(newest):%Y-%m-%d %H:%M} UTC" if newest else "yet"
    yield checks.Warning(
        f"Rules bill, and nothing was sealed and drained {since}: usage waits in Redis.",
        hint="Run a Celery worker with beat for the tasks ratelimits.tasks.seal and drain, or the commands"
        " ratelimits_seal and ratelimits_drain every minute.",
        id="ratelimits.W032",
    )


def _shards() -> Iterator[checks.CheckMessage]:
    """Usage in shards that SHARDS leaves out stays where it is: nothing seals, drains or closes it."""
    open_usage = PeriodUsage.objects.using(conf.DATABASE).filter(covered=None, shard__gte=conf.SHARDS)
    accounts = open_usage.order_by().values("account").distinct().count()
    batches = _left_in_redis()
    if accounts or batches:
        yield checks.Warning(
            f"RATELIMITS['SHARDS'] is {conf.SHARDS}, and was larger: {accounts} accounts have open billing periods, and"
            f" {batches} shards usage in Redis, that nothing drains or closes any more.",
            hint="Set SHARDS back until their periods are closed, or close them by force (`ratelimits_finalise --open`"
            " lists those that are over).",
            id="ratelimits.W034",
        )


def _left_in_redis() -> int:
    """How many shards beyond SHARDS, of those that the ledger knows, have batches in Redis, open or sealed."""
    server = current_server()
    beyond = ShardState.objects.using(conf.DATABASE).filter(shard__gte=conf.SHARDS).values_list("shard", flat=True)
    keys, wire = server.keyspace, server.wire
    return sum(bool(wire.client_of(keys, shard).exists(keys.open(shard), keys.sealed(shard))) for shard in beyond)
