"""Pools of the configured cache's connections, made strict: short timeouts, raw replies, and nothing that retries."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ImproperlyConfigured
from redis.asyncio.connection import BlockingConnectionPool as AsyncConnectionPool
from redis.asyncio.connection import Connection as AsyncConnection
from redis.asyncio.connection import SSLConnection as AsyncSSLConnection
from redis.asyncio.connection import UnixDomainSocketConnection as AsyncUnixDomainSocketConnection
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.connection import Connection, ConnectionPool, SSLConnection, UnixDomainSocketConnection
from redis.retry import Retry
from redis.sentinel import SentinelConnectionPool

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


def _limits(kwargs: dict[str, Any], timeout: float) -> dict[str, Any]:
    """The configured connection's arguments, with short timeouts, raw replies and nothing that retries."""
    # What a pool adds for the server's maintenance notices (RESP 3 only) belongs to that pool.
    arguments = {
        **{name: value for name, value in kwargs.items() if not name.startswith(_OF_THE_POOL)},
        "decode_responses": False,
        "protocol": 2,
        "health_check_interval": 0,
        "retry_on_timeout": False,
        "retry_on_error": [],
    }
    for name in ("socket_timeout", "socket_connect_timeout"):
        arguments[name] = min(kwargs.get(name) or timeout, timeout)
    return arguments


def strict(pool: Any, timeout: float) -> Any:
    """A pool of the same kind to the same server, no call of which takes longer than `timeout` seconds."""
    kwargs = _limits(pool.connection_kwargs, timeout)
    kwargs["retry"] = Retry(NoBackoff(), 0)
    if isinstance(pool, SentinelConnectionPool):
        kwargs.pop("connection_pool", None)
        sentinel: Any = SentinelConnectionPool
        return sentinel(
            pool.service_name, pool.sentinel_manager, is_master=pool.is_master, max_connections=_MANY, **kwargs
        )
    return ConnectionPool(connection_class=pool.connection_class, max_connections=_MANY, **kwargs)


def twin(pool: Any, timeout: float) -> Any:
    """The pool's twin for one event loop; ImproperlyConfigured where redis-py has none."""
    kwargs = dict(pool.connection_kwargs)
    kwargs.pop("parser_class", None)
    kwargs["retry"] = AsyncRetry(NoBackoff(), 0)
    known = _ASYNC_CLASSES.get(pool.connection_class)
    if known is None:
        raise ImproperlyConfigured(
            f"{pool.connection_class.__name__} has no async twin: use the sync functions in a thread"
        )
    return AsyncConnectionPool(connection_class=known, max_connections=ASYNC_CONNECTIONS, timeout=timeout, **kwargs)
