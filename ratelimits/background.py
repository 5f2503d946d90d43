"""Do work in a separate thread: at intervals, soon after `wake`, and once more when the process ends.

If a signal stops the process, Python's `atexit` would not run. Uvicorn stops its server on SIGTERM. Then it restores
the signal handler that was there before, and sends itself the signal again, which usually ends the process at once. So
this module installs its own handler when Django starts. This handler lets the last work be done, then calls the handler
that it has replaced. A handler that is not written in Python (uWSGI, mod_wsgi) is not replaced. An ignored signal is
still ignored.

This module also waits for work: in sync code for the result of an async function, and for a server that perhaps hangs.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from queue import Empty, SimpleQueue
from threading import Thread
from types import FrameType
from typing import Any

from asgiref.sync import async_to_sync
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import request_finished

logger = logging.getLogger(__name__)

# Projects can configure this name, which is older than the place of the signal handlers in this module.
_signal_logger = logging.getLogger("ratelimits.background.stop_signals")

#: Maximum number of seconds for all last work when the process ends. Work that takes longer is not completed.
END_SECONDS = 5.0
#: `wake` can start the work again only after a pause. The pause is the longer of two times: PAUSE seconds, and
#: PAUSE_FACTOR times the duration of the work.
PAUSE, PAUSE_FACTOR = 0.1, 9
#: Minimum seconds between two log messages about the same work. While a server does not answer, each attempt fails.
LOG_INTERVAL = 60.0
#: The signals that stop a process. (`watch_signals` leaves out a SIGINT that raises KeyboardInterrupt, because `atexit`
#: runs then.)
SIGNALS = (signal.SIGTERM, signal.SIGINT)
#: Maximum seconds of the last work before the server's own handler is called. A request that ends after this last work
#: writes its own counts.
MAX_DELAY = 1.0


class Background:
    """Does `work` every `seconds()` in a daemon thread, which the first `start` begins.

    When the process ends, the thread does `last`. The last work of several threads begins in the order of `end_order`.
    A forked child has no thread. The next `start` in the child begins a new one. `writes_rows` says whether the work
    writes to the database: `write_no_rows` stops such work.
    """

    def __init__(
        self,
        name: str,
        seconds: Callable[[], float],
        work: Callable[[], None],
        last: Callable[[], None] | None = None,
        *,
        end_order: int = 0,
        writes_rows: bool = False,
    ) -> None:
        self._name = name
        self._writes_rows = writes_rows
        self._seconds = seconds
        self._work = work
        self._last = last or work
        self.end_order = end_order
        self._reset()
        os.register_at_fork(after_in_child=self._reset)
        _all.append(self)
        _all.sort(key=lambda background: background.end_order)

    def _reset(self) -> None:
        self.running = False
        self._woken = False
        self._starting = threading.Lock()
        self._working = threading.Lock()
        # `wake` puts None into the queue, and `finish` puts an event. The class must be SimpleQueue, since a signal
        # handler can call `put` while it interrupts a `put` of its own thread.
        self._orders: queue.SimpleQueue[threading.Event | None] = queue.SimpleQueue()

    @property
    def allowed(self) -> bool:
        """Whether the thread may be started: see `write_no_rows`."""
        return _may_write_rows or not self._writes_rows

    def start(self) -> None:
        """Start the thread of this process if it does not run. If it cannot start now, a later call tries again."""
        if self.running or not self.allowed:
            return
        with self._starting:
            if not self.running:
                self._start_thread()

    def _start_thread(self) -> None:
        try:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        except RuntimeError as error:  # there are too many threads, or the process ends
            logger.warning("The thread %s cannot be started: %s", self._name, error)
            return
        self.running = True
        watch_signals(end)

    def run(self) -> None:
        """Do the work now, in the caller's thread. If the background thread does it at this moment, first wait."""
        with self._working:
            self._work()

    def wake(self) -> None:
        """Let the thread do the work soon, after a pause, and not only at its next interval."""
        if not self._woken:
            self._woken = True
            self._orders.put(None)

    def finish(self) -> threading.Event | None:
        """Let the thread do the last work at once.

        Return an event that is set when this work is done or has failed. Return None if there is no thread.
        """
        if not self.running:
            return None
        finished = threading.Event()
        self._orders.put(finished)
        return finished

    def _run(self) -> None:
        # If the work forks, this loop goes on in the child too. Let it keep the old queue and the old lock there: the
        # new ones, which `_reset` makes, belong to the thread that the child starts.
        orders, working = self._orders, self._working
        # Moments by `time.monotonic`. From `pause_ends`, `wake` can start the work. At `due`, the work starts anyway.
        # From `log_from`, a failure is logged.
        pause_ends, due, log_from = 0.0, time.monotonic() + self._seconds(), 0.0
        while True:
            finished = None
            try:
                finished = orders.get(timeout=max(due - time.monotonic(), 0))
            except queue.Empty:
                pass
            else:
                if finished is None:  # from `wake`: start the work earlier, at the end of the pause
                    due = min(due, pause_ends)
                    continue
            self._woken = False
            began = time.monotonic()
            try:
                with working:
                    (self._work if finished is None else self._last)()
            except Exception:
                if began >= log_from:
                    logger.warning("%s failed; it is tried again.", self._name, exc_info=True)
                    log_from = began + LOG_INTERVAL
            else:
                log_from = 0.0
            if finished is not None:
                finished.set()
            ended = time.monotonic()
            pause_ends = ended + max(PAUSE, PAUSE_FACTOR * (ended - began))
            due = ended + self._seconds()


_all: list[Background] = []


#: Whether threads that write to the database may be started.
_may_write_rows = True


def write_no_rows() -> None:
    """From now on, start no thread that writes to the database. A test empties its database, or rolls it back."""
    global _may_write_rows
    _may_write_rows = False


def end(seconds: float = END_SECONDS) -> None:
    """Let all threads do their last work, and wait for at most `seconds`. It is harmless to call this twice.

    The threads do the work, so this can be called where the work itself is not possible, such as in a signal handler.
    """
    deadline = time.monotonic() + seconds
    for finished in [background.finish() for background in _all]:
        if finished is not None and not finished.wait(max(deadline - time.monotonic(), 0)):
            logger.error("The process ends before it has written everything that it counted.")
            return


atexit.register(end)


class StopHandler:
    """A signal handler that lets the background work end, and then does the same as the handler that it replaces."""

    def __init__(
        self, end: Callable[..., None], replaced: Callable[[int, FrameType | None], Any] | signal.Handlers
    ) -> None:
        self._end = end
        self._replaced = replaced
        self._stopping = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if callable(self._replaced):
            # The server still answers requests, and each request can add to the counts.
            self._stopping = True
            self._try(MAX_DELAY)
            self._replaced(number, frame)
        else:
            self._try()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _try(self, *seconds: float) -> None:
        try:
            self._end(*seconds)
        except Exception:
            # gevent forbids waiting in its event loop. But the background threads know already that they must do their
            # last work.
            _signal_logger.debug("The background work is not waited for.", exc_info=True)

    def after_request(self, **kwargs: object) -> None:
        """After the process was asked to stop, write the counts of the request that ends."""
        if self._stopping:
            self._end(MAX_DELAY)


def watch_signals(end: Callable[..., None]) -> None:
    """Call `end` when this process is asked to stop.

    Do nothing outside of the main thread, because other threads cannot set handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in SIGNALS:
        current = signal.getsignal(number)
        if isinstance(current, StopHandler) or current in (None, signal.SIG_IGN, signal.default_int_handler):
            continue
        handler = StopHandler(end, current)  # type: ignore[arg-type]
        # Connect here, not in the handler: the handler can interrupt its thread while the thread holds the lock of
        # Django's signal.
        request_finished.connect(handler.after_request, weak=False, dispatch_uid=f"ratelimits.background.{number:d}")
        signal.signal(number, handler)


def is_awaitable(value: Any) -> bool:
    """Return whether a value is the result of an async function. Do not load a lazy object."""
    return hasattr(type(value), "__await__")


def awaited(result: Any, function: str, view: str) -> Any:
    """Return the value of a result. Wait for it if the function was async.

    Raise ImproperlyConfigured, with the names of the function and of the view, if an event loop runs in this thread.
    """
    if not is_awaitable(result):
        return result
    if _is_in_loop():
        if isinstance(result, Coroutine):
            result.close()  # Otherwise Python warns that nobody has awaited it.
        raise ImproperlyConfigured(
            f"{function} is async, but {view} is decided by sync code in an event loop. Write a sync function, or make"
            " the view async."
        )
    return async_to_sync(_value)(result)


async def _value(result: Awaitable[Any]) -> Any:
    return await result


def _is_in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def within(seconds: float, work: Callable[[], None], name: str) -> None:
    """Do the work in a thread of this name, and raise what the work raises.

    Raise TimeoutError if the work takes longer than `seconds`. A timeout of a socket is not enough: it limits only a
    single wait. Connecting is one wait, and each part of a reply is another one. After a TimeoutError, the thread goes
    on with the work. So each single wait of the work needs a timeout too, or else the thread could run for ever. The
    work must not use a database.
    """
    outcome = SimpleQueue[BaseException | None]()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  (raised again below, in the thread of the caller)
            outcome.put(error)
        else:
            outcome.put(None)

    Thread(target=run, daemon=True, name=name).start()
    try:
        error = outcome.get(timeout=max(seconds, 0.0))
    except Empty:
        raise TimeoutError(f"no answer within {seconds:g} s") from None
    if error is not None:
        raise error
