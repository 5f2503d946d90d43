"""Log events that can happen at every request, without filling the log.

A process logs a message at most once in INTERVAL seconds. When it logs the message again, it adds how often the message
was left out.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from typing import Any

#: Minimum seconds between two times that a process logs the same message.
INTERVAL = 60.0

#: For each message (the name of its logger, and its text without the arguments): the moment from which it can be logged
#: again, in seconds of the monotonic clock, and how often it was left out. All texts are in the code, so this dict is
#: small.
_messages: dict[tuple[str, str], tuple[float, int]] = {}
_lock = threading.Lock()


class BoundedLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger that repeats a message at most once in INTERVAL seconds, whatever its arguments.

    Each record has the attribute `left_out`: how often the message was left out since it was last logged.
    """

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        if not self.isEnabledFor(level):
            return
        left_out = _times_left_out(self.logger.name, str(msg))
        if left_out is None:
            return
        extra: Mapping[str, object] = kwargs.get("extra") or {}
        kwargs["extra"] = {**extra, "left_out": left_out}
        if left_out:
            msg, args = f"{msg} (and %s more times since the last such message)", (*args, left_out)
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        self.logger.log(level, msg, *args, **kwargs)


def bounded(name: str) -> BoundedLogger:
    """Return the bounded logger of a module."""
    return BoundedLogger(logging.getLogger(name), {})


def _times_left_out(name: str, message: str) -> int | None:
    """Return how often the message was left out since it was last logged. If it must be left out now, return None."""
    now = time.monotonic()
    with _lock:
        not_before, left_out = _messages.get((name, message), (0.0, 0))
        if now < not_before:
            _messages[name, message] = not_before, left_out + 1
            return None
        _messages[name, message] = now + INTERVAL, 0
        return left_out


def forget() -> None:
    """Forget which messages were logged. A forked process calls this, because the counts belong to its parent."""
    global _lock
    _lock = threading.Lock()
    _messages.clear()


os.register_at_fork(after_in_child=forget)
