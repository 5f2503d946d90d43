"""Keep the newest snapshot of the rules in a process.

The rules are read in a separate thread with a separate connection. The connection of a request cannot be used, because
a request can be in a transaction. In this transaction, the process could read old rules, or an edit that is not
committed yet.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from ratelimits.conf import conf
from ratelimits.engine import server
from ratelimits.logs import bounded
from ratelimits.models.versions import ConfigVersion
from ratelimits.rules import groups, keyed, rows
from ratelimits.rules.query_thread import Lender, QueryThread, RulesUnavailable
from ratelimits.rules.snapshot import MissingRows, Snapshot

logger = bounded(__name__)

T = TypeVar("T")
R = TypeVar("R")
#: With this function, a test replaces the rules. The function takes the rows of the database, and returns a copy with
#: other rules. If no row has changed, it is given its own last result, and returns this result unchanged.
Replacement = Callable[[rows.Rows], rows.Rows]

#: For this time (µs) after a failure, the database is not asked again. (A reload without a minimum version does ask.)
#: While Redis has a newer version than the database, this is also the time until the next refresh.
_PAUSE = 1_000_000
#: If the clock steps back by more than this time (µs), the snapshot is made again.
_STEP = 1_000_000


def _now() -> int:
    return time.time_ns() // 1000


class Loader:
    """Holds the newest snapshot of this process and updates it. `clock` returns µs since 1970 UTC."""

    def __init__(self, clock: Callable[[], int] = _now) -> None:
        self._clock = clock
        #: Whether the rules are read again every RELOAD_INTERVAL.
        self._refreshes = True
        #: The function with which a test replaces the rules; None outside such a test.
        self._replacement: Replacement | None = None
        self._current: Snapshot | None = None
        #: The moment of the next refresh, by `clock`.
        self._refresh_at = 0
        #: The moment and the message of the last failure to ask the database; None after a success.
        self._failure: tuple[int, str] | None = None
        #: The version in Redis, if it is above the version in the database; otherwise 0.
        self._newer_in_redis = 0
        #: The last value of `_newer_in_redis` that was logged.
        self._logged_newer = 0
        self._thread = QueryThread()
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        #: What the waiting jobs of the thread need: all rows of these shards, and the groups of these users.
        self._wanted: set[int] = set()
        self._wanted_users: set[str] = set()
        self._thread.restart()

    def current(self) -> Snapshot:
        """Return the rules in force. The first call reads them, and raises RulesUnavailable if this fails.

        Later calls make no query. Every RELOAD_INTERVAL the rules are read again in the background.
        """
        if server.before_use is not None:
            server.before_use()
        # Do not call `_now` here: this line runs at every decision, and a call would make it slower.
        current = self._current
        now = time.time_ns() // 1000 if self._clock is _now else self._clock()
        if current is None:
            return self._thread.wait(self._submit(self._load, 0))
        # Do not call `min` here, for the same reason.
        if current.seen_at - _STEP <= now < current.good_until and now < self._refresh_at:
            return current
        return self._renew(current, now)

    async def acurrent(self) -> Snapshot:
        """Do the same as `current`, in async code."""
        if server.before_use is not None:
            server.before_use()
        if self._current is None:
            return await self._thread.wait_async(self._submit(self._load, 0))
        return self.current()

    def in_memory(self) -> Snapshot | None:
        """Return the rules that were read last, without a query; None if none were read."""
        return self._current

    def reload(self, minimum_version: int | None = None) -> Snapshot:
        """Read the rules from the database and return them.

        Return the current rules without reading if they have `minimum_version` or a newer version. Do the same if an
        earlier call found that Redis has `minimum_version`, but the database does not.

        If the database cannot be asked, raise RulesUnavailable. The current rules then stay in force.
        """
        if server.before_use is not None:
            server.before_use()
        return self._thread.wait(self._submit(self._load, minimum_version))

    async def areload(self, minimum_version: int | None = None) -> Snapshot:
        """Do the same as `reload`, in async code."""
        if server.before_use is not None:
            server.before_use()
        return await self._thread.wait_async(self._submit(self._load, minimum_version))

    async def aload(self, missing: MissingRows) -> Snapshot:
        """Read the rows in `missing`, and return a snapshot that contains them."""
        return await self._thread.wait_async(self._submit_missing(missing))

    def query(self, make_queries: Callable[[], R]) -> R:
        """Return the result of a function that makes queries. It runs in the thread, with the thread's connection.

        Raise RulesUnavailable if the database cannot be asked.
        """
        return self._thread.wait(self._submit(self._query, make_queries))

    async def aquery(self, make_queries: Callable[[], R]) -> R:
        """Do the same as `query`, in async code."""
        return await self._thread.wait_async(self._submit(self._query, make_queries))

    def forget(self) -> None:
        """Forget all rules. The next use reads everything."""
        if self._pid != os.getpid():
            self._begin()
        with self._lock:
            self._current = self._failure = None
            self._newer_in_redis = self._logged_newer = 0
            self._wanted, self._wanted_users = set(), set()

    @staticmethod
    def read_as(lender: Lender) -> None:
        """From now on, let all loaders read the rules as `lender` says.

        This is for `ratelimits.testing`: the rules of a test are not committed.
        """
        QueryThread.lender = lender

    def are_replaced(self) -> bool:
        """Return whether a test replaces the rules."""
        return self._replacement is not None

    def replace_rules(self, replacement: Replacement | None) -> Replacement | None:
        """From now on, replace the rules of the database (with None: do not). Return the former replacement."""
        previous, self._replacement = self._replacement, replacement
        self.forget()
        return previous

    def use_clock(self, clock: Callable[[], int] | None) -> None:
        """Use another clock from now on. If it is None, use the clock of this machine."""
        self._clock, self._refreshes = clock or _now, clock is None
        self.forget()

    def _renew(self, current: Snapshot, now: int) -> Snapshot:
        """Return a snapshot that is valid now.

        If the validity of a row has begun or ended, make a new snapshot from the same rows. If RELOAD_INTERVAL has
        passed, read the rows again in the background. If the clock has stepped back, do both.
        """
        if self._pid != os.getpid():
            self._begin()
        with self._lock:
            if now >= self._refresh_at or now < current.seen_at - _STEP:
                self._refresh_at = now + self._interval()
                self._thread.try_to_submit(self._refresh)
            if self._current is current and not current.seen_at - _STEP <= now < current.good_until:
                self._current = self._snapshot_of(current.rows, versioned=current.versioned)
            return self._current or current

    def _refresh(self) -> None:
        """Read the rules again, or let decisions compare versions with Redis again (see `_use`). Runs in the thread."""
        current, newer_in_redis = self._current, self._newer_in_redis
        self._newer_in_redis = 0
        if newer_in_redis and current is not None:
            # Compare versions again. The next decision then shows whether Redis still has a newer version.
            self._use(current.rows)
            return
        try:
            self._load(None)
        except RulesUnavailable as error:
            logger.warning("The rules could not be read again; the current ones stay in force: %s", error)

    def _snapshot_of(self, current: rows.Rows, *, versioned: bool) -> Snapshot:
        return Snapshot(
            current, self._clock, lambda missing: self._thread.wait(self._submit_missing(missing)), versioned=versioned
        )

    def _interval(self) -> int:
        """Return the time (µs) until the rules are read again."""
        # A test can set its own clock, and this clock can jump. A jump must not start a refresh, because the thread
        # would use the test's connection.
        never = 2**62
        return int(conf.RELOAD_INTERVAL * 1_000_000) if self._refreshes else never

    def _submit(self, job: Callable[[T], R], argument: T) -> Future[R]:
        """Start a job in the thread.

        Raise RulesUnavailable if the last failure is less than `_PAUSE` ago, or if there is no thread.
        """
        if self._pid != os.getpid():
            self._begin()  # a forked child has no threads
        # A reload without a minimum version has the argument None. It asks the database even soon after a failure.
        if self._failure is not None and argument is not None:
            failed_at, message = self._failure
            if self._clock() - failed_at < _PAUSE:
                raise RulesUnavailable(message)
        return self._thread.submit(job, argument)

    def _submit_missing(self, missing: MissingRows) -> Future[Snapshot]:
        self._wanted.update(missing.shards)
        self._wanted_users.update(missing.users)
        return self._submit(self._load_missing, missing)

    def _load(self, minimum_version: int | None) -> Snapshot:
        """Do the work of `reload`, in the thread."""
        current = self._current
        if (
            current is not None
            and minimum_version is not None
            and max(current.version, self._newer_in_redis) >= minimum_version
        ):
            return current
        rows_read = self._query(lambda: self._read(current.rows if current is not None else None))
        if minimum_version is not None and rows_read.version < minimum_version:
            self._newer_in_redis = minimum_version
            self._log_newer(rows_read.version)
        return self._use(rows_read)

    def _log_newer(self, version: int) -> None:
        if self._newer_in_redis == self._logged_newer:
            return
        self._logged_newer = self._newer_in_redis
        logger.error(
            "Redis has version %s of the rules, but the database %r has only version %s. Either the database was"
            " restored to an older state, or another project uses the namespace %r. The rules of the database are in"
            " force, but an edit takes up to a second to take effect. To end this, run `manage.py ratelimits_reload` or"
            " edit a rule",
            self._newer_in_redis,
            conf.DATABASE,
            version,
            conf.NAMESPACE,
        )

    def _load_missing(self, missing: MissingRows) -> Snapshot:
        """Update the rows, then read the rows in `missing`. Runs in the thread.

        Also read the missing rows of the other jobs that wait. These jobs then find their rows in memory.
        """
        current = self._current
        if (
            current is not None
            and all(current.rows.shards[shard] is not None for shard in missing.shards)
            and all(user in current.rows.groups for user in missing.users)
        ):
            return current
        wanted, self._wanted = self._wanted, set()
        wanted_users, self._wanted_users = self._wanted_users, set()
        shards = missing.shards | wanted
        users = missing.users | wanted_users

        def read() -> rows.Rows:
            # If an edit was committed meanwhile, read again. After the last attempt, use these rows anyway: the next
            # read finds all changes after their version.
            for _attempt in range(3):
                rows_read = self._read(current.rows if current is not None else None)
                new_shards = keyed.read(conf.DATABASE, [shard for shard in shards if rows_read.shards[shard] is None])
                new_groups = groups.read(users - rows_read.groups.keys()) if users else {}
                version_after, _complete = ConfigVersion.read(conf.DATABASE)
                if version_after == rows_read.version:
                    break
            for shard, keys in new_shards.items():
                rows_read.shards[shard] = keys
            if len(rows_read.groups) + len(new_groups) > groups.MAX_USERS:
                rows_read.groups.clear()
            rows_read.groups.update(new_groups)
            return rows_read

        return self._use(self._query(read, groups.database() if users else None))

    def _use(self, rows_read: rows.Rows) -> Snapshot:
        """Use these rows from now on.

        If Redis has a newer version than the database, decisions do not compare versions with Redis for one second.
        Then a refresh lets them compare versions again. In tests, decisions never compare versions.
        """
        with self._lock:
            redis_is_newer = rows_read.version < self._newer_in_redis
            versioned = not redis_is_newer and not self._thread.borrows and self._replacement is None
            self._refresh_at = self._clock() + (_PAUSE if redis_is_newer else self._interval())
            if self._current is None or self._current.rows is not rows_read or self._current.versioned != versioned:
                self._current = self._snapshot_of(rows_read, versioned=versioned)
            return self._current

    def _read(self, current: rows.Rows | None) -> rows.Rows:
        rows_read = rows.read(conf.DATABASE, current)
        return rows_read if self._replacement is None else self._replacement(rows_read)

    def _query(self, make_queries: Callable[[], R], other_database: str | None = None) -> R:
        """Return the result of `QueryThread.query`. If it raises RulesUnavailable, note the failure."""
        try:
            result = self._thread.query(make_queries, other_database)
        except RulesUnavailable as error:
            self._failure = self._clock(), str(error)
            raise
        self._failure = None
        return result
