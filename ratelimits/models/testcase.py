"""Rules within Django's `TestCase` (and pytest-django's `db`). The transaction of such a test is never committed.

So no other connection sees the rules, and no edit is published on commit. Therefore all threads read the rules over the
test's own connection, and an edit takes effect at the end of its atomic block. Each test has its own Redis keys.

In a process that runs no tests, `Tests.possible` stays false. Then this module changes nothing.
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

#: Sent when another test has begun or the last test has ended. Rules in the memory of the process are then too old.
changed = Signal()


class _Test:
    """The transaction of a test: its connection, and the atomic block that Django will roll back."""

    def __init__(self, connection: Any, block: Any) -> None:
        self.connection, self.block = connection, block
        #: The atomic blocks that contain edits. `take_change` removes a block when it has ended.
        self.edit_blocks: list[Any] = []

    @property
    def blocks(self) -> list[Any]:
        """Return the connection's open atomic blocks, or an empty list after the end of the test."""
        blocks: list[Any] = self.connection.atomic_blocks
        return blocks if _innermost_test_block(blocks) is self.block else []


class Tests:
    """The tests of this process, which run one after another."""

    def __init__(self) -> None:
        #: Whether Django has prepared this process for tests.
        self.possible = False
        self._test: _Test | None = None
        #: Whether the rules have changed since the last call of `take_change`.
        self._changed = False
        self._lock = threading.Lock()
        #: The connections of all threads. (An event loop runs in another thread than its test.)
        self._connections: WeakSet[Any] = WeakSet()
        self._test_numbers = count(1)
        #: The id of the process in which `_process_name` was made; 0 at first.
        self._process_id = 0
        #: A random text that no other process has.
        self._process_name = ""

    def note_edit(self, using: str) -> None:
        """Remember that a versioned row is being written, since in a test no commit publishes the edit."""
        if not self.possible:
            return
        with self._lock:
            test = self._running_test(using)
            if test is not None:
                blocks = test.blocks
                # The edit takes effect at the end of the outermost block inside the test's own block.
                test.edit_blocks.append(blocks[blocks.index(test.block) + 1])

    def follow(self, using: str) -> None:
        """Notice the start or end of a test. Code that does not read the rules calls this before it asks Redis."""
        if self.possible:
            with self._lock:
                self._running_test(using)

    def take_change(self, using: str) -> bool:
        """Return whether the rules have changed since the last call: by an edit, or by the start or end of a test."""
        with self._lock:
            test = self._running_test(using)
            if test is not None and test.edit_blocks:
                blocks = test.blocks
                still_open = [block for block in test.edit_blocks if block in blocks]
                self._changed = self._changed or len(still_open) < len(test.edit_blocks)
                test.edit_blocks = still_open
            has_changed, self._changed = self._changed, False
            return has_changed

    @property
    def running(self) -> bool:
        """Return whether the rules in force belong to a test, and so will be rolled back."""
        return self._test is not None

    @contextmanager
    def connection(self, using: str) -> Iterator[bool]:
        """Let this thread use the test's connection within the block. Yield whether a test is running.

        `assertNumQueries` does not count the queries of the block, because in production they run on a connection of
        their own.
        """
        test = self._test
        if test is None or not test.blocks:
            yield False
            return
        connection = test.connection
        force_debug_cursor = connection.force_debug_cursor
        connection.force_debug_cursor = False
        connection.inc_thread_sharing()
        connections[using] = connection
        try:
            yield True
        finally:
            del connections[using]
            connection.dec_thread_sharing()
            connection.force_debug_cursor = force_debug_cursor

    def _running_test(self, using: str) -> _Test | None:
        """Return the running test; None if no test runs.

        If a test has begun or ended since the last call, change to the Redis keys of the running test, or back to the
        usual Redis keys. Then send `changed`.
        """
        test = self._test
        if test is not None and test.connection.alias == using and test.blocks:
            return test
        self._test = self._find(using)
        if self._test is not test:
            self._changed = True
            isolate(self.new_suffix() if self._test is not None else "")
            changed.send(type(self))
        return self._test

    def _find(self, using: str) -> _Test | None:
        """Return the test whose transaction is open, or None. A transaction of this thread is preferred."""
        others = [connection for connection in self._connections if connection.alias == using]
        for connection in (connections[using], *others):
            block = _innermost_test_block(connection.atomic_blocks)
            if block is not None:
                return _Test(connection, block)
        return None

    def new_suffix(self) -> str:
        """Return a new suffix for the Redis keys of a test. No other test has it, in any process."""
        if self._process_id != os.getpid():
            self._process_id, self._process_name = os.getpid(), uuid4().hex[:8]
            atexit.register(isolate, "")  # This deletes the Redis keys of the last test.
        return f".{self._process_name}-{next(self._test_numbers)}"

    def _connected(self, connection: Any, **kwargs: Any) -> None:
        # Django sets `mail.outbox` when it prepares the process for tests.
        self.possible = self.possible or hasattr(mail, "outbox")
        if self.possible:
            with self._lock:
                self._connections.add(connection)


def _innermost_test_block(blocks: list[Any]) -> Any:
    return next((block for block in reversed(blocks) if block._from_testcase), None)


django_tests = Tests()
connection_created.connect(django_tests._connected, dispatch_uid="ratelimits.models.testcase")
