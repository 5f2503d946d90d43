"""The fence: a batch that Redis could still forget must not reach the ledger.

A batch that was drained and then forgotten would be counted again under the same identity, with other contents. So
before any SQL the drain waits until everything it read has been fsynced to the append-only file of the same run.

Under `appendfsync always` a write is answered after the fsync of the file up to it, so the fence writes a key of its
own. Without that, what was written just before `always` was set would wait for the next write (Redis 6.2).

Under `everysec` an acknowledged write need not even be in the file: while an fsync is in progress, the server keeps it
in memory, for up to two seconds. So the server is watched: once no fsync is in progress it writes what it kept, and
starts an fsync of all of it within a second; INFO says whether one is in progress. WAITAOF would be shorter, but
releases its callers early in Redis 7.4 and in Valkey (redis/redis#13793): up to a second too soon.

One fsync INFO is silent about: since Redis 7 the beginning of a rewrite opens a new file, and the old one is fsynced as
it is closed. Nothing else may be written then, so no other fsync follows. So the fence writes something of its own: its
fsync waits in the same queue, behind the closing.
"""

from __future__ import annotations

import time
from typing import Any

import redis
from redis.exceptions import ResponseError

from ratelimits.conf import conf
from ratelimits.engine.server import Server
from ratelimits.engine.transport.connection import run_named

#: Longest wait for an fsync, in seconds: everysec takes up to two when the disk is busy.
PATIENCE = 10.0
#: So many seconds after it was seen at rest the server has started an fsync of all that it had written then.
_REST = 1.3
_POLL = 0.1
#: How long the fence's own key is kept after the last drain, in ms: a drain that was away that long may come back to a
#: server without memory, which refuses a new key.
_KEPT = 30 * 86_400_000


class NotFencedError(RuntimeError):
    """What was read may still be forgotten by the server; the message says what to do."""


def fence(server: Server, run: str, patience: float = PATIENCE, shard: int = 0) -> str:
    """Wait until all that the server of a shard did so far is on its disk.

    Returns its fsync policy ("none" without a fence). `run` is the server's run as it was when the batches were read.
    Writes the key `here.keyspace.fence(shard)`. Raises NotFencedError, and redis.exceptions.RedisError when the server
    is away.
    """
    client = server.wire.client_of(server.keyspace, shard)
    if conf.FENCE == "none":
        _same(client.info(), run)
        return "none"
    deadline = time.monotonic() + patience
    with redis.Redis(connection_pool=client.connection_pool, single_connection_client=True) as connection:
        _sound(connection, run)
        policy, suspends = _policy(connection)
        if policy == "no":
            raise NotFencedError(
                "appendfsync is 'no': set it to everysec or always, or declare RATELIMITS['FENCE'] = 'none'"
            )
        key = server.keyspace.fence(shard)
        if policy == "always":
            _mark(connection, key)
        else:
            if policy != "everysec" or suspends:
                raise NotFencedError(
                    "the server must answer CONFIG GET appendfsync with everysec or always, and"
                    " no-appendfsync-on-rewrite with no"
                )
            _rest(connection, run, key, deadline)
        _sound(connection, run)
    return policy


def _same(info: dict[str, Any], run: str) -> None:
    if run_named(info) != run:
        raise NotFencedError("the server was restarted or replaced since the batches were read: draining starts anew")


def _sound(connection: redis.Redis, run: str) -> dict[str, Any]:
    info: dict[str, Any] = connection.info()
    _same(info, run)
    if not info.get("aof_enabled"):
        raise NotFencedError(
            "the server keeps no append-only file: set appendonly yes, or declare RATELIMITS['FENCE'] = 'none'"
        )
    if info.get("aof_last_write_status") != "ok":
        raise NotFencedError("the server could not write its append-only file: look at its log and its disk")
    return info


def _policy(connection: redis.Redis) -> tuple[str, bool]:
    """The fsync policy, "unknown" where the server does not tell, and whether rewriting the file suspends it."""
    try:
        answer = connection.config_get("appendfsync", "no-appendfsync-on-rewrite")
    except ResponseError:
        # Several parameters at once are for newer servers, and hosted ones refuse all.
        try:
            answer = {**connection.config_get("appendfsync"), **connection.config_get("no-appendfsync-on-rewrite")}
        except ResponseError:
            return "unknown", False
    found = {_text(name): _text(value) for name, value in answer.items()}
    return found.get("appendfsync", "unknown"), found.get("no-appendfsync-on-rewrite") == "yes"


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _rest(connection: redis.Redis, run: str, key: str, deadline: float) -> None:
    """Wait until an fsync that began after the first look has ended, however much is written meanwhile.

    At a look that finds no fsync in progress, none is under way that might have begun too early. Within `_REST` from
    there the server begins one, since the key was written, and it begins one only behind all that it has written, its
    buffer included. Each look is a turn of its loop, at whose end an fsync that is due is begun. So of the looks behind
    that time, whichever but the first finds none in progress sees that one ended. A rewrite that begins meanwhile takes
    the key along to be closed, so all of it starts anew.
    """
    since, turned, marked, rewrites = None, False, False, None
    while True:
        asked = time.monotonic()
        info = _sound(connection, run)
        idle = not info.get("aof_pending_bio_fsync") and not _closes_apart(info)
        if not marked or info.get("aof_rewrites") != rewrites:
            since, turned, marked, rewrites = None, False, True, info.get("aof_rewrites")
            _mark(connection, key)
        elif since is None:
            since = time.monotonic() if idle else None
        elif asked - since > _REST:
            if turned and idle:
                return
            turned = True
        if asked > deadline:
            raise NotFencedError("the server did not fsync in time: its disk may be overloaded")
        time.sleep(_POLL)


def _closes_apart(info: dict[str, Any]) -> bool:
    """Whether a file may be closed past the queue of fsyncs: Redis 7.0 does; behind the rewrite nobody needs it."""
    return bool(info.get("aof_rewrite_in_progress")) and str(info.get("redis_version")).startswith("7.0.")


def _mark(connection: redis.Redis, key: str) -> None:
    # A server that is out of memory takes this, and refuses SET.
    if not connection.pexpire(key, _KEPT):
        connection.set(key, "1", px=_KEPT)
