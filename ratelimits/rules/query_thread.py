"""A separate thread, with separate connections, that reads the rules from the database."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol, TypeVar

from django.db import Error as DatabaseError
from django.db import connections

from ratelimits.conf import conf
from ratelimits.logs import bounded

logger = bounded(__name__)

R = TypeVar("R")

#: Maximum number of seconds to wait for the reply to one query.
PATIENCE = 5.0


class RulesUnavailable(Exception):
    """The rules could not be read from the database, and this process has no rules that are new enough."""


class Lender(Protocol):
    """Lends a connection with an open transaction. `ratelimits.testing` does this in Django's `TestCase`."""

    @property
    def running(self) -> bool:
        """Return whether the rules in force are in an open transaction."""

    def connection(self, using: str, /) -> AbstractContextManager[bool]:
        """Let this thread use the lent connection within the block. Yield whether there is one."""


class QueryThread:
    """Runs jobs one after another in one thread, and limits the time that a caller waits for a query of a job."""

    #: Lends the connections of tests to all threads; None in production.
    lender: Lender | None = None

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Use a new thread, for example in a forked child, which has no threads."""
        #: Start of the query that runs now, in seconds of the monotonic clock; None if no query runs.
        self._query_began_at: float | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="ratelimits-rules")

    @property
    def borrows(self) -> bool:
        """Return whether the rules are read from an open transaction, over a lent connection."""
        return self.lender is not None and self.lender.running

    def submit(self, job: Callable[..., R], *arguments: Any) -> Future[R]:
        """Run a job in the thread. Raise RulesUnavailable if there is no thread."""
        future = self.try_to_submit(job, *arguments)
        if future is None:
            raise RulesUnavailable(
                "the process cannot start a thread to read the rules: it is ending, or it has too many threads"
            )
        return future

    def try_to_submit(self, job: Callable[..., R], *arguments: Any) -> Future[R] | None:
        """Run a job in the thread. Return None if there is no thread, for example when the process ends."""
        try:
            return self._executor.submit(job, *arguments)
        except RuntimeError as error:
            logger.warning("The rules are not read: %s", error)
            return None

    def wait(self, future: Future[R]) -> R:
        """Wait for a job, and return its result. Raise RulesUnavailable if one query takes longer than PATIENCE.

        Only the time of a query counts, not the time before the thread begins the job.
        """
        while True:
            try:
                return future.result(self._patience_left())
            except TimeoutError:
                if not future.done() and self._patience_left() <= 0:
                    raise RulesUnavailable(f"the database did not answer within {PATIENCE:g} s") from None

    async def wait_async(self, future: Future[R]) -> R:
        """Do the same as `wait`, in async code."""
        answer = asyncio.wrap_future(future)
        # asyncio logs each error that nobody reads. Read the error here, because a cancelled caller does not read it.
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        while True:
            done, _pending = await asyncio.wait([answer], timeout=self._patience_left())
            if done:
                return answer.result()
            if not future.done() and self._patience_left() <= 0:
                raise RulesUnavailable(f"the database did not answer within {PATIENCE:g} s")

    def _patience_left(self) -> float:
        """Return how many seconds the database has left to answer the query that runs now."""
        began_at = self._query_began_at
        return PATIENCE if began_at is None else max(began_at + PATIENCE - time.monotonic(), 0)

    def query(self, make_queries: Callable[[], R], other_database: str | None = None) -> R:
        """Return the result of a function that makes queries. Jobs call this method, in the thread.

        The function can use the database of the rules, and `other_database`. Raise RulesUnavailable if a database
        cannot be asked.
        """
        try:
            with ExitStack() as stack:
                for alias in dict.fromkeys((conf.DATABASE, other_database or conf.DATABASE)):
                    stack.enter_context(self._connected(alias))
                return make_queries()
        except (DatabaseError, ArithmeticError, TypeError, ValueError) as error:
            # SQLite allows text in a column of numbers. Then Django raises one of the last three errors.
            hint = "is it up, and was `manage.py migrate` run?"
            if not isinstance(error, DatabaseError):
                hint = "correct the row that raw SQL wrote"
            message = f"the rules cannot be read from the database {conf.DATABASE!r}: {error}; {hint}"
            raise RulesUnavailable(message) from error

    @contextmanager
    def _connected(self, alias: str) -> Iterator[None]:
        """Connect this thread to a database, time each of its queries, and close the connection at the end."""
        borrowed = False  # Whether the lender has lent a connection, which must stay open.
        try:
            with self._lent_connection(alias) as borrowed:
                connection = connections[alias]
                self._timed(connection.ensure_connection)
                with connection.execute_wrapper(self._timed):
                    yield
        finally:
            if not borrowed:
                connections[alias].close()

    def _lent_connection(self, alias: str) -> AbstractContextManager[bool]:
        return nullcontext(False) if self.lender is None or alias != conf.DATABASE else self.lender.connection(alias)

    def _timed(self, execute: Callable[..., R], *args: Any) -> R:
        """Run a statement, and note when it began."""
        self._query_began_at = time.monotonic()
        try:
            return execute(*args)
        finally:
            self._query_began_at = None
