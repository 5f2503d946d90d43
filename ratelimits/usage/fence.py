"""The fence: wait until Redis cannot lose the batches that were read, before they reach the ledger.

If a batch were drained and then lost, its usage could be counted again under the same identity with different contents.
So before any SQL, the drain waits until everything it read has been fsynced to the append-only file of the same run.

With `appendfsync always` the server answers a write after the fsync of the file up to it. So the fence writes a key: a
write from just before `always` was set would otherwise wait for the next write (Redis 6.2).

With `everysec` an acknowledged write may not even be in the file: while an fsync is running, the server keeps writes in
memory for up to two seconds. So the fence watches INFO, which says whether an fsync is running. Once none is running,
the server writes what it kept, and starts an fsync of all of it within a second. WAITAOF would be simpler, but it
returns up to a second too early in Redis 7.4 and in Valkey (redis/redis#13793).

INFO does not show one fsync: since Redis 7 a rewrite starts with a new file, and the old file is fsynced while it is
closed. If nothing else is written then, no other fsync follows. So the fence writes a key, whose fsync waits in the
same queue after the closing.
"""

from __future__ import annotations

import time
from typing import Any

import redis
from redis.exceptions import ResponseError

from ratelimits.conf import conf
from ratelimits.engine.server import Server
from ratelimits.engine.transport.connection import run_named

#: Maximum wait for an fsync, in seconds: everysec takes up to two if the disk is busy.
MAX_WAIT = 10.0
#: Once no fsync was seen running, the server starts one for everything written so far within this many seconds.
_REST = 1.3
#: Seconds between two looks at INFO.
_POLL = 0.1
#: How long the fence's key is kept after the last drain, in ms. It exists already when the server runs out of memory
#: and refuses new keys, except after a longer pause of draining.
_KEY_TTL = 30 * 86_400_000


class NotFencedError(RuntimeError):
    """Raised if the server could still lose what was read; the message says what to do."""


def fence(server: Server, run: str, max_wait: float = MAX_WAIT, shard: int = 0) -> str:
    """Wait until everything that the server of a shard has done so far is on its disk; return its fsync policy.

    Returns its fsync policy ("none" without a fence). `run` is the server's run as it was when the batches were read.
    Writes the key `here.keyspace.fence(shard)`. Raises NotFencedError, and redis.exceptions.RedisError when the server
    is away.
    """
    client = server.wire.client_of(server.keyspace, shard)
    if conf.FENCE == "none":
        _check_run(client.info(), run)
        return "none"
    deadline = time.monotonic() + max_wait
    with redis.Redis(connection_pool=client.connection_pool, single_connection_client=True) as connection:
        _check_server(connection, run)
        policy, suspends = _policy(connection)
        if policy == "no":
            raise NotFencedError(
                "appendfsync is 'no': set it to everysec or always, or declare RATELIMITS['FENCE'] = 'none'"
            )
        key = server.keyspace.fence(shard)
        if policy == "always":
            _write_key(connection, key)
        else:
            if policy != "everysec" or suspends:
                raise NotFencedError(
                    "the server must answer CONFIG GET appendfsync with everysec or always, and"
                    " no-appendfsync-on-rewrite with no"
                )
            _wait_for_fsync(connection, run, key, deadline)
        _check_server(connection, run)
    return policy


def _check_run(info: dict[str, Any], run: str) -> None:
    if run_named(info) != run:
        raise NotFencedError("the server was restarted or replaced since the batches were read: drain again")


def _check_server(connection: redis.Redis, run: str) -> dict[str, Any]:
    info: dict[str, Any] = connection.info()
    _check_run(info, run)
    if not info.get("aof_enabled"):
        raise NotFencedError(
            "the server keeps no append-only file: set appendonly yes, or declare RATELIMITS['FENCE'] = 'none'"
        )
    if info.get("aof_last_write_status") != "ok":
        raise NotFencedError("the server could not write its append-only file: look at its log and its disk")
    return info


def _policy(connection: redis.Redis) -> tuple[str, bool]:
    """Return the fsync policy ("unknown" if the server does not say) and whether a rewrite of the file suspends it."""
    try:
        answer = connection.config_get("appendfsync", "no-appendfsync-on-rewrite")
    except ResponseError:
        # Older servers take only one parameter at a time, and hosted ones refuse the command.
        try:
            answer = {**connection.config_get("appendfsync"), **connection.config_get("no-appendfsync-on-rewrite")}
        except ResponseError:
            return "unknown", False
    config = {_text(name): _text(value) for name, value in answer.items()}
    return config.get("appendfsync", "unknown"), config.get("no-appendfsync-on-rewrite") == "yes"


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _wait_for_fsync(connection: redis.Redis, run: str, key: str, deadline: float) -> None:
    """Wait until an fsync that started after this call has ended, even if much is written meanwhile.

    A look at INFO that finds no fsync running rules out one that started too early. Within `_REST` seconds after it the
    server starts an fsync, since the key was written, and that fsync covers everything written before, the server's
    buffer included. Each look is also a turn of the server's event loop, at whose end it starts an fsync that is due.
    After `_REST` seconds the first look only makes sure that the loop has turned. The next look that finds no fsync
    running proves that this fsync has ended. If a rewrite starts meanwhile, the key may be in the file that it closes,
    so everything starts again.
    """
    idle_since, turned, key_written, rewrites = None, False, False, None
    while True:
        looked_at = time.monotonic()
        info = _check_server(connection, run)
        idle = not info.get("aof_pending_bio_fsync") and not _may_close_unseen(info)
        if not key_written or info.get("aof_rewrites") != rewrites:
            idle_since, turned, key_written, rewrites = None, False, True, info.get("aof_rewrites")
            _write_key(connection, key)
        elif idle_since is None:
            idle_since = time.monotonic() if idle else None
        elif looked_at - idle_since > _REST:
            if turned and idle:
                return
            turned = True
        if looked_at > deadline:
            raise NotFencedError("the server did not fsync in time: its disk may be overloaded")
        time.sleep(_POLL)


def _may_close_unseen(info: dict[str, Any]) -> bool:
    """Return whether a file may be closed outside the queue of fsyncs: Redis 7.0 does that during a rewrite.

    After the rewrite that file is not needed any more.
    """
    return bool(info.get("aof_rewrite_in_progress")) and str(info.get("redis_version")).startswith("7.0.")


def _write_key(connection: redis.Redis, key: str) -> None:
    # A server that is out of memory accepts PEXPIRE, but refuses SET.
    if not connection.pexpire(key, _KEY_TTL):
        connection.set(key, "1", px=_KEY_TTL)
