"""What decides while the server is away: a breaker that stops asking it, and a limiter of this process alone."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from ratelimits.algorithms.limits import Algorithm
from ratelimits.algorithms.parsing import MICROSECONDS
from ratelimits.engine.connection import NotReached, NotSent, Unanswered, Unavailable

#: Failures in a row after which the server is left alone, and for how many seconds.
FAILURES, PAUSE = 3, 1.0
#: Keys that the local limiter remembers at most; the ones unused longest are forgotten first.
MOST_KEYS = 100_000


class NodeUnavailable(Unavailable):
    """One node of a cluster could not be asked: no reason to leave the others alone."""


class NodeNotSent(NodeUnavailable, NotSent):
    """NotSent, by one node of a cluster."""


class NodeUnanswered(NodeUnavailable, Unanswered):
    """Unanswered, by one node of a cluster."""


class SlotNotReached(NodeUnavailable, NotReached):
    """No node of a cluster has the slot."""


class Breaker:
    """Open after FAILURES calls in a row that failed: for PAUSE seconds nobody waits for a server that is away.

    Then one call at a time tries again. `clock` is in seconds, and only ever forward.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._until = 0.0
        self._event: object = None

    @property
    def closed(self) -> bool:
        """Whether the server may be asked. After the pause, the first to look is let through, and nobody else."""
        if self._failures < FAILURES:
            return True
        now = self._clock()
        if now < self._until:
            return False
        self._until = now + PAUSE
        return True

    def succeeded(self) -> None:
        """A call was answered."""
        if self._failures:
            self._failures = 0

    def failed(self, event: object = None) -> None:
        """A call was not answered. Calls that the same event failed, such as a lost connection, are one failure."""
        if event is not None and event is self._event:
            return
        self._event = event
        self._failures += 1
        self._until = self._clock() + PAUSE


class LocalLimiter:
    """At most a limit's quota in its window, in this process: a bucket of it that refills over the window.

    Meant to protect a service while nothing better can be asked; what it admits is neither exact nor counted as usage.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._spent: OrderedDict[tuple[str, str], tuple[float, float]] = OrderedDict()
        self._lock = threading.Lock()

    def clear(self) -> None:
        """Forget what was spent."""
        with self._lock:
            self._spent.clear()

    def admits(self, asked: list[tuple[str, str, Algorithm, int]]) -> bool:
        """Charge all of these (key, name, algorithm, cost) or, when one has too little left, none of them."""
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
            for place, spent in charged.items():
                self._spent[place] = spent, now
                self._spent.move_to_end(place)
            while len(self._spent) > MOST_KEYS:
                self._spent.popitem(last=False)
            return True
