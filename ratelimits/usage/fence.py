"""The fence: before batches are written to the ledger, wait until Redis cannot lose them any more.

Suppose a batch is drained, and then Redis crashes and loses the batch. Redis could then use the batch's identity again,
for other usage. So before any SQL, the drain waits until the server has fsynced all batches that the drain has read. To
fsync is to write the append-only file to the disk.

With `appendfsync always`, the server answers a write only after its fsync. But some writes are perhaps older than the
setting `always`. Redis 6.2 fsyncs such writes only with the next write. So the fence writes a Redis key.

With `appendfsync everysec`, a write that was answered is perhaps not even in the file: while an fsync is running, the
server leaves writes in its memory for up to two seconds. So the fence reads INFO, which says whether an fsync is
running. Once no fsync is running, the server writes everything from its memory to the file, and starts an fsync of the
file within a second. WAITAOF would be simpler, but in Redis 7.4 and in Valkey it returns up to a second too early
(redis/redis#13793).

INFO does not show the fsync of a file that is being closed. Since Redis 7, a rewrite of the append-only file starts a
new file and closes the old file. The server closes and fsyncs files one after the other, in one queue. So the fence
writes a Redis key: the fsync of this write begins only after the old file is closed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import redis
from redis.exceptions import AskError, ResponseError

from ratelimits.conf import conf
from ratelimits.engine.assemble import scripts
from ratelimits.engine.server import Server
from ratelimits.engine.transport.connection import run_named

#: How long to wait for an fsync at most, in seconds. With `everysec`, an fsync takes up to two seconds if the disk is
#: busy.
MAX_WAIT = 10.0
#: After INFO has shown that no fsync is running, the server starts an fsync of everything within this time (s).
_STARTS_WITHIN = 1.3
#: Seconds between two INFO commands.
_LOOK_INTERVAL = 0.1
#: The fence's Redis key expires after this time without a drain, in ms (a day).
_KEY_TTL = 86_400_000


class NotFencedError(RuntimeError):
    """Raised if the server could still lose the batches that were read; the message says what to do."""


def fence(server: Server, run: str, max_wait: float = MAX_WAIT, shards: Sequence[int] = (0,)) -> str:
    """Wait until the server of these shards has all earlier writes on its disk. Return the server's fsync policy.

    If RATELIMITS["FENCE"] is "none", do not wait, and return "none". `run` names the run in which the batches were read
    (a run is the time from a start of the server until its restart). The call writes the Redis key
    `server.keyspace.fence(shard)` of one of the shards. Raise NotFencedError if the server could still lose writes, or
    is in another run now. Raise redis.exceptions.RedisError if the server does not answer.
    """
    deadline = time.monotonic() + max_wait
    for shard in shards[:-1]:
        # While the slot of a shard moves to another node, the server may refuse to make the key. Try another shard.
        with suppress(AskError):
            return _check_and_wait(server, run, shard, deadline)
    return _check_and_wait(server, run, shards[-1], deadline)


def check_server(server: Server, run: str, shard: int = 0) -> str:
    """Check that `fence` could wait for the server of a shard, without waiting. Return the server's fsync policy.

    This is enough for a drain that writes nothing to the ledger. Raise the same errors as `fence`.
    """
    return _check_and_wait(server, run, shard, None)


def _check_and_wait(server: Server, run: str, shard: int, deadline: float | None) -> str:
    """Check the server, and wait for its fsync until the deadline. Without a deadline, do not wait."""
    client = server.wire.client_of(server.keyspace, shard)
    if conf.FENCE == "none":
        _check_run(client.info(), run)
        return "none"
    with redis.Redis(connection_pool=client.connection_pool, single_connection_client=True) as connection:
        _checked_info(connection, run)
        policy, suspended_in_rewrite = _policy(connection)
        if policy == "no":
            raise NotFencedError(
                "appendfsync is 'no': set it to everysec or always, or declare RATELIMITS['FENCE'] = 'none'"
            )
        if policy != "always" and (policy != "everysec" or suspended_in_rewrite):
            raise NotFencedError(
                "the server must answer CONFIG GET appendfsync with everysec or always, and"
                " no-appendfsync-on-rewrite with no"
            )
        if deadline is None:
            return policy
        key = server.keyspace.fence(shard)
        if policy == "always":
            _write_key(connection, key)
        else:
            _wait_for_fsync(connection, run, key, deadline)
        _checked_info(connection, run)
    return policy


def _check_run(info: dict[str, Any], run: str) -> None:
    if run_named(info) != run:
        raise NotFencedError("the server was restarted or replaced since the batches were read: drain again")


def _checked_info(connection: redis.Redis, run: str) -> dict[str, Any]:
    """Return the server's INFO. Raise NotFencedError if INFO shows another run, or no append-only file that works."""
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
    """Return the fsync policy, and whether a rewrite of the file suspends fsyncs.

    The policy is "unknown" if the server does not tell it.
    """
    try:
        answer = connection.config_get("appendfsync", "no-appendfsync-on-rewrite")
    except ResponseError:
        # Older servers accept only one parameter at a time. Hosted servers refuse the command.
        try:
            answer = {**connection.config_get("appendfsync"), **connection.config_get("no-appendfsync-on-rewrite")}
        except ResponseError:
            return "unknown", False
    config = {_text(name): _text(value) for name, value in answer.items()}
    return config.get("appendfsync", "unknown"), config.get("no-appendfsync-on-rewrite") == "yes"


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _wait_for_fsync(connection: redis.Redis, run: str, key: str, deadline: float) -> None:
    """Wait until an fsync that started during this call has ended.

    This also works if other clients write all the time.

    The steps are:

    1. Write the key, so that the server has something to fsync.
    2. Read INFO until no fsync is running. Any fsync that started before the key was written has then ended.
    3. Wait `_STARTS_WITHIN` seconds, and then read INFO once more. After this, the server has started an fsync of
       everything that was written before. (It starts an fsync only at the end of a turn of its event loop. After this
       INFO, such a turn ends before the next INFO is answered.)
    4. Read INFO until no fsync is running: the fsync of step 3 has ended.

    If the server starts to rewrite its file during these steps, the key may be in the old file. Then start again at
    step 1.
    """
    idle_since: float | None = None
    loop_turned = key_written = False
    rewrites = None
    while True:
        looked_at = time.monotonic()
        info = _checked_info(connection, run)
        idle = not info.get("aof_pending_bio_fsync") and not _may_close_unseen(info)
        if not key_written or info.get("aof_rewrites") != rewrites:
            idle_since, loop_turned = None, False
            rewrites = info.get("aof_rewrites")
            _write_key(connection, key)
            key_written = True
        elif idle_since is None:
            idle_since = time.monotonic() if idle else None
        elif looked_at - idle_since > _STARTS_WITHIN:
            if loop_turned and idle:
                return
            loop_turned = True
        if looked_at > deadline:
            raise NotFencedError("the server did not fsync in time: its disk may be overloaded")
        time.sleep(_LOOK_INTERVAL)


def _may_close_unseen(info: dict[str, Any]) -> bool:
    """Return whether the server may be closing a file outside the queue of fsyncs.

    Redis 7.0 can do this while it rewrites its append-only file. After the rewrite this does not matter, because the
    server does not need the closed file any more.
    """
    return bool(info.get("aof_rewrite_in_progress")) and str(info.get("redis_version")).startswith("7.0.")


def _write_key(connection: redis.Redis, key: str) -> None:
    """Write the key. A server whose memory is full writes it too."""
    script, number_of_keys = scripts.read("fence").text.decode(), 1
    connection.eval(script, number_of_keys, key, str(_KEY_TTL))
