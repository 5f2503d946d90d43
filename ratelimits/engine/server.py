"""The server and the keys that the settings name: where decisions are made unless somebody says otherwise."""

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

#: Seconds that a process leaves a cluster alone of which no node answered.
PAUSE = 1.0
_not_before = 0.0
#: What is behind the namespace's name while a test runs.
_isolated = ""


@dataclass(frozen=True, slots=True)
class Server:
    """A way to a server, and how its keys are named."""

    wire: Wire
    keyspace: Keyspace


@cache
def current_server() -> Server:
    """The server of RATELIMITS["CACHE_ALIAS"], in RATELIMITS["NAMESPACE"]; made anew after a change of settings.

    Raises NotReached when it is a cluster of which no node answers.
    """
    return Server(_way(), Keyspace(_namespace(), conf.SHARDS))


@cache
def _way() -> Wire:
    return _wire(conf.CACHE_ALIAS, conf.TIMEOUT)


def _namespace() -> str:
    """Return the namespace of the settings; a test, and a worker among parallel ones, has one of its own."""
    runner: Any = sys.modules.get("django.test.runner")
    worker = os.environ.get("PYTEST_XDIST_WORKER") or str(getattr(runner, "_worker_id", 0) or "")
    own = _isolated or (f".{worker}" if worker else "")
    return f"{conf.NAMESPACE[: LONGEST_NAMESPACE - len(own)]}{own}" if own else conf.NAMESPACE


def isolate(suffix: str) -> None:
    """Keep to the keys of a namespace of one's own from here on, named by this suffix; "": to the usual one.

    Of the one that is left, what would never expire is deleted.
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
        # A cluster's client asks for the nodes as it is made; not every request is to wait for that.
        _not_before = time.monotonic() + PAUSE
        raise NotReached(str(error)) from error
    if not isinstance(source, RedisCluster):
        return Wire(alias, timeout)
    return ClusterWire(source, timeout)


def on_each(server: Server, shards: Sequence[int], do: Callable[[redis.Redis, list[int]], None]) -> None:
    """Do something on each server that has some of these shards; one that fails keeps it from no other.

    Raises the first error when all were asked.
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
        current_server.cache_clear()  # a parallel worker's is named after it


os.register_at_fork(after_in_child=_begin)
setting_changed.connect(_forget)
