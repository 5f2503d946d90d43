"""The connections that no call is using: one list for all threads and greenlets of a process."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from typing import Any

from ratelimits.engine.transport.connection import NotSent, OwnedConnection

#: Idle connections that a process keeps to one server; one more that is given back closes the one unused longest.
IDLE_CONNECTIONS = 100
#: After this many idle seconds a connection is looked at before it is used: the server may have closed it.
IDLE = 1.0
#: Calls that connect at the same time; the next one waits, and takes what is given back meanwhile.
CONNECTING = 8

_process = object()


def _forked() -> None:
    global _process
    _process = object()


os.register_at_fork(after_in_child=_forked)


def process() -> object:
    """Return a token of this process; a forked child has another one than its parent."""
    return _process


class IdleConnections:
    """The idle connections to the server of a pool. The one given back last is taken first.

    Threads need no lock for it: taking and giving back is one atomic operation of a deque each. Only a connection whose
    last reply was read is given back; one that is not given back is closed when its last reference goes. A call that
    finds the list empty connects, but CONNECTING at a time: a burst of threads would keep the server busy with nothing
    but connections, and most of them find one that was given back when it is their turn.
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
        #: Of the attempt to connect that ended last: what it failed with, and the event. None if it succeeded.
        self._failure: tuple[str, object] | None = None

    def take(self) -> OwnedConnection:
        """Return a connection that nobody else uses, connected. Raise NotSent."""
        return self._find() or self._wait()

    def _find(self) -> OwnedConnection | None:
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            now = time.monotonic()
            # A child of a fork must not speak on its parent's socket; dropping the object leaves the parent's open.
            if connection.process is _process and (now - connection.used <= IDLE or not connection.closed()):
                connection.used = now
                return connection

    def _wait(self) -> OwnedConnection:
        """Connect, or take what was given back while this call waited to connect."""
        if self._process is not _process:
            self._begin()  # a thread of the parent's may have been connecting
        before = self._failure
        with self._connecting:
            failure = self._failure
            if failure is not None and failure is not before:
                # The server was away for another one just now: it is for all who waited behind that.
                raise NotSent(*failure)
            return self._find() or self._connect()

    def _connect(self) -> OwnedConnection:
        # Not one that the pool counts: a thread may end before it gives one back, and the pool would not hear of it.
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
