"""Limit requests by counts in the memory of this process. If Redis fails, this decides for the policy "local"."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from ratelimits.algorithms.base import MICROSECONDS
from ratelimits.algorithms.limits import Algorithm

#: Maximum number of limits in memory. The limits that were not used for the longest time are forgotten first.
MAX_KEYS = 100_000


class LocalLimiter:
    """Limits the requests of this process. Each limit has a bucket of permits, which come back at a steady rate.

    `Algorithm.quota` gives the number of permits in the bucket, and the time in which all of them come back (a minute
    if this time has no fixed length). The limiter protects a service while Redis does not answer. It is not exact, and
    it does not count usage.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.clear()

    def clear(self) -> None:
        """Forget the spent permits, and make a new lock. A forked process calls this method."""
        self._lock = threading.Lock()
        #: For each key and name of a limit: the number of spent permits at a moment, and this moment in seconds of the
        #: clock. Since this moment, permits come back one after another.
        self._spent: OrderedDict[tuple[str, str], tuple[float, float]] = OrderedDict()

    def charge(self, limits: list[tuple[str, str, Algorithm, int]]) -> float | None:
        """Charge all limits and return 0. If a limit refuses, charge none, and return the seconds to wait.

        After these seconds, all limits would admit the same request. None means that a limit can never admit it. A
        limit is a tuple (key, name, algorithm, cost).
        """
        now = self.clock()
        with self._lock:
            charged: dict[tuple[str, str], float] = {}
            wait: float | None = 0.0
            for key, name, algorithm, cost in limits:
                quota, micros = algorithm.quota
                spent, since = self._spent.get((key, name), (0.0, now))
                seconds = (micros or 60 * MICROSECONDS) / MICROSECONDS
                spent = max(spent - (now - since) * quota / seconds, 0.0)
                if cost > quota:
                    wait = None
                elif wait is not None and spent + cost > quota:
                    wait = max(wait, (spent + cost - quota) * seconds / quota)
                charged[key, name] = spent + cost
            if wait != 0:
                return wait
            for limit, spent in charged.items():
                self._spent[limit] = spent, now
                self._spent.move_to_end(limit)
            while len(self._spent) > MAX_KEYS:
                self._spent.popitem(last=False)
            return wait

    def give_back(self, limits: list[tuple[str, str, Algorithm, int]]) -> None:
        """Give back the permits of an earlier `charge` of these limits."""
        with self._lock:
            for key, name, _algorithm, cost in limits:
                # A forked process begins with no spent permits, and limits can be forgotten.
                spent, since = self._spent.get((key, name), (0.0, 0.0))
                if spent:
                    self._spent[key, name] = max(spent - cost, 0.0), since
