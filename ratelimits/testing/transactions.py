"""Rules within Django's `TestCase` (and pytest-django's `db`). The transaction of such a test is never committed.

So no other connection sees the rules, and no edit is published on commit. Therefore all threads read the rules over the
test's own connection, and an edit takes effect at the end of its atomic block. Each test has its own Redis keys.

`django_tests.begin` lets the app work in this way. Only `ratelimits.testing.prepare_tests` calls it.
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

from django.db import connections
from django.db.backends.signals import connection_created

from ratelimits import rules
from ratelimits.conf import conf
from ratelimits.engine.publish import publications
from ratelimits.engine.server import isolate
from ratelimits.models.versions import edit_begins
from ratelimits.quota import checking


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
        self._test: _Test | None = None
        #: Whether the rules have changed since the last call of `follow`.
        self._changed = False
        #: How many edits this process had published (announced to Redis) at the last call of `follow`.
        self._publications = 0
        self._lock = threading.Lock()
        #: The connections of all threads. (An event loop runs in another thread than its test.)
        self._connections: WeakSet[Any] = WeakSet()
        self._test_numbers = count(1)
        #: The id of the process in which `_process_name` was made; 0 at first.
        self._process_id = 0
        #: A random text that no other process has.
        self._process_name = ""

    def begin(self) -> None:
        """Follow the tests of this process from now on."""
        for connection in connections.all(initialized_only=True):
            self._connected(connection)
        connection_created.connect(self._connected, dispatch_uid=__name__)
        edit_begins.connect(self._note_edit, dispatch_uid=__name__)
        rules.follow(self.follow, self)

    def _note_edit(self, using: str, **kwargs: Any) -> None:
        """Remember that a versioned row is being written, since in a test no commit publishes the edit."""
        with self._lock:
            test = self._running_test(using)
            if test is not None:
                blocks = test.blocks
                # The edit takes effect at the end of the outermost block inside the test's own block.
                test.edit_blocks.append(blocks[blocks.index(test.block) + 1])

    def follow(self) -> None:
        """Notice the start or end of a test. Forget rules that were read in another test or before an edit."""
        published = publications()
        was_edited = rules.are_replaced() and published != self._publications
        if self._take_change(conf.DATABASE) or was_edited:
            rules.forget()
            self._publications = published

    def _take_change(self, using: str) -> bool:
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
        usual Redis keys, and forget what this process remembers about the requests of the previous test.
        """
        test = self._test
        if test is not None and test.connection.alias == using and test.blocks:
            return test
        self._test = self._find(using)
        if self._test is not test:
            self._changed = True
            isolate(self.new_suffix() if self._test is not None else "")
            checking.forget()
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
        with self._lock:
            self._connections.add(connection)


def _innermost_test_block(blocks: list[Any]) -> Any:
    return next((block for block in reversed(blocks) if block._from_testcase), None)


django_tests = Tests()
