"""The fence: before batches are written to the ledger, wait until Redis cannot lose them any more.

Suppose a batch is drained, and then Redis crashes and loses the batch. Redis could then use the batch's identity again,
for other usage. So before any SQL, the drain waits until the server has fsynced all batches that the drain has read. To
fsync is to write the append-only file to the disk. RATELIMITS["FENCE"] says how the drain makes sure of this:

- "aof" reads the server's settings (CONFIG GET) and waits for the fsync, as described below.
- "waitaof" asks the server by WAITAOF.
- "wait" waits until replicas have the batches in their memory (WAIT).
- "window" waits FENCE_WINDOW seconds. It is for servers that lose at most their last seconds.
- "durable" waits for nothing: the project declares that the server loses no answered write.
- "none" waits for nothing, and promises nothing.

Each batch in the ledger has the name of its promise (`Batch.fence`): the fsync policy for "aof".

With `appendfsync always`, the server answers a write only after its fsync. But some writes are perhaps older than the
setting `always`. Redis 6.2 fsyncs such writes only with the next write. So the fence writes a Redis key.

With `appendfsync everysec`, a write that was answered is perhaps not even in the file: while an fsync is running, the
server leaves writes in its memory for up to two seconds. So the fence reads INFO, which says whether an fsync is
running. Once no fsync is running, the server writes everything from its memory to the file, and starts an fsync of the
file within a second. WAITAOF would be simpler, but in Redis 7.4 and in Valkey it returns up to a second too early
(redis/redis#13793). So "waitaof" asks twice: by the second answer, the fsync that the first one announced has ended.

INFO does not show the fsync of a file that is being closed. Since Redis 7, a rewrite of the append-only file starts a
new file and closes the old file. The server closes and fsyncs files one after the other, in one queue. So the fence
writes a Redis key: the fsync of this write begins only after the old file is closed.

If the run of the server cannot be read, no fence can notice a restart that it lived through. This is no danger to what
the fence promises: the contents of batches are read only after the fence, so a batch that was lost meanwhile is missed
then. But restarts are not declared as gaps. The name of the promise says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import redis
from redis.exceptions import AskError, ResponseError

from ratelimits.conf import conf
from ratelimits.engine.server import Server
from ratelimits.engine.transport.connection import UNREADABLE, read_run
from ratelimits.engine.transport.refused import refused

#: How long to wait for an fsync at most, in seconds. With `everysec`, an fsync takes up to two seconds if the disk is
#: busy.
MAX_WAIT = 10.0
#: After INFO has shown that no fsync is running, the server starts an fsync of everything within this time (s).
_STARTS_WITHIN = 1.3
#: Seconds between two INFO commands.
_LOOK_INTERVAL = 0.1
#: The fence's Redis key expires after this time without a drain, in ms (a day).
_KEY_TTL = 86_400_000
#: The script that writes this key. A server whose memory is full would refuse SET as the first write of a script, so
#: PEXPIRE comes before it (see lua/memory/full.lua).
_WRITE_KEY = """
if redis.call('PEXPIRE', KEYS[1], ARGV[1]) == 0 then redis.call('SET', KEYS[1], '1', 'PX', ARGV[1]) end
"""
#: The end of the name of a promise, if the run of the server cannot be read.
RUN_UNREADABLE = "+run-unreadable"


class NotFencedError(RuntimeError):
    """Raised if the server could still lose the batches that were read; the message says what to do.

    With `elsewise`, the message also names the other fences. `reason` is the message without them.
    """

    def __init__(self, reason: str, *, elsewise: bool = False) -> None:
        super().__init__(f"{reason}. {another_fence()}" if elsewise else reason)
        self.reason = reason


class NoFileError(NotFencedError):
    """Raised if the fence waits for an append-only file, and the server keeps none."""


def another_fence() -> str:
    """Return what to do where nobody can change the server: the setting, its value, and the values to choose from."""
    others = [f'"{name}"' for name in _WAITS if name not in (conf.FENCE, "none")]
    return (
        f"If nobody can change this server, name another fence in RATELIMITS['FENCE'], which is \"{conf.FENCE}\":"
        f" {', '.join(others[:-1])} or {others[-1]} (`manage.py ratelimits_doctor` says which of them would work here,"
        " and docs/billing/pipeline.md which one fits which server)"
    )


def other_fences(server: Server, run: str, shard: int = 0) -> dict[str, NotFencedError | None]:
    """Try the other values of FENCE that promise something. Return them with None, or with why they would not work.

    Raise redis.exceptions.RedisError if the server does not answer.
    """
    tried: dict[str, NotFencedError | None] = {}
    for name in _WAITS:
        if name not in (conf.FENCE, "none"):
            try:
                _check_and_wait(server, run, shard, None, name)
                tried[name] = None
            except NotFencedError as error:
                tried[name] = error
            except ResponseError as error:
                tried[name] = NotFencedError(str(error))
    return tried


def fence(server: Server, run: str, max_wait: float = MAX_WAIT, shards: Sequence[int] = (0,)) -> str:
    """Wait until the server of these shards cannot lose earlier writes. Return the name of the promise.

    The setting FENCE says how. `run` names the run in which the batches were read (a run is the time from a start of
    the server until its restart). The call writes the Redis key `server.keyspace.fence(shard)` of one of the shards, if
    it needs a write to wait for. Raise NotFencedError if the server could still lose writes, or is in another run now.
    Raise redis.exceptions.RedisError if the server does not answer.
    """
    deadline = time.monotonic() + max_wait
    for shard in shards[:-1]:
        # While the slot of a shard moves to another node, the server may refuse to make the key. Try another shard.
        with suppress(AskError):
            return _check_and_wait(server, run, shard, deadline)
    return _check_and_wait(server, run, shards[-1], deadline)


def check_server(server: Server, run: str, shard: int = 0) -> str:
    """Check that `fence` could wait for the server of a shard, without waiting. Return the name of the promise.

    This is enough for a drain that writes nothing to the ledger. Raise the same errors as `fence`.
    """
    return _check_and_wait(server, run, shard, None)


def _check_and_wait(server: Server, run: str, shard: int, deadline: float | None, name: str = "") -> str:
    """Check the server, and wait until the deadline. Without a deadline, do not wait. Return the promise's name.

    `name` is the fence, if it is not that of the setting.
    """
    client, key = server.wire.client_of(server.keyspace, shard), server.keyspace.fence(shard)
    with redis.Redis(connection_pool=client.connection_pool, single_connection_client=True) as connection:
        try:
            promise = _WAITS[name or conf.FENCE](connection, run, key, deadline)
            _check_run(connection, run, key)
        except ResponseError as error:
            raise (_refusal(error) or error) from error
    return promise if run != UNREADABLE else f"{promise}{RUN_UNREADABLE}"


def _refusal(error: ResponseError, command: str = "") -> NotFencedError | None:
    """Return the error of a fence that needs a refused command; None if no command was refused."""
    found = refused(error, command)
    return NotFencedError(str(found), elsewise=True) if found is not None else None


def _wait_for_file(connection: redis.Redis, run: str, key: str, deadline: float | None) -> str:
    """Wait for the fsync of the append-only file. Return the fsync policy."""
    _checked_info(connection, run, key)
    policy, suspended_in_rewrite = _policy(connection)
    if policy == "no":
        raise NotFencedError("appendfsync is 'no': set it to everysec or always", elsewise=True)
    if policy != "always" and (policy != "everysec" or suspended_in_rewrite):
        raise NotFencedError(
            "the server must answer CONFIG GET appendfsync with everysec or always, and"
            " no-appendfsync-on-rewrite with no",
            elsewise=True,
        )
    if deadline is None:
        return policy
    if policy == "always":
        _write_key(connection, key)
    else:
        _wait_for_fsync(connection, run, key, deadline)
    _checked_info(connection, run, key)
    return policy


def _wait_by_server(connection: redis.Redis, run: str, key: str, deadline: float | None) -> str:
    """Wait until the server says twice, by WAITAOF, that it has fsynced a write."""
    command = (connection.waitaof, 1, 0)  # one file: the server's own
    if deadline is None:
        _ask_until(*command, deadline=0.0)
        return "waitaof"
    for pause in (_STARTS_WITHIN, 0.0):
        _write_key(connection, key)
        if not _ask_until(*command, deadline=deadline):
            raise NotFencedError("the server did not fsync in time: its disk may be overloaded")
        time.sleep(pause)
    return "waitaof"


def _wait_for_replicas(connection: redis.Redis, run: str, key: str, deadline: float | None) -> str:
    """Wait until FENCE_REPLICAS replicas have a write in their memory."""
    if deadline is not None:
        _write_key(connection, key)
    if not _ask_until(connection.wait, conf.FENCE_REPLICAS, deadline=deadline or 0.0):
        raise NotFencedError(
            f"fewer than {conf.FENCE_REPLICAS} replicas have the server's newest writes (RATELIMITS['FENCE_REPLICAS']):"
            " look at the replicas",
            elsewise=True,
        )
    return f"wait-{conf.FENCE_REPLICAS}"


def _wait_for_window(connection: redis.Redis, run: str, key: str, deadline: float | None) -> str:
    """Wait FENCE_WINDOW seconds: the server loses at most the writes of this time, as the project says."""
    if run == UNREADABLE:
        raise NotFencedError(
            'the fence "window" must see whether the server restarts, but the server\'s run cannot be read: allow INFO'
            " (ACL SETUSER <user> +info)",
            elsewise=True,
        )
    if deadline is not None:
        time.sleep(conf.FENCE_WINDOW)
    return f"window-{conf.FENCE_WINDOW:g}s"


def _wait_for_nothing(connection: redis.Redis, run: str, key: str, deadline: float | None) -> str:
    return conf.FENCE


#: By value of FENCE: the function that waits. Its arguments: a connection, the run in which the batches were read, the
#: Redis key to write, and the moment at which it gives up (None: only check). It returns the name of the promise.
_WAITS: dict[str, Callable[[redis.Redis, str, str, float | None], str]] = {
    "aof": _wait_for_file,
    "waitaof": _wait_by_server,
    "wait": _wait_for_replicas,
    "window": _wait_for_window,
    "durable": _wait_for_nothing,
    "none": _wait_for_nothing,
}


def _ask_until(ask: Callable[..., Any], *numbers: int, deadline: float) -> bool:
    """Ask by WAIT or WAITAOF until the first number is reached, or until the deadline. Return whether it is reached.

    Ask at least once. The server answers within a fifth of the connection's timeout.
    """
    patience = max(min(round(conf.TIMEOUT * 200), 200), 1)  # ms; 0 would mean to wait for ever
    while True:
        try:
            answer: Any = ask(*numbers, patience)
        except ResponseError as error:
            if "appendonly is disabled" in str(error):
                raise NoFileError(f"the server keeps no append-only file ({error})", elsewise=True) from error
            raise
        reached = answer[0] if isinstance(answer, list) else answer
        if reached >= numbers[0]:
            return True
        if time.monotonic() >= deadline:
            return False


def _check_run(connection: redis.Redis, run: str, key: str) -> None:
    now = read_run(connection, key)
    if now == run:
        return
    if UNREADABLE in (now, run):
        raise NotFencedError("since the batches were read, the server's rights have changed: drain again")
    raise NotFencedError("the server was restarted or replaced since the batches were read: drain again")


def _checked_info(connection: redis.Redis, run: str, key: str) -> dict[str, Any]:
    """Return the server's INFO. Raise NotFencedError if INFO shows no append-only file that works.

    Raise it also if the server is in another run.
    """
    info: dict[str, Any] = connection.info()
    _check_run(connection, run, key)  # after INFO, so that INFO is from this run
    if "aof_enabled" not in info:
        raise NotFencedError("INFO does not say whether the server keeps an append-only file", elsewise=True)
    if not info["aof_enabled"]:
        raise NoFileError("the server keeps no append-only file: set appendonly yes", elsewise=True)
    if info.get("aof_last_write_status") != "ok":
        raise NotFencedError("the server could not write its append-only file: look at its log and its disk")
    return info


def _policy(connection: redis.Redis) -> tuple[str, bool]:
    """Return the fsync policy, and whether a rewrite of the file suspends fsyncs.

    The policy is "unknown" if the server's answer leaves it out.
    """
    try:
        answer = connection.config_get("appendfsync", "no-appendfsync-on-rewrite")
    except ResponseError:
        # Older servers accept only one parameter at a time. Hosted servers refuse the command.
        try:
            answer = {**connection.config_get("appendfsync"), **connection.config_get("no-appendfsync-on-rewrite")}
        except ResponseError as error:
            raise (_refusal(error, "CONFIG GET") or error) from error
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
        info = _checked_info(connection, run, key)
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
    number_of_keys = 1
    connection.eval(_WRITE_KEY, number_of_keys, key, str(_KEY_TTL))
