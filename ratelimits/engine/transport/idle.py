"""The idle connections of a process: one list for all of its threads and greenlets."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from typing import Any
from weakref import WeakSet

from ratelimits.engine.transport.ages import JUST_NOW, ask
from ratelimits.engine.transport.connection import NotSent, OwnedConnection

#: Maximum number of idle connections to one server. If there are more, the connection that was idle longest is closed.
IDLE_CONNECTIONS = 100
#: Maximum number of calls that connect at the same time. Other calls wait, and use a connection that becomes idle.
CONNECTING = 8

#: An object that stands for this process.
_process = object()


#: All lists of this process.
_all_lists: WeakSet[IdleConnections] = WeakSet()


def _forked() -> None:
    global _process
    _process = object()
    for connections in list(_all_lists):
        connections.begin()


os.register_at_fork(after_in_child=_forked)


def process() -> object:
    """Return an object that stands for this process. A forked child has another object than its parent."""
    return _process


class IdleConnections:
    """The idle connections to the server of a pool. The connection that was given back last is taken first.

    Threads need no lock, because the operations of a deque are atomic. Give a connection back only after its last reply
    was read. If the reply was not read, do not give the connection back. Python then closes it.

    A call that finds no idle connection makes a new one. At most CONNECTING calls do this at a time. Otherwise many
    threads that begin together would make many connections, and keep the server busy. Most of the waiting threads get a
    connection that another thread gives back.

    `pool` is a pool of pools.py. Only its class and arguments of connections are used, and its `ages`.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._ages = pool.ages
        self._idle: deque[OwnedConnection] = deque(maxlen=IDLE_CONNECTIONS)
        self.begin()
        _all_lists.add(self)

    def begin(self) -> None:
        """Begin in a new process, before it has threads: perhaps a thread of its parent held a lock at the fork."""
        self._connecting = threading.Semaphore(CONNECTING)
        #: The message and the event of the last failure to connect; None if the last attempt did not fail. (Errors with
        #: the same event count as one failure.)
        self._failure: tuple[str, object] | None = None
        #: How long a connection was idle on which no answer came, until a new connection shows that the server answers.
        self._silent = 0.0

    def take(self) -> OwnedConnection:
        """Return an open connection that no other call uses. Raise NotSent if the server does not answer."""
        return self._find_idle() or self._find_or_connect()

    def give(self, connection: OwnedConnection) -> None:
        """Give a connection back."""
        connection.used = time.monotonic()
        self._idle.append(connection)

    def _find_idle(self) -> OwnedConnection | None:
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            if connection.process is _process:
                now = time.monotonic()
                idle = now - connection.used
                if now <= connection.until and (idle <= JUST_NOW or self._is_alive(connection, idle)):
                    return connection
            elif connection.process is not None:
                # A forked child must not use its parent's socket. The child only forgets the connection object, so
                # the socket stays open for the parent.
                continue
            connection.connection.disconnect()

    def _is_alive(self, connection: OwnedConnection, idle: float) -> bool:
        """Return whether a connection that was idle for `idle` seconds may be used."""
        if connection.ended():
            return False
        if idle <= self._ages.asked:
            return True
        if idle > self._ages.oldest or connection.closed():
            return False
        answers = ask(connection.connection, self._ages.wait)
        if answers is None:
            self._silent = idle
        return bool(answers)

    def _find_or_connect(self) -> OwnedConnection:
        """Wait until fewer than CONNECTING other calls connect. Then return an idle connection, or a new one."""
        earlier_failure = self._failure
        with self._connecting:
            failure = self._failure
            if failure is not None and failure is not earlier_failure:
                # While this call waited, another call failed to connect. Do not try again at once.
                raise NotSent(*failure)
            return self._find_idle() or self._connect()

    def connect(self) -> OwnedConnection:
        """Return a new connection, for a call whose connection was dropped. Raise NotSent if the server is away."""
        with self._connecting:
            return self._connect()

    def _connect(self) -> OwnedConnection:
        # Do not take the connection from the pool. A pool counts its connections, and a thread can end without giving
        # back its connection. The pool would then count this connection for ever.
        connection = OwnedConnection(self._pool.connection_class, self._pool.connection_kwargs, _process)
        try:
            connection.greet()
        except NotSent as error:
            self._silent = 0.0
            error.event = object()
            self._failure = str(error), error.event
            raise
        self._failure = None
        if self._silent:
            self._ages.was_silent(self._silent)
            self._silent = 0.0
        connection.until = self._ages.until()
        return connection


class RenewableConnections(IdleConnections):
    """Idle connections whose credentials come from a provider. They are replaced when it has new ones."""

    def __init__(self, pool: Any) -> None:
        #: All connections, also those that a call uses now.
        self._all: WeakSet[OwnedConnection] = WeakSet()
        #: How often there were new credentials.
        self._renewals = 0
        super().__init__(pool)

    def begin(self) -> None:
        super().begin()
        self._lock = threading.Lock()

    def _connect(self) -> OwnedConnection:
        renewals = self._renewals
        connection = super()._connect()
        with self._lock:
            self._all.add(connection)
            if renewals != self._renewals:
                connection.process = None  # perhaps it has the earlier credentials: use it only for this call
        return connection

    def renew(self) -> None:
        """Replace each connection before its next use."""
        with self._lock:
            self._renewals += 1
            connections = list(self._all)
        for connection in connections:
            connection.process = None
