"""Read the rules in a thread of its own, with its own connection to the database.

A request's transaction cannot be used: it may see an old state, or an edit that is not committed, as the new version.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from django.db import Error as DatabaseError
from django.db import connections

from ratelimits.conf import conf
from ratelimits.models.testcase import tests
from ratelimits.models.versions import ConfigVersion
from ratelimits.rules import keyed, rows
from ratelimits.rules.snapshot import Snapshot

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

#: Maximum seconds to wait for one answer of the database.
PATIENCE = 5.0
#: After a failure the database is not asked again for this time (µs), unless a reload without a version is asked for.
_PAUSE = 1_000_000
#: If the clock steps back by more than this (µs), rows are evaluated again.
_STEP = 1_000_000


class RulesUnavailable(Exception):
    """The database could not be asked for the rules, and the current ones are not good enough."""


def _now() -> int:
    return time.time_ns() // 1000


class Loader:
    """Holds the newest snapshot of this process and updates it. `clock` returns µs since 1970 UTC."""

    def __init__(self, clock: Callable[[], int] = _now) -> None:
        self._clock = clock
        self._current: Snapshot | None = None
        self._refresh_at = 0
        self._failure: tuple[int, str] | None = None
        self._behind = 0  # the version that Redis has and the database does not
        self._logged_behind = 0  # the last such version that was logged
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._query_began_at: float | None = None  # when the query began that the database has not answered
        self._lock = threading.Lock()
        self._wanted: set[int] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ratelimits-rules")

    def current(self) -> Snapshot:
        """Return the rules that hold now. Read them at first use; raise RulesUnavailable if that fails.

        Later calls only look at the clock. After RELOAD_INTERVAL the rules are read again in the background.
        """
        if tests.possible:
            self._follow_test()
        current, now = self._current, self._clock()
        if current is None:
            return self._wait(self._submit(self._load, 0))
        if current.seen_at - _STEP <= now < min(current.good_until, self._refresh_at):
            return current
        return self._renew(current, now)

    async def acurrent(self) -> Snapshot:
        """Do as `current`, awaited."""
        if tests.possible:
            self._follow_test()
        if self._current is None:
            return await self._await(self._submit(self._load, 0))
        return self.current()

    def reload(self, minimum_version: int | None = None) -> Snapshot:
        """Return the rules as the database has them, or the current ones if they have at least `minimum_version`.

        Raise RulesUnavailable if the database cannot be asked. The current rules stay in force then.
        """
        return self._wait(self._submit(self._load, minimum_version))

    async def areload(self, minimum_version: int | None = None) -> Snapshot:
        """Do as `reload`, awaited."""
        return await self._await(self._submit(self._load, minimum_version))

    async def aload(self, shards: frozenset[int]) -> Snapshot:
        """Return a snapshot in which these shards of keys are read."""
        return await self._await(self._want(shards))

    def forget(self) -> None:
        """Forget all rules. The next use reads everything."""
        if self._pid != os.getpid():
            self._begin()
        with self._lock:
            self._current = self._failure = None
            self._behind = self._logged_behind = 0

    def _follow_test(self) -> None:
        """In a test, forget what was read in another test's transaction or before an edit."""
        if tests.take_change(conf.DATABASE):
            self.forget()

    def _renew(self, current: Snapshot, now: int) -> Snapshot:
        """After an edge of validity, evaluate the same rows again. After the interval, read them in the background."""
        if self._pid != os.getpid():
            self._begin()
        with self._lock:
            if now >= self._refresh_at or now < current.seen_at - _STEP:
                self._refresh_at = now + self._interval()
                self._start(self._refresh)
            if self._current is current and not current.seen_at - _STEP <= now < current.good_until:
                self._current = self._at(current.rows, versioned=current.versioned)
            return self._current or current

    def _refresh(self) -> None:
        current, behind = self._current, self._behind
        self._behind = 0
        if behind and current is not None:
            self._use(current.rows)  # the next decision shows whether Redis is still ahead
            return
        try:
            self._load(None)
        except RulesUnavailable as error:
            logger.warning("The rules could not be read again; the current ones stay in force: %s", error)

    def _at(self, current: rows.Rows, *, versioned: bool) -> Snapshot:
        return Snapshot(current, self._clock, lambda shards: self._wait(self._want(shards)), versioned=versioned)

    def _interval(self) -> int:
        return int(conf.RELOAD_INTERVAL * 1_000_000)

    def _submit(self, job: Callable[[T], R], argument: T) -> Future[R]:
        if self._pid != os.getpid():
            self._begin()  # a forked child has no threads
        if self._failure is not None and argument is not None:
            at, message = self._failure
            if self._clock() - at < _PAUSE:
                raise RulesUnavailable(message)
        future = self._start(job, argument)
        if future is None:
            raise RulesUnavailable("the process has no thread to read the rules: it ends, or has too many")
        return future

    def _start(self, job: Callable[..., R], *arguments: Any) -> Future[R] | None:
        """Have the thread do a job. Return None if there is no thread, as when the process ends."""
        try:
            return self._thread.submit(job, *arguments)
        except RuntimeError as error:
            logger.warning("The rules are not read: %s", error)
            return None

    def _want(self, shards: frozenset[int]) -> Future[Snapshot]:
        self._wanted.update(shards)
        return self._submit(self._load_shards, shards)

    def _wait(self, future: Future[R]) -> R:
        """Wait for a job of the thread. Raise RulesUnavailable if one query takes PATIENCE seconds.

        The time in which the thread does other jobs, or gets no processor, does not count.
        """
        while True:
            try:
                return future.result(self._patience_left())
            except TimeoutError:
                if not future.done() and self._patience_left() <= 0:
                    raise RulesUnavailable(f"the database did not answer within {PATIENCE:g} s") from None

    async def _await(self, future: Future[R]) -> R:
        """Do as `_wait`, awaited."""
        answer = asyncio.wrap_future(future)
        # If the caller is cancelled meanwhile, mark the error as seen.
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        while not (await asyncio.wait([answer], timeout=self._patience_left()))[0]:
            if not future.done() and self._patience_left() <= 0:
                raise RulesUnavailable(f"the database did not answer within {PATIENCE:g} s")
        return answer.result()

    def _patience_left(self) -> float:
        """Return how many seconds the database has left to answer."""
        began_at = self._query_began_at
        return PATIENCE if began_at is None else max(began_at + PATIENCE - time.monotonic(), 0)

    def _timed(self, execute: Callable[..., R], *args: Any) -> R:
        """In the thread: run a statement, and note when it began."""
        self._query_began_at = time.monotonic()
        try:
            return execute(*args)
        finally:
            self._query_began_at = None

    def _load(self, minimum_version: int | None) -> Snapshot:
        """In the thread: update the rows, unless another job has done so meanwhile."""
        current = self._current
        if (
            current is not None
            and minimum_version is not None
            and max(current.version, self._behind) >= minimum_version
        ):
            return current
        rows_read = self._query(lambda: rows.read(conf.DATABASE, current.rows if current is not None else None))
        if minimum_version is not None and rows_read.version < minimum_version:
            self._behind = minimum_version
            self._log_behind(rows_read.version)
        return self._use(rows_read)

    def _log_behind(self, version: int) -> None:
        if self._behind == self._logged_behind:
            return
        self._logged_behind = self._behind
        logger.error(
            "Redis asks for configuration version %s and the database %r has %s: it was restored to an older state, or"
            " another project uses the namespace %r. The rules of the database are in force; an edit takes up to a"
            " second to be. `manage.py ratelimits_reload` ends this, and so does the next edit",
            self._behind,
            conf.DATABASE,
            version,
            conf.NAMESPACE,
        )

    def _load_shards(self, shards: frozenset[int]) -> Snapshot:
        """In the thread: update the rows, then read these shards of keys into them.

        Also read the shards that other jobs wait for: however large a burst of new keys is, it takes two reads.
        """
        current = self._current
        if current is not None and all(current.rows.shards[shard] is not None for shard in shards):
            return current
        wanted, self._wanted = self._wanted, set()
        shards |= wanted

        def read() -> rows.Rows:
            for _attempt in range(3):
                rows_read = rows.read(conf.DATABASE, current.rows if current is not None else None)
                wanted = [shard for shard in shards if rows_read.shards[shard] is None]
                read_now = keyed.read(conf.DATABASE, wanted)
                if ConfigVersion.read(conf.DATABASE)[0] == rows_read.version:
                    break
            for shard, keys in read_now.items():
                rows_read.shards[shard] = keys
            return rows_read

        return self._use(self._query(read))

    def _use(self, rows_read: rows.Rows) -> Snapshot:
        """Use these rows from now on. If Redis has a newer version than the database, compare none for a while."""
        with self._lock:
            behind = rows_read.version < self._behind
            versioned = not behind and not tests.running
            self._refresh_at = self._clock() + (_PAUSE if behind else self._interval())
            if self._current is None or self._current.rows is not rows_read or self._current.versioned != versioned:
                self._current = self._at(rows_read, versioned=versioned)
            return self._current

    def _query(self, query: Callable[[], R]) -> R:
        borrowed = False
        try:
            with tests.connection(conf.DATABASE) as borrowed:
                connection = connections[conf.DATABASE]
                self._timed(connection.ensure_connection)
                with connection.execute_wrapper(self._timed):
                    answer = query()
        except (DatabaseError, ArithmeticError, TypeError, ValueError) as error:
            # Django raises the latter three for text in a column of numbers, which SQLite allows.
            hint = "is it up, and was `manage.py migrate` run?"
            if not isinstance(error, DatabaseError):
                hint = "correct the row that raw SQL wrote"
            message = f"the rules cannot be read from the database {conf.DATABASE!r}: {error}; {hint}"
            self._failure = self._clock(), message
            raise RulesUnavailable(message) from error
        finally:
            if not borrowed:
                connections[conf.DATABASE].close()
        self._failure = None
        return answer
