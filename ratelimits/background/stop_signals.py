"""Do the last work of a process that is stopped by a signal, because Python's `atexit` would not run then.

Uvicorn stops its server on SIGTERM. Then it restores the signal handler that was there before, and sends itself the
signal again, which usually ends the process at once. So this module installs its own handler when Django starts.
This handler lets the last work be done, then calls the handler that it has replaced. A handler that is not written in
Python (uWSGI, mod_wsgi) is not replaced. An ignored signal is still ignored.
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

#: The signals that stop a process. (`watch` leaves out a SIGINT that raises KeyboardInterrupt: `atexit` runs then.)
SIGNALS = (signal.SIGTERM, signal.SIGINT)
#: Maximum seconds of the last work before the server's own handler is called. A request that ends after this last work
#: writes its own counts.
MAX_DELAY = 1.0


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
            logger.debug("The background work is not waited for.", exc_info=True)

    def after_request(self, **kwargs: object) -> None:
        """After the process was asked to stop, write the counts of the request that ends."""
        if self._stopping:
            self._end(MAX_DELAY)


def watch(end: Callable[..., None]) -> None:
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
        request_finished.connect(
            handler.after_request, weak=False, dispatch_uid=f"ratelimits.background.stop_signals.{number:d}"
        )
        signal.signal(number, handler)
