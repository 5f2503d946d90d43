"""Make connection pools like the pool of the cache, but with short timeouts, raw replies and no retries."""

from __future__ import annotations

import copy
from typing import Any

import redis
from django.core.exceptions import ImproperlyConfigured
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
from redis.retry import Retry
from redis.sentinel import SentinelConnectionPool, SentinelManagedConnection, SentinelManagedSSLConnection

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
# out, because only RESP 3 has such notices.
_ADDED_BY_POOL = ("maint_notifications", "orig_", "event_dispatcher")


def _connection_arguments(kwargs: dict[str, Any], timeout: float) -> dict[str, Any]:
    """Return the arguments of a configured connection, changed to short timeouts, raw replies and no retries."""
    arguments = {
        **{name: value for name, value in kwargs.items() if not name.startswith(_ADDED_BY_POOL)},
        "decode_responses": False,
        "protocol": 2,  # version 2 of RESP, the protocol of Redis
        "health_check_interval": 0,  # no checks
        "retry_on_timeout": False,
        "retry_on_error": [],
    }
    return arguments | _timeouts(kwargs, timeout)


def _timeouts(kwargs: dict[str, Any], timeout: float) -> dict[str, float]:
    return {name: min(kwargs.get(name) or timeout, timeout) for name in ("socket_timeout", "socket_connect_timeout")}


def no_retry_pool(pool: Any, timeout: float) -> Any:
    """Return a pool of the same kind for the same server. Its connections wait at most `timeout` seconds."""
    kwargs = _connection_arguments(pool.connection_kwargs, timeout)
    kwargs["retry"] = Retry(NoBackoff(), 0)
    if isinstance(pool, SentinelConnectionPool):
        kwargs.pop("connection_pool", None)
        sentinel: Any = SentinelConnectionPool
        return sentinel(
            pool.service_name,
            _no_retry_manager(pool.sentinel_manager, timeout),
            is_master=pool.is_master,
            check_connection=pool.proxy.check_connection,
            connection_class=pool.connection_class,
            max_connections=_UNLIMITED,
            **kwargs,
        )
    return ConnectionPool(connection_class=pool.connection_class, max_connections=_UNLIMITED, **kwargs)


#: Maximum seconds of one blocking command. A longer wait is split into several commands.
LONGEST_BLOCK = 30.0


def blocking_pool(pool: Any) -> Any:
    """Return a pool like `pool`. Its connections wait for a reply a little longer than LONGEST_BLOCK."""
    copied = no_retry_pool(pool, pool.connection_kwargs["socket_timeout"])
    copied.connection_kwargs["socket_timeout"] = LONGEST_BLOCK + 5  # seconds
    return copied


def _addresses(manager: Any) -> list[tuple[str, int]]:
    arguments = [sentinel.connection_pool.connection_kwargs for sentinel in manager.sentinels]
    return [(kwargs["host"], kwargs["port"]) for kwargs in arguments]


def _no_retry_manager(manager: Any, timeout: float) -> Any:
    """Return a manager for the same sentinels. It asks each sentinel only once, with short timeouts."""
    changed = copy.copy(manager)
    changed.sentinel_kwargs = manager.sentinel_kwargs | _timeouts(manager.sentinel_kwargs, timeout)
    arguments = changed.sentinel_kwargs | {"retry": Retry(NoBackoff(), 0)}
    changed.sentinels = [redis.Redis(host, port, **arguments) for host, port in _addresses(manager)]
    return changed


class _AsyncSentinelPool(AsyncSentinelConnectionPool):
    """An asyncio pool for the server that the sentinels name. `disconnect` also closes the sentinels' connections."""

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
    async_class = _ASYNC_CLASSES.get(pool.connection_class)
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
