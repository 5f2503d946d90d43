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
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import redis
import redis.asyncio
from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured
from redis.asyncio.connection import BlockingConnectionPool as AsyncConnectionPool
from redis.asyncio.connection import Connection as AsyncConnection
from redis.asyncio.connection import SSLConnection as AsyncSSLConnection
from redis.asyncio.connection import UnixDomainSocketConnection as AsyncUnixDomainSocketConnection
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.connection import (
    BlockingConnectionPool,
    Connection,
    ConnectionPool,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.exceptions import NoScriptError, RedisError, ResponseError
from redis.retry import Retry
from redis.sentinel import SentinelConnectionPool

from ratelimits.engine.scripts import Script

#: After this many idle seconds a connection is looked at before it is used: the server may have closed it.
IDLE = 1.0
#: Connections of one event loop; a call that finds them all taken waits for one, TIMEOUT at most.
ASYNC_CONNECTIONS = 50

_ASYNC_CLASSES: dict[type[Any], type[Any]] = {
    Connection: AsyncConnection,
    SSLConnection: AsyncSSLConnection,
    UnixDomainSocketConnection: AsyncUnixDomainSocketConnection,
}


# redis-py's pools refuse the 101st connection by default; how many threads there are is not theirs to say.
_MANY = 2**31
_OF_THE_POOL = ("maint_notifications", "orig_", "event_dispatcher")


class Unavailable(Exception):
    """The server could not be asked."""


class NotSent(Unavailable):
    """No connection: the call did not take place."""


class Unanswered(Unavailable):
    """The call was sent and its reply was lost: whether it took place is unknown."""


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
    """One thread's connection, the process that opened it, the server's run, and when it was last used."""

    connection: Any = None
    pid: int = 0
    run: str = ""
    used: float = 0.0


class Wire:
    """The way to the server of one django-redis cache alias."""

    def __init__(self, alias: str, timeout: float) -> None:
        backend = caches[alias]
        if not hasattr(backend, "client") or not hasattr(backend.client, "get_client"):
            raise ImproperlyConfigured(
                f"RATELIMITS['CACHE_ALIAS'] is {alias!r}, which is no django-redis cache:"
                " give CACHES an alias with BACKEND 'django_redis.cache.RedisCache' and name that one"
            )
        source = backend.client.get_client(write=True)
        if not isinstance(source, redis.Redis):
            raise ImproperlyConfigured(f"the client {type(source).__name__} of cache {alias!r} is not supported")
        self._pool = _strict(source.connection_pool, timeout)
        self._pinned = _Pinned() if type(source.connection_pool) in (ConnectionPool, BlockingConnectionPool) else None
        self._runs: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        self._loops: WeakKeyDictionary[Any, tuple[Any, Any]] = WeakKeyDictionary()
        self._timeout = timeout
        #: A client on the same strict connections, for what is no decision: sealing, draining, publishing.
        self.client: redis.Redis = redis.Redis(connection_pool=self._pool)

    def call(self, command: Prepared, name: bytes) -> Any:
        """Send a command, with `name` for its nonce, and return the reply.

        A script that the server does not know is loaded, and the command sent again: it did not take place before.
        Raises NotSent, Unanswered, or redis.exceptions.ResponseError for what the server refuses.
        """
        connection, run = self._take()
        try:
            try:
                return _ask(connection, command.to(run, name))
            except NoScriptError:
                _ask(connection, resp(b"SCRIPT", b"LOAD", command.script.text))
                return _ask(connection, command.to(run, name))
        finally:
            if self._pinned is None:
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
        pinned = self._pinned
        if pinned is None:
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
        connection = pinned.connection
        now = time.monotonic()
        if connection is None or pinned.pid != os.getpid():
            # A child of a fork must not speak on its parent's socket; dropping the object leaves the parent's open.
            # Not one that the pool counts: threads come and go, and the pool would never hear that this one went.
            connection = pinned.connection = self._pool.connection_class(**self._pool.connection_kwargs)
            pinned.pid = os.getpid()
        elif now - pinned.used > IDLE and connection.is_connected and _closed(connection):
            connection.disconnect()
        pinned.used = now
        if not connection.is_connected:
            pinned.run = self._greet(connection)
        return connection, pinned.run

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
        pool = _twin(self._pool, self._timeout)
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


def _ask(connection: Any, packed: bytes) -> Any:
    try:
        connection.send_packed_command([packed], check_health=False)
        return connection.read_response()
    except ResponseError:
        raise
    except (RedisError, OSError) as error:
        connection.disconnect()
        raise Unanswered(str(error)) from error


async def _aask(connection: Any, packed: bytes) -> Any:
    try:
        await connection.send_packed_command([packed], check_health=False)
        return await connection.read_response()
    except ResponseError:
        raise
    except (RedisError, OSError) as error:
        await connection.disconnect()
        raise Unanswered(str(error)) from error


async def _agreet(connection: Any) -> str:
    try:
        await connection.connect()
        await connection.send_packed_command([_INFO], check_health=False)
        return _run_of(await connection.read_response())
    except (RedisError, OSError) as error:
        await connection.disconnect()
        raise NotSent(str(error)) from error


def _limits(kwargs: dict[str, Any], timeout: float) -> dict[str, Any]:
    """The configured connection's arguments, with short timeouts, raw replies and nothing that retries."""
    # What a pool adds for the server's maintenance notices (RESP 3 only) belongs to that pool.
    strict = {
        **{name: value for name, value in kwargs.items() if not name.startswith(_OF_THE_POOL)},
        "decode_responses": False,
        "protocol": 2,
        "health_check_interval": 0,
        "retry_on_timeout": False,
        "retry_on_error": [],
    }
    for name in ("socket_timeout", "socket_connect_timeout"):
        strict[name] = min(kwargs.get(name) or timeout, timeout)
    return strict


def _strict(pool: Any, timeout: float) -> Any:
    kwargs = _limits(pool.connection_kwargs, timeout)
    kwargs["retry"] = Retry(NoBackoff(), 0)
    if isinstance(pool, SentinelConnectionPool):
        kwargs.pop("connection_pool", None)
        sentinel: Any = SentinelConnectionPool
        return sentinel(
            pool.service_name, pool.sentinel_manager, is_master=pool.is_master, max_connections=_MANY, **kwargs
        )
    return ConnectionPool(connection_class=pool.connection_class, max_connections=_MANY, **kwargs)


def _twin(pool: Any, timeout: float) -> Any:
    kwargs = dict(pool.connection_kwargs)
    kwargs.pop("parser_class", None)
    kwargs["retry"] = AsyncRetry(NoBackoff(), 0)
    known = _ASYNC_CLASSES.get(pool.connection_class)
    if known is None:
        raise ImproperlyConfigured(
            f"{pool.connection_class.__name__} has no async twin: use the sync functions in a thread"
        )
    return AsyncConnectionPool(connection_class=known, max_connections=ASYNC_CONNECTIONS, timeout=timeout, **kwargs)
