"""Rules within Django's TestCase (and pytest-django's `db`), whose transaction is never committed.

In such a test no other connection sees the rules, and no edit is published on commit. So rules are read over the test's
own connection, an edit takes effect at the end of the atomic block that makes it, and each test has its own Redis keys.
A process that runs no tests only reads the attribute `possible`.
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

#: Sent when another test begins or the last one has ended: what the process keeps in memory belongs to the test before.
changed = Signal()


class _Test:
    """A test's transaction: its connection, and the atomic block that will be rolled back."""

    def __init__(self, connection: Any, block: Any) -> None:
        self.connection, self.block = connection, block
        #: The atomic blocks of edits, until they have ended.
        self.edit_blocks: list[Any] = []

    @property
    def blocks(self) -> list[Any]:
        """Return the open atomic blocks; an empty list once the test is over."""
        blocks: list[Any] = self.connection.atomic_blocks
        return blocks if _innermost(blocks) is self.block else []


class Tests:
    """The tests of this process, which run one after another."""

    def __init__(self) -> None:
        #: Whether this process may run tests.
        self.possible = False
        self._test: _Test | None = None
        self._unread = False
        self._lock = threading.Lock()
        #: The connections of all threads: an event loop runs in another thread than its test.
        self._connections: WeakSet[Any] = WeakSet()
        self._numbers = count(1)
        self._process = 0, ""

    def note_edit(self, using: str) -> None:
        """Remember that a versioned row is being written, since in a test it is not published on commit."""
        if not self.possible:
            return
        with self._lock:
            test = self._follow(using)
            if test is not None:
                blocks = test.blocks
                test.edit_blocks.append(blocks[blocks.index(test.block) + 1])

    def take_change(self, using: str) -> bool:
        """Return whether, since the last call, a test began or ended or the running test has edited rows."""
        with self._lock:
            test = self._follow(using)
            if test is not None and test.edit_blocks:
                blocks = test.blocks
                still_open = [block for block in test.edit_blocks if block in blocks]
                self._unread = self._unread or len(still_open) < len(test.edit_blocks)
                test.edit_blocks = still_open
            unread, self._unread = self._unread, False
            return unread

    @property
    def running(self) -> bool:
        """Return whether the rules in force are those of a test, which will be rolled back."""
        return self._test is not None

    @contextmanager
    def connection(self, using: str) -> Iterator[bool]:
        """Let this thread use the test's connection; yield False if there is no test.

        Queries within the block are not among those that the test counts (assertNumQueries): outside tests they run on
        another connection.
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
        """Return the running test. If it is not the one of the last call, isolate its keys and send `changed`."""
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
        """Return the test whose transaction is open; a transaction of this thread comes first."""
        others = [connection for connection in self._connections if connection.alias == using]
        for connection in (connections[using], *others):
            block = _innermost(connection.atomic_blocks)
            if block is not None:
                return _Test(connection, block)
        return None

    def _suffix(self) -> str:
        """Return a suffix for this test's Redis keys that no other test has, in this process or in another one."""
        if self._process[0] != os.getpid():
            self._process = os.getpid(), uuid4().hex[:8]
            atexit.register(isolate, "")
        return f".{self._process[1]}-{next(self._numbers)}"

    def _connected(self, connection: Any, **kwargs: Any) -> None:
        # Django makes the outbox when it sets up the test environment.
        self.possible = self.possible or hasattr(mail, "outbox")
        if self.possible:
            with self._lock:
                self._connections.add(connection)


def _innermost(blocks: list[Any]) -> Any:
    return next((block for block in reversed(blocks) if block._from_testcase), None)


tests = Tests()
connection_created.connect(tests._connected, dispatch_uid="ratelimits.models.testcase")
