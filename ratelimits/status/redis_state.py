"""Read the state of Redis for the status page. All servers must answer within TIMEOUT seconds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import redis
from redis.exceptions import BusyLoadingError, ResponseError

from ratelimits.conf import conf
from ratelimits.doctor.findings import ServerFinding
from ratelimits.doctor.properties import Properties, properties
from ratelimits.doctor.replay import lost_at_restart
from ratelimits.doctor.tries import refused_commands
from ratelimits.engine.server import Server, current_server
from ratelimits.engine.transport.refused import refused


@dataclass(frozen=True, slots=True)
class ServerState:
    """The state of one server."""

    #: What the server says of itself.
    said: Properties
    #: The highest version of the configuration in the server's shards; 0 if no shard has a version.
    version: int
    #: The number of open batches.
    open: int
    #: The number of sealed batches.
    sealed: int
    #: What the server refuses, as far as it was tried (see `RedisReading`).
    refuses: tuple[ServerFinding, ...] = ()
    #: That a restart throws away what was written, if it was tried.
    loses: ServerFinding | None = None


@dataclass(frozen=True, slots=True)
class RedisState:
    """The state of all servers."""

    #: The servers that answered.
    servers: tuple[ServerState, ...]
    #: The number of servers that did not answer.
    silent: int
    #: The first error; "" if all servers answered.
    error: str
    #: How long the reading took, in seconds.
    seconds: float

    @property
    def answers(self) -> bool:
        """Return whether all servers answered."""
        return not self.silent

    @property
    def loads(self) -> bool:
        """Return whether a server has started, and still loads its data."""
        return self.error.startswith(BusyLoadingError.__name__)


#: A message of a thread, and its moment (s, by `time.monotonic`). The message is the number of servers, the state of
#: one server, or an error.
_Message = tuple[int | ServerState | Exception, float]


class RedisReading:
    """Reads the state of all servers in threads. The threads begin at once, so the caller can use a database meanwhile.

    The timeout of a socket is not enough, because it limits only a single wait: for the connection, for a part of a
    reply, or for one node of a cluster. A thread that still waits ends later, after the timeouts of its socket.
    """

    def __init__(self, *, tries: bool = False) -> None:
        """Begin to read. With `tries`, also try each command that the app sends, and what a restart would lose."""
        self._started_at, self._messages = time.monotonic(), SimpleQueue[_Message]()
        _start_thread(_ask_all, self._messages, tries)

    def state(self) -> RedisState:
        """Wait for the servers, and return the states of the servers that answered within TIMEOUT seconds."""
        servers: list[ServerState] = []
        # Expect one server until the message with the number of servers arrives.
        expected, failed, error, seconds = 1, 0, "", 0.0
        while len(servers) + failed < expected:
            remaining = self._started_at + conf.TIMEOUT - time.monotonic()
            try:
                message, sent_at = self._messages.get(timeout=max(remaining, 0.0))
            except Empty:
                error, seconds = error or f"no answer within {conf.TIMEOUT:g} s", time.monotonic() - self._started_at
                break
            seconds = sent_at - self._started_at
            if isinstance(message, int):
                expected = message
            elif isinstance(message, ServerState):
                servers.append(message)
            else:
                failed, error = failed + 1, error or f"{type(message).__name__}: {message}"
        return RedisState(tuple(servers), expected - len(servers), error, seconds)


def read_redis() -> RedisState:
    """Return the state of all servers that answer within TIMEOUT."""
    return RedisReading().state()


def _start_thread(target: Any, *arguments: Any) -> None:
    Thread(target=target, args=arguments, daemon=True, name="ratelimits-status").start()


def _ask_all(messages: SimpleQueue[_Message], tries: bool) -> None:
    """Find the servers, and ask each of them in its own thread. In a cluster, one node must first list all nodes."""
    try:
        server = current_server()
        clients = list(server.wire.servers(server.keyspace, range(server.keyspace.shards)))
    except Exception as error:  # noqa: BLE001  (the page shows any error)
        _put(messages, error)
        return
    _put(messages, len(clients))
    for client, shards in clients[1:]:
        _start_thread(_ask, client, server, shards, messages, tries)
    # This thread asks the first server.
    client, shards = clients[0]
    _ask(client, server, shards, messages, tries)


def _ask(
    client: redis.Redis, server: Server, shards: Sequence[int], messages: SimpleQueue[_Message], tries: bool
) -> None:
    keyspace = server.keyspace
    try:
        with client.pipeline(transaction=False) as pipeline:
            pipeline.info()
            for shard in shards:
                pipeline.get(keyspace.head(shard))
                pipeline.exists(keyspace.open(shard))
                pipeline.llen(keyspace.sealed(shard))
            info, *replies = pipeline.execute(raise_on_error=False)
        hidden = isinstance(info, ResponseError) and refused(info, "INFO") is not None
        for failed in (reply for reply in replies if isinstance(reply, Exception)):
            raise failed
        if isinstance(info, Exception) and not hidden:
            raise info
        said = properties({} if hidden else info)
        refuses = refused_commands(server, client, shards[0]) if tries or hidden else ()
        loses = lost_at_restart(server, client, shards[0], said) if tries else None
        _put(messages, _state(said, replies, tuple(refuses), loses))
    except Exception as error:  # noqa: BLE001  (the page shows any error)
        _put(messages, error)


def _put(messages: SimpleQueue[_Message], message: int | ServerState | Exception) -> None:
    messages.put((message, time.monotonic()))


def _state(
    said: Properties, replies: list[Any], refuses: tuple[ServerFinding, ...], loses: ServerFinding | None
) -> ServerState:
    # The replies to the three commands of each shard, in the order in which `_ask` sends them.
    heads, open_batches, sealed_batches = replies[::3], replies[1::3], replies[2::3]
    # A head begins with the version of the rules.
    versions = [int(head.split()[0]) for head in heads if head]
    return ServerState(
        said=said,
        version=max(versions, default=0),
        open=sum(open_batches),
        sealed=sum(sealed_batches),
        refuses=refuses,
        loses=loses,
    )
