"""The idle connections of a process: one list for all of its threads and greenlets."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from typing import Any

from ratelimits.engine.transport.connection import NotSent, OwnedConnection

#: Maximum number of idle connections to one server. If there are more, the one that was idle longest is closed.
IDLE_CONNECTIONS = 100
#: A connection that was idle for more seconds than this is tested before use: the server may have closed it.
IDLE = 1.0
#: Maximum number of calls that connect at the same time. Other calls wait, and use a connection that becomes idle.
CONNECTING = 8

#: A token of this process.
_process = object()


def _forked() -> None:
    global _process
    _process = object()


os.register_at_fork(after_in_child=_forked)


def process() -> object:
    """Return a token of this process. A forked child has another token than its parent."""
    return _process


class IdleConnections:
    """The idle connections to the server of a pool. The connection that was given back last is taken first.

    Threads need no lock, because the operations of a deque are atomic. Give a connection back only after its last reply
    was read. Otherwise drop the connection: it is closed when no reference to it is left.

    A call that finds no idle connection makes one. At most CONNECTING calls do this at a time, so that a burst of
    threads does not keep the server busy with new connections. Most waiting threads get a connection that became idle.
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
        #: The message and the event of the last failure to connect; None if the last attempt succeeded.
        self._failure: tuple[str, object] | None = None

    def take(self) -> OwnedConnection:
        """Return an open connection that no other call uses. Raise NotSent."""
        return self._find_idle() or self._find_or_connect()

    def _find_idle(self) -> OwnedConnection | None:
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

    def _find_or_connect(self) -> OwnedConnection:
        """Wait for a turn to connect. Then return a connection that has become idle meanwhile, or a new one."""
        if self._process is not _process:
            self._begin()  # when the process forked, a thread of the parent may have held the semaphore
        before = self._failure
        with self._connecting:
            failure = self._failure
            if failure is not None and failure is not before:
                # Another call failed to connect while this one waited: do not try again at once.
                raise NotSent(*failure)
            return self._find_idle() or self._connect()

    def _connect(self) -> OwnedConnection:
        # Do not take the connection from the pool: a pool counts its connections, and a thread may end without giving
        # its connection back.
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
