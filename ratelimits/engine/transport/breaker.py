"""A breaker that stops asking a server that is away, and the errors of single nodes of a cluster."""

from __future__ import annotations

import time
from collections.abc import Callable

from ratelimits.engine.transport.connection import NotReached, NotSent, Unanswered, Unavailable

#: Failures in a row after which the server is left alone, and for how many seconds.
FAILURES, PAUSE = 3, 1.0


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
