"""System checks of the worker and the shards. With wrong settings, usage does not reach the ledger."""

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
from ratelimits.doctor.findings import Part, batches_wait, counts_usage, needed
from ratelimits.embedded import ServerStartError
from ratelimits.engine import Unavailable
from ratelimits.engine.server import Server, current_server
from ratelimits.moments import moment
from ratelimits.usage.models import PeriodUsage, ShardState

#: If no watermark has advanced for this number of intervals (SEAL_INTERVAL), the check warns that no worker runs.
_MAX_INTERVALS = 10


@checks.register("ratelimits", checks.Tags.database)
def check_usage(
    app_configs: Sequence[AppConfig] | None, databases: Sequence[str] | None = None, **kwargs: Any
) -> list[checks.CheckMessage]:
    """Warn if usage does not reach the ledger. Do nothing without `--database`."""
    try:
        if not databases or conf.DATABASE not in databases:
            return []
        found: list[checks.CheckMessage] = []
        server = current_server()
        # While the server is away, no worker can do anything: then the worker is not what is wrong.
        server.wire.client_of(server.keyspace, 0).exists(server.keyspace.sealed(0))
        if counts_usage(server):
            found += _check_worker(server)
        found += _check_shards()
        return found
    except (DatabaseError, RedisError, Unavailable, ServerStartError, OSError, ImproperlyConfigured):
        return []  # The tables do not exist yet, a server is down, or another check reports the settings.


def _check_worker(server: Server) -> Iterator[checks.CheckMessage]:
    states = ShardState.objects.using(conf.DATABASE).filter(shard__lt=conf.SHARDS)
    ahead = states.filter(ahead__gt=0).order_by("-ahead").values_list("ahead", flat=True).first()
    if ahead:
        # `ahead` is in microseconds, like the watermark below.
        yield checks.Warning(
            f"The Redis server's clock is {ahead // 1_000_000:,} seconds ahead of the worker's clock: no billing"
            " period is closed, and perhaps usage is counted at wrong times.",
            hint="Correct the wrong clock (NTP): sealing and draining then continue by themselves.",
            id="ratelimits.W033",
        )
        return
    # The watermark of a frozen shard stands still until a person resolves a quarantined batch.
    not_frozen = states.filter(frozen=False)
    newest = not_frozen.order_by("-watermark").values_list("watermark", flat=True).first()
    if newest and time() - newest / 1_000_000 <= _MAX_INTERVALS * conf.SEAL_INTERVAL:
        return
    since = f"since {moment(newest):%Y-%m-%d %H:%M} UTC" if newest else "yet"
    if batches_wait(server):
        what = f"Usage waits in Redis: none was sealed and drained {since}."
    elif Part.BILLS in needed():
        what = (
            f"A rule bills, or its counts are restored from the ledger. But no usage was sealed and drained {since}:"
            " what is counted will wait in Redis."
        )
    else:
        return
    yield checks.Warning(
        what,
        hint="Run a Celery worker with beat for the tasks ratelimits.usage.tasks.seal and drain, or run the commands"
        " ratelimits_seal and ratelimits_drain every minute.",
        id="ratelimits.W032",
    )


def _check_shards() -> Iterator[checks.CheckMessage]:
    """Warn of usage in shards whose id is SHARDS or above. No task seals it, drains it or closes its periods."""
    open_usage = PeriodUsage.objects.using(conf.DATABASE).filter(covered=None, shard__gte=conf.SHARDS)
    accounts = open_usage.order_by().values("account").distinct().count()
    shards = _count_shards_in_redis()
    if accounts or shards:
        yield checks.Warning(
            f"RATELIMITS['SHARDS'] is {conf.SHARDS} but was larger. In shard {conf.SHARDS} and above, {accounts}"
            f" accounts have open billing periods that no task closes any more, and {shards} shards have usage in Redis"
            " that no task drains any more.",
            hint="Set SHARDS back to the larger number until these periods are closed, or close them by force"
            " (`ratelimits_finalise --open` lists the periods that are over).",
            id="ratelimits.W034",
        )


def _count_shards_in_redis() -> int:
    """Return how many shards with an id of SHARDS or above have batches in Redis. `ShardState` has the ids."""
    server = current_server()
    shards = ShardState.objects.using(conf.DATABASE).filter(shard__gte=conf.SHARDS).values_list("shard", flat=True)
    keys, wire = server.keyspace, server.wire
    return sum(bool(wire.client_of(keys, shard).exists(keys.open(shard), keys.sealed(shard))) for shard in shards)
