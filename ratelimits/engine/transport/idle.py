"""The idle connections of a process: one list for all of its threads and greenlets."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from typing import Any

from ratelimits.engine.transport.connection import NotSent, OwnedConnection

#: Maximum number of idle connections to one server. Beyond it, the one that was unused longest is closed.
IDLE_CONNECTIONS = 100
#: After this many idle seconds a connection is tested before use: the server may have closed it.
IDLE = 1.0
#: Maximum number of calls that connect at the same time. Others wait, and use what is given back meanwhile.
CONNECTING = 8

_process = object()


def _forked() -> None:
    global _process
    _process = object()


os.register_at_fork(after_in_child=_forked)


def process() -> object:
    """Return a token of this process. A forked child has another token than its parent."""
    return _process


class IdleConnections:
    """The idle connections to the server of a pool. The one that was given back last is taken first.

    Threads need no lock: to take and to give back are atomic operations of a deque. Give a connection back only after
    its last reply was read; otherwise drop it, and it is closed with its last reference. A call that finds the list
    empty connects. At most CONNECTING calls do so at a time: a burst of threads would keep the server busy with
    connecting, and most of them find a connection that was given back when it is their turn.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._idle: deque[OwnedConnection] = deque(maxlen=IDLE_CONNECTIONS)
        #: Give a connection back.
        self.give = self._idle.append
        self._begin()

    def _begin(self) -> None:
        self._process = _process
        self._connecting = threading.Semaphore(CONNECTING)
        #: The message and the event of the last attempt to connect, if it failed; None if it succeeded.
        self._failure: tuple[str, object] | None = None

    def take(self) -> OwnedConnection:
        """Return a connection, connected, that no other call uses. Raise NotSent."""
        return self._find() or self._wait()

    def _find(self) -> OwnedConnection | None:
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            now = time.monotonic()
            # A forked child must not use its parent's socket. Dropping the object leaves the parent's socket open.
            if connection.process is _process and (now - connection.used <= IDLE or not connection.closed()):
                connection.used = now
                return connection

    def _wait(self) -> OwnedConnection:
        """Connect, or take a connection that was given back while this call waited for its turn."""
        if self._process is not _process:
            self._begin()  # a thread of the parent may have been connecting
        before = self._failure
        with self._connecting:
            failure = self._failure
            if failure is not None and failure is not before:
                # The server was away for the call that connected just now, so it is away for all that waited.
                raise NotSent(*failure)
            return self._find() or self._connect()

    def _connect(self) -> OwnedConnection:
        # Not by the pool, which counts its connections: a thread may end without giving one back.
        connection = OwnedConnection(self._pool.connection_class, self._pool.connection_kwargs, _process)
        try:
            connection.greet()
        except NotSent as error:
            error.event = object()
            self._failure = str(error), error.event
            raise
        self._failure = None
        connection.used = time.monotonic()
        return connection
