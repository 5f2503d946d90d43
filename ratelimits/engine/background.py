"""What a process does beside its requests: every so often, and once more as it ends."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable


class Background:
    """Does `work` every `seconds`, in a thread that begins with the first `start`, and `last` when the process ends.

    A process that is forked begins anew: its threads are gone, and what they were about to do was its parent's.
    """

    def __init__(
        self, name: str, seconds: float, work: Callable[[], None], last: Callable[[], None] | None = None
    ) -> None:
        self._name = name
        self._seconds = seconds
        self._work = work
        self._last = last or work
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._running = False
        self._starting = threading.Lock()
        self._working = threading.Lock()

    def start(self) -> None:
        """Make sure that this process has its thread; costs a look once it has."""
        if self._running:
            return
        with self._starting:
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
                atexit.register(self._end)

    def run(self) -> None:
        """Do it now; behind the thread if that is at it."""
        with self._working:
            self._work()

    def _end(self) -> None:
        with self._working:
            self._last()

    def _run(self) -> None:
        while True:
            time.sleep(self._seconds)
            self.run()
