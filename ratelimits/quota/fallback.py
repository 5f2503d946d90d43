"""A limiter of this process alone, which decides while the server is away."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from ratelimits.algorithms.limits import Algorithm
from ratelimits.algorithms.parsing import MICROSECONDS

#: Maximum number of limits that are kept. Those unused longest are forgotten first.
MAX_KEYS = 100_000


class LocalLimiter:
    """Admits at most a limit's quota per window in this process, by a bucket that refills over the window.

    It protects a service while the server is away. It is not exact, and what it admits is not counted as usage.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.clear()

    def clear(self) -> None:
        """Forget what was spent: in a forked process it belongs to the parent, and a thread of it may hold the lock."""
        self._lock = threading.Lock()
        self._spent: OrderedDict[tuple[str, str], tuple[float, float]] = OrderedDict()

    def admits(self, asked: list[tuple[str, str, Algorithm, int]]) -> bool:
        """Charge all of these (key, name, algorithm, cost) and return True; or none if one has too little left."""
        now = self._clock()
        with self._lock:
            charged: dict[tuple[str, str], float] = {}
            for key, name, algorithm, cost in asked:
                quota, micros = algorithm.quota
                spent, at = self._spent.get((key, name), (0.0, now))
                seconds = (micros or 60 * MICROSECONDS) / MICROSECONDS
                spent = max(spent - (now - at) * quota / seconds, 0.0)
                if spent + cost > quota:
                    return False
                charged[key, name] = spent + cost
            for limit, spent in charged.items():
                self._spent[limit] = spent, now
                self._spent.move_to_end(limit)
            while len(self._spent) > MAX_KEYS:
                self._spent.popitem(last=False)
            return True
