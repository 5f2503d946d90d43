"""Notice that this process is asked to stop, where Python's own `atexit` would not run.

Uvicorn stops its server on SIGTERM and then sends itself that signal again with the handler that was there before,
which ends the process at once; a process without a handler ends at once in any case. So ours stands in front of
whichever handler is there, writes what is held, and calls that one. A handler that Python did not install (uWSGI,
mod_wsgi) is left alone, as is a signal that is ignored.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from django.core.signals import request_finished

logger = logging.getLogger(__name__)

#: Ctrl-C needs nothing where it raises KeyboardInterrupt: `atexit` runs after that.
SIGNALS = (signal.SIGTERM, signal.SIGINT)
#: Seconds for which a server's own handler is held up; requests that are still served write what they count themselves.
HELD_UP = 1.0


class StopHandler:
    """A signal handler that ends the background work, then does what the handler before it would have done."""

    def __init__(
        self, end: Callable[..., None], before: Callable[[int, FrameType | None], Any] | signal.Handlers
    ) -> None:
        self._end = end
        self._before = before
        self._stopping = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if callable(self._before):
            # The server goes on until its requests are answered: each of them may have counted something more.
            self._stopping = True
            self._try(HELD_UP)
            self._before(number, frame)
        else:
            self._try()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _try(self, *seconds: float) -> None:
        try:
            self._end(*seconds)
        except Exception:
            # gevent lets nothing wait in its event loop; the work itself has been ordered by then.
            logger.debug("The background work is not waited for.", exc_info=True)

    def after_request(self, **kwargs: object) -> None:
        """Write what the request that ends has counted, once the process was asked to stop."""
        if self._stopping:
            self._end(HELD_UP)


def watch(end: Callable[..., None]) -> None:
    """Call `end` when this process is asked to stop. Does nothing outside the main thread, which alone may say so."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in SIGNALS:
        before = signal.getsignal(number)
        if isinstance(before, StopHandler) or before in (None, signal.SIG_IGN, signal.default_int_handler):
            continue
        handler = StopHandler(end, before)  # type: ignore[arg-type]
        # Not in the handler: it may interrupt its own thread where that holds the lock of Django's signal.
        request_finished.connect(
            handler.after_request, weak=False, dispatch_uid=f"ratelimits.background.stop_signals.{number:d}"
        )
        signal.signal(number, handler)
