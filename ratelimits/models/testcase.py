"""Rules within Django's TestCase (and pytest-django's `db`), whose transaction is never committed.

There no other connection sees the rules of a test, and nobody is told of an edit. So they are read over the test's own
connection, an edit takes effect at the end of the block that makes it, and the test has Redis keys of its own.
A process that never met such a transaction pays a look at `met`.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from uuid import uuid4
from weakref import WeakSet

from django.core import mail
from django.db import connections
from django.db.backends.signals import connection_created
from django.dispatch import Signal

from ratelimits.engine.server import isolate

#: Sent when another test begins, or none is left: what a process has kept in memory was another's.
changed = Signal()


class _Test:
    """A test's transaction: its connection, and the block that will be rolled back."""

    def __init__(self, connection: Any, block: Any) -> None:
        self.connection, self.block = connection, block
        #: The blocks around edits that are not at their end yet.
        self.pending: list[Any] = []

    @property
    def blocks(self) -> list[Any]:
        """The atomic blocks that are open; none once the test is over."""
        blocks: list[Any] = self.connection.atomic_blocks
        return blocks if _innermost(blocks) is self.block else []


class Tests:
    """The tests of this process, one after the other."""

    def __init__(self) -> None:
        #: Whether this process may run tests.
        self.met = False
        self._test: _Test | None = None
        self._unread = False
        self._lock = threading.Lock()
        #: Those of all threads: an event loop that asks runs in another one than its test.
        self._connections: WeakSet[Any] = WeakSet()
        self._numbers = count(1)
        self._process = 0, ""

    def note_edit(self, using: str) -> None:
        """Remember that a versioned row is being written: in a test, nobody is told of it on commit."""
        if not self.met:
            return
        with self._lock:
            test = self._follow(using)
            if test is not None:
                blocks = test.blocks
                test.pending.append(blocks[blocks.index(test.block) + 1])

    def news(self, using: str) -> bool:
        """Return whether, since the last call, a test began or ended or the one that runs has edited rows."""
        with self._lock:
            test = self._follow(using)
            if test is not None and test.pending:
                blocks = test.blocks
                pending = [block for block in test.pending if block in blocks]
                self._unread = self._unread or len(pending) < len(test.pending)
                test.pending = pending
            unread, self._unread = self._unread, False
            return unread

    @property
    def running(self) -> bool:
        """Whether the rules are those of a test that will be rolled back."""
        return self._test is not None

    @contextmanager
    def connection(self, using: str) -> Iterator[bool]:
        """Lend the test's connection to this thread; False if there is no test.

        What is asked of it meanwhile is not among the queries that a test counts: elsewhere these are asked on a
        connection of their own.
        """
        test = self._test
        if test is None or not test.blocks:
            yield False
            return
        connection = test.connection
        counted, connection.force_debug_cursor = connection.force_debug_cursor, False
        connection.inc_thread_sharing()
        connections[using] = connection
        try:
            yield True
        finally:
            del connections[using]
            connection.dec_thread_sharing()
            connection.force_debug_cursor = counted

    def _follow(self, using: str) -> _Test | None:
        """Return the test that runs; the first time, part from what was kept of another one."""
        test = self._test
        if test is not None and test.connection.alias == using and test.blocks:
            return test
        self._test = self._find(using)
        if self._test is not test:
            self._unread = True
            isolate(self._suffix() if self._test is not None else "")
            changed.send(type(self))
        return self._test

    def _find(self, using: str) -> _Test | None:
        """Return the test whose transaction is open, in this thread rather than in another one."""
        others = [connection for connection in self._connections if connection.alias == using]
        for connection in (connections[using], *others):
            block = _innermost(connection.atomic_blocks)
            if block is not None:
                return _Test(connection, block)
        return None

    def _suffix(self) -> str:
        """Return what tells this test's keys from those of other tests, in whichever process."""
        if self._process[0] != os.getpid():
            self._process = os.getpid(), uuid4().hex[:8]
            atexit.register(isolate, "")
        return f".{self._process[1]}-{next(self._numbers)}"

    def _connected(self, connection: Any, **kwargs: Any) -> None:
        # Django makes the outbox as it sets up the environment of tests.
        self.met = self.met or hasattr(mail, "outbox")
        if self.met:
            with self._lock:
                self._connections.add(connection)


def _innermost(blocks: list[Any]) -> Any:
    return next((block for block in reversed(blocks) if block._from_testcase), None)


tests = Tests()
connection_created.connect(tests._connected, dispatch_uid="ratelimits.models.testcase")
