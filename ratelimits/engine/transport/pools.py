"""Make connection pools like the pool of the cache, but with short timeouts, raw replies and no retries.

On a connection of such a pool, a call can also wait until a list on the server has an element. This takes longer than
the timeout of a call.
"""

from __future__ import annotations

import asyncio
import copy
import time
from functools import cache
from inspect import Parameter, signature
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import redis
from django.core.exceptions import ImproperlyConfigured
from redis.asyncio.connection import AbstractConnection as AsyncAbstractConnection
from redis.asyncio.connection import Connection as AsyncConnection
from redis.asyncio.connection import ConnectionPool as AsyncConnectionPool
from redis.asyncio.connection import SSLConnection as AsyncSSLConnection
from redis.asyncio.connection import UnixDomainSocketConnection as AsyncUnixDomainSocketConnection
from redis.asyncio.retry import Retry as AsyncRetry
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.asyncio.sentinel import SentinelConnectionPool as AsyncSentinelConnectionPool
from redis.asyncio.sentinel import SentinelManagedConnection as AsyncSentinelManagedConnection
from redis.asyncio.sentinel import SentinelManagedSSLConnection as AsyncSentinelManagedSSLConnection
from redis.backoff import NoBackoff
from redis.connection import Connection, ConnectionPool, SSLConnection, UnixDomainSocketConnection
from redis.exceptions import AuthenticationError, RedisError, ResponseError
from redis.retry import Retry
from redis.sentinel import SentinelConnectionPool, SentinelManagedConnection, SentinelManagedSSLConnection

from ratelimits.engine.assemble.scripts import resp
from ratelimits.engine.transport.ages import Ages, ask, connect, tcp_options
from ratelimits.engine.transport.connection import NotSent, refuses_writes

try:
    from redis.maint_notifications import MaintNotificationsConfig
except ImportError:  # before version 7 of redis-py
    _NO_NOTICES: dict[str, Any] = {}
else:
    #: With RESP 3, a server could announce its maintenance between two replies.
    _NO_NOTICES = {"maint_notifications_config": MaintNotificationsConfig(enabled=False)}

#: The asyncio class for each connection class of redis-py.
_ASYNC_CLASSES: dict[type[Any], type[Any]] = {
    Connection: AsyncConnection,
    SSLConnection: AsyncSSLConnection,
    UnixDomainSocketConnection: AsyncUnixDomainSocketConnection,
    SentinelManagedConnection: AsyncSentinelManagedConnection,
    SentinelManagedSSLConnection: AsyncSentinelManagedSSLConnection,
}
#: Maximum seconds of one blocking command. A longer wait is split into several commands.
LONGEST_BLOCK = 30.0
#: Seconds to wait for a late reply: perhaps it has arrived, but a busy loop has not read it yet.
_LAST_LOOK = 0.001
# By default a pool of redis-py refuses the 101st connection. Here only the number of threads limits the connections.
_UNLIMITED = 2**31
# redis-py's pools add arguments for the server's maintenance notices. Their names begin with these texts. Leave them
# out: this module turns the notices off.
_ADDED_BY_POOL = ("maint_notifications", "oss_cluster_maint", "orig_")


def _connection_arguments(pool: Any, timeout: float) -> dict[str, Any]:
    """Return the arguments of a configured connection, changed to short timeouts, raw replies and no retries."""
    kwargs = pool.connection_kwargs
    protocol = int(kwargs.get("protocol") or 2)  # the version of RESP, the protocol of Redis
    arguments = {
        **{name: value for name, value in kwargs.items() if not name.startswith(_ADDED_BY_POOL)},
        **tcp_options(pool.connection_class, kwargs),
        "decode_responses": False,
        "protocol": protocol,
        "health_check_interval": 0,  # `Ages` has this number
        "retry_on_timeout": False,
        "retry_on_error": [],
        "retry": Retry(NoBackoff(), 0),
    }
    return arguments | _timeouts(kwargs, timeout)


def _timeouts(kwargs: dict[str, Any], timeout: float) -> dict[str, float]:
    return {name: min(kwargs.get(name) or timeout, timeout) for name in ("socket_timeout", "socket_connect_timeout")}


#: Before version 5.3, the pools of redis-py want the name of a command, which they do not use.
_COMMAND_NAME = signature(ConnectionPool.get_connection).parameters.get("command_name")
_NAMES = ("PING",) if _COMMAND_NAME is not None and _COMMAND_NAME.default is Parameter.empty else ()


@cache
def _noting(connection_class: type[Any]) -> type[Any]:
    """Return a class of the same connections, which note if their server refuses writes.

    Such a server is perhaps no primary any more. If its name has moved, a new connection reaches the new primary.
    """

    class Noting(connection_class):  # type: ignore[misc]
        refuses_writes = False

        def read_response(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().read_response(*args, **kwargs)
            except ResponseError as error:
                self.refuses_writes = self.refuses_writes or refuses_writes(error)
                raise

    Noting.__name__ = connection_class.__name__
    return Noting


class _Moments(NamedTuple):
    """When a connection was made and last taken, and when it must be replaced (s, monotonic)."""

    made: float
    used: float
    until: float


class _Pool(ConnectionPool):
    """A pool that replaces connections which were idle too long, or are too old.

    If a server has refused a write, it replaces all connections.
    """

    def __init__(self, ages: Ages, **kwargs: Any) -> None:
        self.ages = ages
        self._moments: WeakKeyDictionary[Any, _Moments] = WeakKeyDictionary()
        #: Connections that were made before this moment are replaced.
        self._renewed = float("-inf")
        super().__init__(**kwargs)

    def get_connection(self, *_names: Any, **_options: Any) -> Any:
        """Return an open connection on which the server has just answered, or that was used just now."""
        connection: Any
        # A connection that is made now gets its credentials after this moment.
        now = time.monotonic()
        try:
            connection = super().get_connection(*_NAMES)
        except AuthenticationError:
            if self.connection_kwargs.get("credential_provider") is None:
                raise
            # The credentials changed after the provider was asked. It has new ones now.
            connection = super().get_connection(*_NAMES)
        made, used, until = self._moments.get(connection) or (now, now, self.ages.until())
        idle = now - used
        try:
            answers = self._answers(connection, idle)
            if connection.refuses_writes:
                connection.refuses_writes = False
                self._renewed = now  # the others perhaps lead to this server too
            if made < self._renewed or now > until or not answers:
                made, until = now, self.ages.until()
                connection.disconnect()
                connect(connection)
                if answers is None:
                    self.ages.was_silent(idle)
        except BaseException:
            connection.disconnect()  # perhaps the answer to PING was not read
            self.release(connection)
            raise
        self._moments[connection] = _Moments(made, now, until)
        return connection

    def _answers(self, connection: Any, idle: float) -> bool | None:
        """Return whether a connection may be used, and None if no answer came on it."""
        if idle <= self.ages.asked:
            return True
        return idle <= self.ages.oldest and ask(connection, self.ages.wait)

    def renew(self) -> None:
        """Replace each connection before its next use."""
        self._renewed = time.monotonic()


class _SentinelPool(_Pool, SentinelConnectionPool):
    """A pool for the server that the sentinels name."""

    def __init__(self, ages: Ages, service_name: str, manager: Any, **kwargs: Any) -> None:
        super().__init__(ages, service_name=service_name, sentinel_manager=manager, **kwargs)


def no_retry_pool(pool: Any, timeout: float) -> Any:
    """Return a pool of the same kind for the same server. Its connections wait at most `timeout` seconds."""
    kwargs = _connection_arguments(pool, timeout) | _NO_NOTICES
    ages, connection_class = Ages(pool.connection_kwargs, timeout), _noting(pool.connection_class)
    if isinstance(pool, SentinelConnectionPool):
        kwargs.pop("connection_pool", None)
        return _SentinelPool(
            ages,
            pool.service_name,
            _no_retry_manager(pool.sentinel_manager, timeout),
            is_master=pool.is_master,
            check_connection=pool.proxy.check_connection,
            connection_class=connection_class,
            max_connections=_UNLIMITED,
            **kwargs,
        )
    return _Pool(ages, connection_class=connection_class, max_connections=_UNLIMITED, **kwargs)


def _addresses(manager: Any) -> list[tuple[str, int]]:
    arguments = [sentinel.connection_pool.connection_kwargs for sentinel in manager.sentinels]
    return [(kwargs["host"], kwargs["port"]) for kwargs in arguments]


def _no_retry_manager(manager: Any, timeout: float) -> Any:
    """Return a manager for the same sentinels. It asks each sentinel only once, with short timeouts."""
    changed = copy.copy(manager)
    changed.sentinel_kwargs = manager.sentinel_kwargs | _timeouts(manager.sentinel_kwargs, timeout)
    sentinels = [redis.Redis(host, port, **changed.sentinel_kwargs) for host, port in _addresses(manager)]
    changed.sentinels = [
        redis.Redis(connection_pool=no_retry_pool(sentinel.connection_pool, timeout)) for sentinel in sentinels
    ]
    return changed


class _AsyncSentinelPool(AsyncSentinelConnectionPool):
    """An asyncio pool for the server that the sentinels name. `disconnect` also closes the sentinels' connections.

    It asks a sentinel on a new connection: a connection that was idle since then could be dead.
    """

    async def get_master_address(self) -> tuple[str, int]:
        parent: Any = super()
        try:
            address: tuple[str, int] = await parent.get_master_address()
            return address
        finally:
            for sentinel in self.sentinel_manager.sentinels:
                await sentinel.connection_pool.disconnect(inuse_connections=False)

    async def disconnect(self, inuse_connections: bool = True) -> None:
        await super().disconnect(inuse_connections)
        if inuse_connections:
            for sentinel in self.sentinel_manager.sentinels:
                await sentinel.connection_pool.disconnect()


def async_pool(pool: Any) -> Any:
    """Return the asyncio version of a pool, for one event loop. Raise ImproperlyConfigured if redis-py has none."""
    kwargs = dict(pool.connection_kwargs)
    kwargs.pop("parser_class", None)
    kwargs["retry"] = AsyncRetry(NoBackoff(), 0)
    # Where connections of redis.asyncio can have the notices of a server, turn them off too.
    if kwargs["protocol"] == 3 and _NO_NOTICES.keys() <= signature(AsyncAbstractConnection).parameters.keys():
        kwargs |= _NO_NOTICES
    async_class = _ASYNC_CLASSES.get(pool.connection_class.__base__)
    if async_class is None:
        raise ImproperlyConfigured(
            f"{pool.connection_class.__name__} has no asyncio version: use the sync functions in a thread"
        )
    kwargs["connection_class"] = async_class
    if not isinstance(pool, SentinelConnectionPool):
        return AsyncConnectionPool(**kwargs)
    kwargs.pop("connection_pool")
    manager = pool.sentinel_manager
    sentinel: Any = AsyncSentinel
    sentinel_pool: Any = _AsyncSentinelPool
    arguments = {**manager.sentinel_kwargs, "retry": AsyncRetry(NoBackoff(), 0)}
    sentinels = sentinel(_addresses(manager), manager.min_other_sentinels, arguments, manager._force_master_ip)
    checks = pool.proxy.check_connection
    return sentinel_pool(pool.service_name, sentinels, is_master=pool.is_master, check_connection=checks, **kwargs)


def block_seconds(seconds_left: float) -> float:
    """Return the timeout of a blocking command in seconds.

    With 0, each server would block for ever, and with 0.001, Redis 6.2 does.
    """
    return round(min(max(seconds_left, 0.002), LONGEST_BLOCK), 3)


def pop(pool: Any, key: str, seconds: float, timeout: float) -> bytes | None:
    """Wait until the list at this Redis key has an element, and remove and return its first element.

    The server gives the elements to the waiting callers in the order in which the callers came. Return None if this
    caller got no element within `seconds`. Raise NotSent if the server does not answer: its reply may be late by at
    most `timeout` seconds.
    """
    end = time.monotonic() + seconds
    try:
        connection = pool.get_connection()
        try:
            while (seconds_left := end - time.monotonic()) > 0:
                block = block_seconds(seconds_left)
                connection.send_packed_command([_blpop(key, block)], check_health=False)
                if not connection.can_read(block + timeout):
                    raise _late(block + timeout)
                if (taken := connection.read_response()) is not None:
                    return bytes(taken[1])  # BLPOP returns the key and the element
        except BaseException:
            connection.disconnect()
            raise
        finally:
            pool.release(connection)
    except (RedisError, OSError) as error:
        raise NotSent(str(error)) from error
    return None


async def apop(pool: Any, key: str, seconds: float, timeout: float) -> bytes | None:
    """Do the same as `pop`, in async code, on a new connection that only this call uses."""
    own_pool = async_pool(pool)
    connection = own_pool.make_connection()
    end = time.monotonic() + seconds
    try:
        await connection.connect()
        while (seconds_left := end - time.monotonic()) > 0:
            block = block_seconds(seconds_left)
            await connection.send_packed_command([_blpop(key, block)], check_health=False)
            if (taken := await _read(connection, block + timeout)) is not None:
                return bytes(taken[1])
    except (RedisError, OSError) as error:
        raise NotSent(str(error)) from error
    finally:
        await connection.disconnect(nowait=True)
        await own_pool.disconnect()
    return None


async def _read(connection: Any, seconds: float) -> Any:
    """Return the next reply. Raise NotSent if there is none within `seconds`, unless the event loop was late."""
    # redis-py returns None after the timeout of a single read, so this timeout never ends.
    reading = asyncio.ensure_future(connection.read_response(timeout=2 * seconds))
    try:
        for wait in (seconds, _LAST_LOOK):
            done, _ = await asyncio.wait([reading], timeout=wait)
            if done:
                return reading.result()
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    raise _late(seconds)


def _late(seconds: float) -> NotSent:
    return NotSent(f"no reply within {seconds:g} s")


def _blpop(key: str, seconds: float) -> bytes:
    return resp(b"BLPOP", key.encode(), b"%.3f" % seconds)
