"""Run work during a test, in threads or in forked children."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self


class Background:
    """Threads that run during a block. Each ends soon after `_end` is set."""

    def __init__(self, *work: Callable[[], None]) -> None:
        self._end = threading.Event()
        self._threads = [threading.Thread(target=each) for each in work]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()


def forked(child: Callable[[int, random.Random], None], number: int, seed: str) -> int:
    """Fork a child process that calls `child`, which never returns; return its process id."""
    pid = os.fork()
    if not pid:
        try:
            child(number, random.Random(f"{seed}:{number}"))
        finally:
            os._exit(1)
    return pid
