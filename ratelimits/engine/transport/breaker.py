"""A circuit breaker: it stops calls to a server that does not answer.

This module also has the errors of single nodes of a cluster.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ratelimits.engine.transport.connection import NotReached, NotSent, Unanswered, Unavailable
from ratelimits.engine.transport.probing import prober

#: After FAILURES failures in a row, the server is not called for PAUSE seconds.
FAILURES, PAUSE = 3, 1.0


class NodeUnavailable(Unavailable):
    """One node of a cluster could not be asked, or did not answer. Perhaps the other nodes answer."""


class NodeNotSent(NodeUnavailable, NotSent):
    """The call was not sent to one node of a cluster."""


class NodeUnanswered(NodeUnavailable, Unanswered):
    """One node of a cluster did not answer the call."""


class SlotNotReached(NodeUnavailable, NotReached):
    """No node of the cluster has the slot."""


class Breaker:
    """A circuit breaker: after FAILURES failed calls in a row, the server should not be called for PAUSE seconds.

    `probe` asks the server, and raises an error if the server is not back. While the breaker is open, a thread calls
    `probe`, and no other call tries. Without `probe`, or without a thread, one call tries again after each pause.
    `clock` returns seconds and never goes back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, probe: Callable[[], object] | None = None) -> None:
        self._clock = clock
        self._probe = probe
        #: How many calls in a row have failed. While it is 0, `closed` is True and `succeeded` does nothing.
        self.failures = 0
        #: The end of the pause, in seconds of `clock`.
        self._pause_end = 0.0
        #: The event of the last failure (see `failed`).
        self._event: object = None
        #: A function that is called with True when calls stop, and with False when the server has answered again.
        self.on_change: Callable[[bool], object] | None = None

    @property
    def is_open(self) -> bool:
        """Return whether the server did not answer, and has not answered since."""
        return self.failures >= FAILURES

    @property
    def closed(self) -> bool:
        """Return whether to call the server now. See the class for who tries again while the breaker is open."""
        if self.failures < FAILURES:
            return True
        now = self._clock()
        if now < self._pause_end:
            return False
        self._pause_end = now + PAUSE
        # A forked child has no thread yet: then this call tries, and the thread begins.
        return self._probe is None or not prober.watch(self, self._probe)

    def succeeded(self) -> None:
        """Note that a call was answered."""
        if self.failures:
            was_open, self.failures = self.failures >= FAILURES, 0
            if was_open and self.on_change is not None:
                self.on_change(False)

    def failed(self, event: object = None) -> None:
        """Note that a call failed.

        Calls with the same `event` count as one failure. For example, many calls fail if one shared connection is lost.
        """
        if event is not None and event is self._event:
            return
        self._event = event
        self.failures += 1
        self._pause_end = self._clock() + PAUSE
        if self.failures == FAILURES:
            if self._probe is not None:
                prober.watch(self, self._probe)
            if self.on_change is not None:
                self.on_change(True)
