"""Make the connections for decisions, with the settings of the configured django-redis cache.

The connections have short timeouts. They never send a call again that the server has perhaps carried out, because a
decision that is sent twice is charged twice. A blocking call takes an idle connection of the process, or makes one. The
tasks of an event loop share one connection. If the cache has a special pool, such as the pool of Sentinel, each
blocking call takes a connection from a pool of the same kind.

A call that was not sent raises NotSent. If the reply was lost, the call raises Unanswered.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import redis
from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured
from redis.connection import BlockingConnectionPool, ConnectionPool
from redis.exceptions import NoScriptError, RedisError, ResponseError
from redis.sentinel import SentinelConnectionPool

from ratelimits.conf import conf, embedded
from ratelimits.embedded import own_url, shared_url
from ratelimits.engine.assemble.scripts import Script, Sendable, evaluating, loading, loading_first
from ratelimits.engine.keys import Keyspace
from ratelimits.engine.transport import pools
from ratelimits.engine.transport.ages import follow
from ratelimits.engine.transport.connection import RUN_SCRIPT, Dropped, NotSent, Unanswered, exchange, greet
from ratelimits.engine.transport.idle import IdleConnections, RenewableConnections, process
from ratelimits.engine.transport.multiplexed import MAX_LOADS, Multiplexed
from ratelimits.engine.transport.pools import async_pool, no_retry_pool
from ratelimits.engine.transport.refused import refused


def configured(alias: str) -> Any:
    """Return the client of a django-redis cache alias. Raise ImproperlyConfigured for any other cache.

    If the project has no configured server, return for CACHE_ALIAS a client of the embedded server. Raise
    ImproperlyConfigured if the project is not allowed to use this server, and embedded.ServerStartError if this server
    cannot be started.
    """
    if alias == conf.CACHE_ALIAS and embedded.is_needed():
        return redis.Redis.from_url(_embedded_url())
    backend = caches[alias]
    if not hasattr(backend, "client") or not hasattr(backend.client, "get_client"):
        raise ImproperlyConfigured(
            f"RATELIMITS['CACHE_ALIAS'] is {alias!r}, which is not a django-redis cache:"
            " add an alias with BACKEND 'django_redis.cache.RedisCache' to CACHES and name this alias"
        )
    return backend.client.get_client(write=True)


def _embedded_url() -> str:
    if not embedded.is_allowed():
        raise ImproperlyConfigured(f"The project has no Redis server, and DEBUG is off. {embedded.HINT}")
    return own_url() if embedded.own else shared_url(embedded.folder())


def try_options(alias: str, timeout: float) -> None:
    """Make a connection for a cache alias, but do not open it. Raise an error if its options are wrong."""
    source = configured(alias)
    if isinstance(source, redis.Redis):
        no_retry_pool(source.connection_pool, timeout).make_connection()


def try_options_of_async_code(alias: str, timeout: float) -> None:
    """Do the same with a connection for async code: redis.asyncio does not know all options of redis-py.

    Raise ImproperlyConfigured if there are no such connections. Then each async request raises this error too.
    """
    source = configured(alias)
    if isinstance(source, redis.Redis):
        async_pool(no_retry_pool(source.connection_pool, timeout)).make_connection()


class Wire:
    """The connections to the server of one django-redis cache alias."""

    def __init__(self, alias: str, timeout: float) -> None:
        source = configured(alias)
        if not isinstance(source, redis.Redis):
            raise ImproperlyConfigured(f"the client {type(source).__name__} of cache {alias!r} is not supported")
        self._open(source.connection_pool, timeout)

    def _open(self, pool: Any, timeout: float) -> None:
        self._pool = no_retry_pool(pool, timeout)
        #: The pool of the project, which the same provider of credentials perhaps serves.
        self._source = pool
        provider = pool.connection_kwargs.get("credential_provider")
        #: The idle connections; None if the cache has a special pool, such as the pool of Sentinel. A special pool must
        #: be asked for each connection.
        self._idle: IdleConnections | None = None
        if type(pool) in (ConnectionPool, BlockingConnectionPool):
            self._idle = IdleConnections(self._pool) if provider is None else RenewableConnections(self._pool)
        #: For each connection of a special pool, the run of its server.
        self._runs: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        #: For each event loop its connection, and the generator that closes the connection.
        self._loops: WeakKeyDictionary[Any, tuple[Multiplexed, Any]] = WeakKeyDictionary()
        #: The connections of the parent process, in a forked child. They must stay open.
        self._parents: list[Any] = []
        self._timeout = timeout
        #: A redis-py client on the same pool, for everything except decisions: sealing, draining and publishing.
        self.client: redis.Redis = redis.Redis(connection_pool=self._pool)
        if provider is not None:
            follow(provider, self)

    def renew(self) -> None:
        """Replace each connection before its next use, because there are new credentials."""
        if isinstance(self._idle, RenewableConnections):
            self._idle.renew()
        self._pool.renew()
        for loop in [reference() for reference in self._loops.keyrefs()]:
            if loop in self._loops:
                self._loops[loop][0].renew()
        # A provider calls only one function, which is now the one of this app. So do the same for the project's pool.
        if type(self._source) in (ConnectionPool, SentinelConnectionPool):
            self._source.disconnect(inuse_connections=False)

    def servers(self, keyspace: Keyspace, shards: Sequence[int]) -> Iterator[tuple[redis.Redis, list[int]]]:
        """Yield a client for each server, with a list of the given shards that this server has.

        Here one server has all shards. A cluster has several servers: if none of them answers, raise NotReached.
        """
        yield self.client, list(shards)

    def client_of(self, keyspace: Keyspace, shard: int) -> redis.Redis:
        """Return a client for the server that has this shard. In a cluster, raise NotReached if no node answers."""
        return self.client

    def wire_of(self, keyspace: Keyspace, shard: int) -> Wire:
        """Return the connections to the server that has this shard. Raise the errors of `client_of`."""
        return self

    def call(self, command: Sendable, nonce: bytes) -> Any:
        """Send a command with this nonce, and return the reply.

        If the server does not have the script, load the script and send the command again. If the user may not load
        scripts, send the script's text instead. If the connection was lost before the whole command was sent, send the
        command again on a new connection. All of this is safe, because the server did nothing.

        Raise NotSent, Unanswered, or redis.exceptions.ResponseError if the server replies with an error.
        """
        idle = self._idle
        if idle is None:
            return self._call_with_pool(command, nonce)
        owned = idle.take()
        try:
            try:
                reply = owned.exchange(command.to_bytes(owned.run, nonce))
            except NoScriptError:
                reply = _load_and_repeat(owned.exchange, command, owned.run, nonce)
        except ResponseError:
            idle.give(owned)
            raise
        except Dropped:
            return self._repeat(idle, command, nonce)
        # After any other error do not give the connection back: its next reply could belong to this call.
        idle.give(owned)
        return reply

    def _repeat(self, idle: IdleConnections, command: Sendable, nonce: bytes) -> Any:
        """Send a command on a new connection, after its connection was dropped. Raise the errors of `call`."""
        owned = idle.connect()
        try:
            reply = _exchanged(owned.exchange, command, owned.run, nonce)
        except ResponseError:
            idle.give(owned)
            raise
        idle.give(owned)
        return reply

    def _call_with_pool(self, command: Sendable, nonce: bytes) -> Any:
        """Do the work of `call` with a special pool."""
        for is_second_try in (False, True):
            connection, run = self._take()
            try:
                return _exchanged(partial(exchange, connection), command, run, nonce)
            except Dropped:
                if is_second_try:
                    raise
            finally:
                self._pool.release(connection)  # if the connection failed, `exchange` has closed it before
        raise AssertionError

    def probe(self) -> None:
        """Raise an error if the server does not answer, still loads its data, or is a replica."""
        info = self._asked("INFO")
        if info is None:
            info = self._asked("EVAL", RUN_SCRIPT.text.decode(), "0") or ""  # fails while the server loads its data
        for line, state in (("loading:1", "loads its data"), ("role:slave", "is a replica")):
            if line in info:
                raise NotSent(f"the server {state}")

    def _asked(self, *command: str) -> str | None:
        """Return the reply to a command, which is a text, from a new connection; None if the server refuses it."""
        connection: Any = self._pool.get_connection()
        try:
            connection.send_command(*command)
            reply = connection.read_response()
        except ResponseError as error:
            if refused(error) is None:
                raise
            return None
        finally:
            connection.disconnect()
            self._pool.release(connection)
        return reply.decode(errors="replace") if isinstance(reply, bytes) else str(reply)

    def pop(self, key: str, seconds: float) -> bytes | None:
        """Wait until the list at this Redis key has an element, and remove and return its first element.

        The server gives the elements to the waiting callers in the order in which the callers came. Return None if this
        caller got no element within `seconds`. Raise NotSent if the server does not answer.
        """
        return pools.pop(self._pool, key, seconds, self._timeout)

    async def apop(self, key: str, seconds: float) -> bytes | None:
        """Do the same as `pop`, in async code, on a new connection that only this call uses."""
        return await pools.apop(self._pool, key, seconds, self._timeout)

    def stream(self, makers: Sequence[Callable[[str], bytes]], scripts: set[Script]) -> list[Any]:
        """Send many commands at once and return their replies in order.

        The first command of each of the scripts sends the text of the script, so the server needs none of them. Each
        item of `makers` gets the run of the server and returns the bytes of one command. Only the simulator calls
        this method. Raise the errors of `call`. If the scripts are deleted meanwhile, raise ResponseError: some of the
        commands were not carried out.
        """
        if self._idle is None:
            connection, run = self._take()
            try:
                return _streamed(connection, run, makers, scripts)
            finally:
                self._pool.release(connection)
        owned = self._idle.take()
        try:
            replies = _streamed(owned.connection, owned.run, makers, scripts)
        except ResponseError:
            self._idle.give(owned)
            raise
        self._idle.give(owned)
        return replies

    def _take(self) -> tuple[Any, str]:
        """Return a connection of a special pool and the run of its server. Raise NotSent if no server answers."""
        try:
            connection = self._pool.get_connection()
        except (RedisError, OSError) as error:
            raise NotSent(str(error)) from error
        run = self._runs.get(connection)
        if run is None:
            try:
                run = greet(connection)
            except BaseException:
                connection.disconnect()  # perhaps a reply was not read
                self._pool.release(connection)
                raise
            self._runs[connection] = run
            connection.register_connect_callback(self._connected_anew)
        return connection, run

    def _connected_anew(self, connection: Any) -> None:
        """Forget the server's run after the pool has connected again: perhaps the server has restarted."""
        self._runs.pop(connection, None)

    async def _open_shared(self, loop: Any) -> Multiplexed:
        """Make and return the connection of an event loop, when this process uses the loop for the first time."""
        # Forget loops that nobody uses any more: their connections refer to them. List the references in one step,
        # because other threads can add their loops at the same time.
        for known_loop in [reference() for reference in self._loops.keyrefs()]:
            known = self._loops.get(known_loop) if known_loop is not None else None
            if known is not None and known[0].is_left:
                self._loops.pop(known_loop, None)
        if loop in self._loops:
            # This process is a forked child that uses its parent's loop. Keep a reference to the parent's connection:
            # without this reference Python would close the connection, also for the parent.
            self._parents.append(self._loops[loop])
        shared = Multiplexed(async_pool(self._pool), self._timeout, self._pool.ages)
        end = self._close_with_loop(loop, shared)
        self._loops[loop] = shared, end
        await anext(end)
        return shared

    async def _close_with_loop(self, loop: Any, shared: Multiplexed) -> AsyncGenerator[None]:
        """Close the connection of an event loop when the loop ends.

        This is an asynchronous generator, because `asyncio.run` closes all such generators before it closes the loop.
        """
        try:
            yield
        finally:
            self._loops.pop(loop, None)
            await shared.close()

    async def acall(self, command: Sendable, nonce: bytes) -> Any:
        """Do the same as `call`, in async code, on the connection of the event loop."""
        loop = asyncio.get_running_loop()
        shared = self._loops.get(loop)
        # A forked child needs connections of its own.
        if shared is None or shared[0].process is not process():
            return await (await self._open_shared(loop)).exchange(command, nonce)
        return await shared[0].exchange(command, nonce)


def _exchanged(exchange: Callable[[bytes], Any], command: Sendable, run: str, nonce: bytes) -> Any:
    """Send a command and return its reply. If the server does not have the script, load it first."""
    try:
        return exchange(command.to_bytes(run, nonce))
    except NoScriptError:
        return _load_and_repeat(exchange, command, run, nonce)


def _load_and_repeat(exchange: Callable[[bytes], Any], command: Sendable, run: str, nonce: bytes) -> Any:
    """Load a command's script, send the command, and return its reply.

    If the script is deleted before the server gets the command, load and send again, at most MAX_LOADS times in all. If
    the user may not load scripts, send the script's text with the command.
    """
    for tries_left in reversed(range(MAX_LOADS)):
        try:
            exchange(loading(command.script))
        except ResponseError as error:
            if refused(error) is None:
                raise
            return exchange(evaluating(command.to_bytes(run, nonce), command.script))
        try:
            return exchange(command.to_bytes(run, nonce))
        except NoScriptError:
            if not tries_left:
                raise
    raise AssertionError


def _streamed(connection: Any, run: str, makers: Sequence[Callable[[str], bytes]], scripts: set[Script]) -> list[Any]:
    """Do the work of `Wire.stream` on one connection."""
    try:
        commands = loading_first([make(run) for make in makers], scripts)
        connection.send_packed_command([b"".join(commands)], check_health=False)
        replies: list[Any] = []
        failure: ResponseError | None = None
        for _command in commands:
            try:
                replies.append(connection.read_response())
            except ResponseError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return replies
    except ResponseError:
        raise
    except (RedisError, OSError) as error:
        connection.disconnect()
        raise Unanswered(str(error)) from error
