"""Wait until another process has done something."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from redis.exceptions import RedisError

#: Seconds after which waiting fails.
PATIENCE = 60.0


def until(holds: Callable[[], Any], what: str, patience: float = PATIENCE, pause: float = 0.02) -> Any:
    """Wait until a condition is true and return its value. Errors of servers that fail over are ignored.

    Where each look takes much processor time, make a longer pause (in seconds) between two looks.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            if value := holds():
                return value
        except RedisError:
            pass
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(pause)
