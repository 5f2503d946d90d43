"""The connections that decisions travel on: those of the configured django-redis cache, made strict.

Each thread has a connection of its own, with short timeouts and no retry of any kind: a decision that was sent twice
would be charged twice. Where the configured client is not a plain one (Sentinel, say) a connection is taken from a pool
of its kind for each call. What was never sent raises NotSent; a reply that was lost raises Unanswered, and whether the
call took place is then unknown.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import redis
import redis.asyncio
from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured
from redis.connection import BlockingConnectionPool, ConnectionPool
from redis.exceptions import NoScriptError, RedisError, ResponseError

from ratelimits.engine.connection import NotSent, Own, Unanswered, ask, failure, refuses_writes
from ratelimits.engine.keys import Keyspace
from ratelimits.engine.scripts import Script
from ratelimits.engine.strict import strict, twin

#: After this many idle seconds a connection is looked at before it is used: the server may have closed it.
IDLE = 1.0


def bulks(*parts: bytes) -> bytes:
    """Bulk strings in RESP, one behind the other."""
    return b"".join([b"$%d\r\n%b\r\n" % (len(part), part) for part in parts])


def resp(*parts: bytes) -> bytes:
    """A command in RESP."""
    return b"*%d\r\n" % len(parts) + bulks(*parts)


class Prepared(Protocol):
    """What can be sent: the script that it calls, and its bytes for a run of the server and a nonce."""

    @property
    def script(self) -> Script: ...

    def to(self, run: str, name: bytes) -> bytes:
        """The command in RESP."""


def _run_of(info: dict[str, Any] | bytes | str) -> str:
    text = info.decode() if isinstance(info, bytes) else str(info)
    found = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return f"{found.get('run_id', '?')}:{found.get('master_replid', '?')}"


_INFO = resp(b"INFO", b"everything")


class _Pinned(threading.local):
    """What each thread has, and the process that it opened it in."""

    own: Own | None = None
    process: object = None


_process = object()


def _forked() -> None:
    global _process
    _process = object()


os.register_at_fork(after_in_child=_forked)


def configured(alias: str) -> Any:
    """The client that a django-redis cache alias names, of whatever kind."""
    backend = caches[alias]
    if not hasattr(backend, "client") or not hasattr(backend.client, "get_client"):
        raise ImproperlyConfigured(
            f"RATELIMITS['CACHE_ALIAS'] is {alias!r}, which is no django-redis cache:"
            " give CACHES an alias with BACKEND 'django_redis.cache.RedisCache' and name that one"
        )
    return backend.client.get_client(write=True)


class Wire:
    """The way to the server of one django-redis cache alias."""

    def __init__(self, alias: str, timeout: float) -> None:
        source = configured(alias)
        if not isinstance(source, redis.Redis):
            raise ImproperlyConfigured(f"the client {type(source).__name__} of cache {alias!r} is not supported")
        self._open(source.connection_pool, timeout)

    def _open(self, pool: Any, timeout: float) -> None:
        self._pool = strict(pool, timeout)
        self._pinned = _Pinned() if type(pool) in (ConnectionPool, BlockingConnectionPool) else None
        self._runs: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        self._loops: WeakKeyDictionary[Any, tuple[Any, Any]] = WeakKeyDictionary()
        self._timeout = timeout
        #: A client on the same strict connections, for what is no decision: sealing, draining, publishing.
        self.client: redis.Redis = redis.Redis(connection_pool=self._pool)

    def servers(self, keyspace: Keyspace, shards: Sequence[int]) -> Iterator[tuple[redis.Redis, list[int]]]:
        """Clients of the servers that these shards lie on now, and which of them each has. Raises NotReached."""
        yield self.client, list(shards)

    def client_of(self, keyspace: Keyspace, shard: int) -> redis.Redis:
        """A client of the server that this shard lies on. Raises NotReached."""
        return self.client

    def call(self, command: Prepared, name: bytes) -> Any:
        """Send a command, with `name` for its nonce, and return the reply.

        A script that the server does not know is loaded, and the command sent again: it did not take place before.
        Raises NotSent, Unanswered, or redis.exceptions.ResponseError for what the server refuses.
        """
        if self._pinned is not None:
            own = self._mine(self._pinned)
            try:
                return own.ask(command.to(own.run, name))
            except NoScriptError:
                own.ask(resp(b"SCRIPT", b"LOAD", command.script.text))
                return own.ask(command.to(own.run, name))
        connection, run = self._take()
        try:
            try:
                return ask(connection, command.to(run, name))
            except NoScriptError:
                ask(connection, resp(b"SCRIPT", b"LOAD", command.script.text))
                return ask(connection, command.to(run, name))
        finally:
            self._pool.release(connection)

    def stream(self, packed: Sequence[Callable[[str], bytes]], scripts: set[Script]) -> list[Any]:
        """Send many commands at once and return their replies, in order. For a replay, where nothing else decides.

        The scripts are loaded first. Raises as `call` does; a script flushed in between is a ResponseError, since what
        came after it was decided out of order.
        """
        connection, run = self._take()
        try:
            loads = [resp(b"SCRIPT", b"LOAD", script.text) for script in scripts]
            connection.send_packed_command([b"".join([*loads, *[make(run) for make in packed]])], check_health=False)
            replies: list[Any] = []
            failure: ResponseError | None = None
            for _ in range(len(loads) + len(packed)):
                try:
                    replies.append(connection.read_response())
                except ResponseError as error:
                    failure = failure or error
            if failure is not None:
                raise failure
            return replies[len(loads) :]
        except ResponseError:
            raise
        except (RedisError, OSError) as error:
            connection.disconnect()
            raise Unanswered(str(error)) from error
        finally:
            if self._pinned is None:
                self._pool.release(connection)

    def _take(self) -> tuple[Any, str]:
        if self._pinned is not None:
            own = self._mine(self._pinned)
            return own.connection, own.run
        try:
            connection = self._pool.get_connection()
        except (RedisError, OSError) as error:
            raise NotSent(str(error)) from error
        run = self._runs.get(connection)
        if run is None:
            try:
                run = self._greet(connection)
            except NotSent:
                self._pool.release(connection)
                raise
            self._learn(connection, run)
        return connection, run

    def _mine(self, pinned: _Pinned) -> Own:
        """This thread's connection, ready to be used."""
        own, now = pinned.own, time.monotonic()
        if own is None or pinned.process is not _process:
            # A child of a fork must not speak on its parent's socket; dropping the object leaves the parent's open.
            # Not one that the pool counts: threads come and go, and the pool would never hear that this one went.
            own = pinned.own = Own(self._pool.connection_class, self._pool.connection_kwargs)
            pinned.process = _process
        elif now - own.used > IDLE and own.connection.is_connected and _closed(own.connection):
            own.connection.disconnect()
        own.used = now
        if not own.connection.is_connected:
            own.run = self._greet(own.connection)
        return own

    def _greet(self, connection: Any) -> str:
        try:
            connection.connect()
            connection.send_packed_command([_INFO], check_health=False)
            return _run_of(connection.read_response())
        except (RedisError, OSError) as error:
            connection.disconnect()
            raise NotSent(str(error)) from error

    def _learn(self, connection: Any, run: str) -> None:
        self._runs[connection] = run
        connection.register_connect_callback(self._connected_anew)

    def _connected_anew(self, connection: Any) -> None:
        """A pool has connected again by itself: perhaps to another run of the server."""
        self._runs.pop(connection, None)

    async def _pool_of(self, loop: Any) -> Any:
        for other in list(self._loops):
            if other.is_closed():
                self._loops.pop(other, None)
        pool = twin(self._pool, self._timeout)
        end = self._end(loop, pool)
        self._loops[loop] = pool, end
        await anext(end)
        return pool

    async def _end(self, loop: Any, pool: Any) -> AsyncGenerator[None]:
        """Closes a loop's connections before the loop itself is closed: runners end asynchronous generators last."""
        try:
            yield
        finally:
            self._loops.pop(loop, None)
            await pool.disconnect()

    async def acall(self, command: Prepared, name: bytes) -> Any:
        """The same for async code, on connections of its event loop."""
        loop = asyncio.get_running_loop()
        known = self._loops.get(loop)
        pool = known[0] if known is not None else await self._pool_of(loop)
        try:
            connection = await pool.get_connection()
        except (RedisError, OSError) as error:
            raise NotSent(str(error)) from error
        try:
            run = self._runs.get(connection)
            if run is None:
                run = await _agreet(connection)
                self._learn(connection, run)
            try:
                return await _aask(connection, command.to(run, name))
            except NoScriptError:
                await _aask(connection, resp(b"SCRIPT", b"LOAD", command.script.text))
                return await _aask(connection, command.to(run, name))
        finally:
            await pool.release(connection)


def _closed(connection: Any) -> bool:
    try:
        return bool(connection.can_read(0))
    except (RedisError, OSError):
        return True


async def _aask(connection: Any, packed: bytes) -> Any:
    try:
        await connection.send_packed_command([packed], check_health=False)
        return await connection.read_response()
    except ResponseError as error:
        if not refuses_writes(error):
            raise
        await connection.disconnect()
        raise NotSent(str(error)) from error
    except (RedisError, OSError) as error:
        await connection.disconnect()
        raise failure(error) from error


async def _agreet(connection: Any) -> str:
    try:
        await connection.connect()
        await connection.send_packed_command([_INFO], check_health=False)
        return _run_of(await connection.read_response())
    except (RedisError, OSError) as error:
        await connection.disconnect()
        raise NotSent(str(error)) from error
