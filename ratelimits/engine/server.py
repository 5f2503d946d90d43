"""The server and the namespace of the settings, where decisions are made by default."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import redis
from django.core.signals import setting_changed
from redis.cluster import RedisCluster
from redis.exceptions import RedisClusterException, RedisError

from ratelimits.conf import conf
from ratelimits.engine.cluster.wire import ClusterWire
from ratelimits.engine.keys import LONGEST_NAMESPACE, Keyspace
from ratelimits.engine.transport.connection import NotReached
from ratelimits.engine.transport.wire import Wire, configured

#: Seconds for which a process does not try a cluster again after no node has answered.
PAUSE = 1.0
_not_before = 0.0
#: Suffix of the namespace while a test runs.
_isolated = ""


@dataclass(frozen=True, slots=True)
class Server:
    """The connections to a server, and the names of its keys."""

    wire: Wire
    keyspace: Keyspace


@cache
def current_server() -> Server:
    """Return the server of RATELIMITS["CACHE_ALIAS"] and RATELIMITS["NAMESPACE"]. Cached until the settings change.

    Raise NotReached if it is a cluster and no node answers.
    """
    return Server(_way(), Keyspace(_namespace(), conf.SHARDS))


@cache
def _way() -> Wire:
    return _wire(conf.CACHE_ALIAS, conf.TIMEOUT)


def _namespace() -> str:
    """Return the namespace of the settings, with a suffix in an isolated test or a parallel test worker."""
    runner: Any = sys.modules.get("django.test.runner")
    worker = os.environ.get("PYTEST_XDIST_WORKER") or str(getattr(runner, "_worker_id", 0) or "")
    own = _isolated or (f".{worker}" if worker else "")
    return f"{conf.NAMESPACE[: LONGEST_NAMESPACE - len(own)]}{own}" if own else conf.NAMESPACE


def isolate(suffix: str) -> None:
    """Use a namespace with this suffix from now on; "" for the usual namespace.

    Delete the keys of the namespace before, if it had a suffix, that would never expire.
    """
    global _isolated
    left = current_server() if _isolated and current_server.cache_info().currsize else None
    _isolated = suffix
    current_server.cache_clear()
    if left is None:
        return
    keys = left.keyspace

    def clear(client: redis.Redis, shards: list[int]) -> None:
        with client.pipeline(transaction=False) as pipeline:
            for shard in shards:
                pipeline.unlink(*(name(shard) for name in (keys.head, keys.open, keys.meta, keys.sealed, keys.fence)))
            pipeline.execute()

    with contextlib.suppress(RedisError, RedisClusterException, OSError):
        on_each(left, range(keys.shards), clear)


def _wire(alias: str, timeout: float) -> Wire:
    global _not_before
    if time.monotonic() < _not_before:
        raise NotReached("no node of the cluster answered just now")
    try:
        source: Any = configured(alias)
    except (RedisError, RedisClusterException) as error:
        # A cluster's client looks for the nodes when it is created. Requests should not each wait for that.
        _not_before = time.monotonic() + PAUSE
        raise NotReached(str(error)) from error
    if not isinstance(source, RedisCluster):
        return Wire(alias, timeout)
    return ClusterWire(source, timeout)


def on_each(server: Server, shards: Sequence[int], do: Callable[[redis.Redis, list[int]], None]) -> None:
    """Call `do` for each server that has some of these shards, even if it fails for another one.

    Raise the first error at the end.
    """
    failure: Exception | None = None
    for client, those in server.wire.servers(server.keyspace, shards):
        try:
            do(client, those)
        except Exception as error:  # noqa: BLE001  (raised below)
            failure = failure or error
    if failure is not None:
        raise failure


def _forget(*, setting: str, **kwargs: object) -> None:
    global _not_before
    if setting in ("RATELIMITS", "CACHES"):
        current_server.cache_clear()
        _way.cache_clear()
        _not_before = 0.0


def _begin() -> None:
    if "django.test.runner" in sys.modules:
        current_server.cache_clear()  # a parallel worker has a namespace of its own


os.register_at_fork(after_in_child=_begin)
setting_changed.connect(_forget)
