"""Find the Redis server and the namespace that the settings name, and know whether to ask it now.

Decisions are made on this server. The namespace is a part of each Redis key. Projects that share a server have
different namespaces. A new version of the rules is published to every shard of this server. Each process uses it from
its next decision on.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import redis
from django.core.signals import setting_changed
from redis.cluster import RedisCluster
from redis.exceptions import RedisClusterException, RedisError, ResponseError

from ratelimits.conf import conf
from ratelimits.engine.assemble import scripts
from ratelimits.engine.cluster.wire import ClusterWire
from ratelimits.engine.keys import LONGEST_NAMESPACE, Keyspace
from ratelimits.engine.transport.breaker import Breaker, NodeUnavailable
from ratelimits.engine.transport.connection import Interrupted, NotReached, Unavailable
from ratelimits.engine.transport.wire import Wire, configured

#: The errors after which a failure policy decides: the server could not be asked, or did not do what it was asked.
UNDECIDED = (Unavailable, ResponseError)
#: If no node of a cluster answers, the process tries again after this number of seconds.
PAUSE = 1.0
#: Do not try the cluster again before this moment of the monotonic clock (seconds).
_not_before = 0.0
#: Suffix of the namespace while an isolated test runs; otherwise "".
_test_suffix = ""
#: Returns the suffix of the namespace outside isolated tests. `separate_by` replaces it.
_process_suffix: Callable[[], str] = str
#: Called before each decision, and before each use of the rules: notices that another test has begun or ended.
#: `ratelimits.testing` sets it. None outside of tests.
before_use: Callable[[], None] | None = None
#: One item for each version that this process has tried to publish. This is a list because appending needs no lock.
_published: list[None] = []


@dataclass(frozen=True, slots=True)
class Server:
    """The connections to a Redis server, and the names of the Redis keys."""

    wire: Wire
    keyspace: Keyspace


@cache
def current_server() -> Server:
    """Return the server of RATELIMITS["CACHE_ALIAS"] and RATELIMITS["NAMESPACE"].

    The result is cached until the settings change. Raise NotReached if the server is a cluster and none of its nodes
    answers.
    """
    wire = _current_wire()
    return Server(wire, Keyspace(_namespace(), conf.SHARDS, isinstance(wire, ClusterWire)))


@cache
def _current_wire() -> Wire:
    return _wire(conf.CACHE_ALIAS, conf.TIMEOUT)


def _probe() -> None:
    """Raise an error if the server is not back."""
    current_server().wire.probe()


#: Says whether this process should ask the server now.
breaker = Breaker(probe=_probe)


def note_failure(error: BaseException | None) -> None:
    """Note a failed call in the breaker.

    If one node of a cluster fails, other nodes may answer. If the caller was stopped, the server did not fail. So the
    breaker does not count these errors, and no errors that the server sent.
    """
    if isinstance(error, Unavailable) and not isinstance(error, (NodeUnavailable, Interrupted)):
        breaker.failed(error.event)


def _namespace() -> str:
    """Return the namespace of the settings. In an isolated test or a parallel test worker, add a suffix."""
    suffix = _test_suffix or _process_suffix()
    return f"{conf.NAMESPACE[: LONGEST_NAMESPACE - len(suffix)]}{suffix}" if suffix else conf.NAMESPACE


def separate_by(suffix: Callable[[], str]) -> None:
    """Add the suffix that this function returns to the namespace, except in isolated tests.

    `ratelimits.testing` calls this function: parallel workers of a test run share a server.
    """
    global _process_suffix
    _process_suffix = suffix
    _forget(setting="RATELIMITS")


def test_suffix() -> str:
    """Return the suffix of the namespace that `isolate` has set; "" if it has set none."""
    return _test_suffix


def isolate(suffix: str, *, delete: bool = True) -> None:
    """Use a namespace with this suffix from now on. With "", use the namespace of the settings.

    If the previous namespace had a suffix, delete its Redis keys without a time to live, except sealed batches. With
    `delete=False`, delete nothing, because the previous namespace will be used again.
    """
    global _test_suffix
    was_used = current_server.cache_info().currsize > 0
    previous = current_server() if delete and _test_suffix and was_used else None
    _test_suffix = suffix
    current_server.cache_clear()
    if previous is None:
        return
    keys = previous.keyspace

    def clear(client: redis.Redis, shards: list[int]) -> None:
        with client.pipeline(transaction=False) as pipeline:
            for shard in shards:
                names = (keys.head, keys.open, keys.meta, keys.sealed, keys.prefetched, keys.fence)
                pipeline.unlink(*(name(shard) for name in names))
            pipeline.execute()

    with contextlib.suppress(RedisError, RedisClusterException, OSError):
        on_each(previous, range(keys.shards), clear)


def _wire(alias: str, timeout: float) -> Wire:
    global _not_before
    if time.monotonic() < _not_before:
        raise NotReached("no node of the cluster answered just now")
    try:
        source: Any = configured(alias)
    except (RedisError, RedisClusterException) as error:
        # redis-py asks for the cluster's nodes when it creates a client. If they do not answer, this takes long. So do
        # not try it at every request.
        _not_before = time.monotonic() + PAUSE
        raise NotReached(str(error)) from error
    if not isinstance(source, RedisCluster):
        return Wire(alias, timeout)
    return ClusterWire(source, timeout)


def shards_can_move() -> bool:
    """Return whether shards can move from one server to another.

    They can move if the server is a cluster. Return True also if the cluster does not answer.
    """
    try:
        return isinstance(current_server().wire, ClusterWire)
    except NotReached:
        return True


def on_each(server: Server, shards: Sequence[int], do: Callable[[redis.Redis, list[int]], None]) -> None:
    """Call `do` once for each server, with a client of the server and those of the given shards that this server has.

    If a call fails, still call `do` for the other servers, and raise the first error at the end.
    """
    failure: Exception | None = None
    for client, shards_of_server in server.wire.servers(server.keyspace, shards):
        try:
            do(client, shards_of_server)
        except Exception as error:  # noqa: BLE001  (raised below)
            failure = failure or error
    if failure is not None:
        raise failure


def _forget(*, setting: str, **kwargs: object) -> None:
    global _not_before
    if setting in ("RATELIMITS", "CACHES"):
        current_server.cache_clear()
        _current_wire.cache_clear()
        _not_before = 0.0


setting_changed.connect(_forget)


def publications() -> int:
    """Return how many versions this process has tried to publish.

    A caller keeps the number and compares it later. If the number has changed, this process has edited the rules in the
    meantime. The process then reads the rules again, without asking Redis whether they have changed.
    """
    return len(_published)


def publish_version(version: int) -> int:
    """Raise the version of every shard to at least `version`. Return the highest version that is now in force.

    Raise redis.exceptions.RedisError if the server does not answer. The edit then takes effect when the processes read
    the rules again. They do this every RELOAD_INTERVAL seconds (a setting).
    """
    _published.append(None)
    server, script = current_server(), scripts.read("memory/full", "publish")
    in_force: list[int] = []

    def publish(client: redis.Redis, shards: list[int]) -> None:
        with client.pipeline(transaction=False) as pipeline:
            for shard in shards:
                number_of_keys = 1
                pipeline.eval(script.text.decode(), number_of_keys, server.keyspace.head(shard), str(version))
            in_force.extend(pipeline.execute())

    on_each(server, range(server.keyspace.shards), publish)
    return max(in_force)


def version_in_force() -> int:
    """Return the highest version of the rules that any shard has; 0 if no shard has one.

    Raise redis.exceptions.RedisError if the server does not answer.
    """
    server = current_server()
    heads: list[bytes | None] = []

    def read_heads(client: redis.Redis, shards: list[int]) -> None:
        with client.pipeline(transaction=False) as pipeline:
            for shard in shards:
                pipeline.get(server.keyspace.head(shard))
            heads.extend(pipeline.execute())

    on_each(server, range(server.keyspace.shards), read_heads)
    # A head is "<version of the rules> <run of the server>".
    return max(int(head.split()[0]) if head else 0 for head in heads)
