"""Make connection pools like the pool of the cache, but with short timeouts, raw replies and no retries."""

from __future__ import annotations

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
from redis.exceptions import AuthenticationError, ResponseError
from redis.retry import Retry
from redis.sentinel import SentinelConnectionPool, SentinelManagedConnection, SentinelManagedSSLConnection

from ratelimits.engine.transport.ages import Ages, ask, tcp_options
from ratelimits.engine.transport.connection import refuses_writes
from ratelimits.engine.transport.credentials import connect

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
