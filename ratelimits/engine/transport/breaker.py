"""A circuit breaker: it stops calls to a server that does not answer, and lets a thread ask when the server is back.

So no request has to find out that the server is back. One thread per process asks for all breakers that are open. It
asks each server every PROBE_PAUSE seconds, and ends when no breaker is open. An idle process also asks, so its first
request after an outage is decided and counted.

This module also has the errors of single nodes of a cluster.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

from redis.exceptions import RedisError

from ratelimits import logs
from ratelimits.engine.transport.connection import NotReached, NotSent, Unanswered, Unavailable

# Projects can configure this name, which is older than the prober's place in this module.
logger = logs.bounded("ratelimits.engine.transport.probing")

#: Seconds between two probes.
PROBE_PAUSE = 1.0
#: After FAILURES failures in a row, the server is not called for PAUSE seconds.
FAILURES, PAUSE = 3, 1.0


class Probed(Protocol):
    """A breaker: it is open until `succeeded` is called."""

    @property
    def is_open(self) -> bool: ...

    def succeeded(self) -> None: ...


class Prober:
    """The thread that asks the servers of all open breakers. A forked child has none until `watch` starts one."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._lock = threading.Lock()
        #: For each open breaker: the function that asks its server, and raises an error if the server is not back.
        self._watched: dict[Probed, Callable[[], object]] = {}
        self._runs = False

    def watch(self, breaker: Probed, probe: Callable[[], object]) -> bool:
        """Ask for this breaker from now on. Return whether the thread did so already."""
        with self._lock:
            if self._runs and breaker in self._watched:
                return True
            self._watched[breaker] = probe
            if not self._runs:
                try:
                    threading.Thread(target=self._run, name="ratelimits-probe", daemon=True).start()
                except RuntimeError as error:  # there are too many threads, or the process ends
                    logger.warning("No thread asks whether Redis is back; requests do: %s", error)
                else:
                    self._runs = True
            return False

    def forget(self, breaker: Probed) -> None:
        """Do not ask for this breaker any more: its server does not belong to the cluster now."""
        with self._lock:
            self._watched.pop(breaker, None)

    def is_active(self) -> bool:
        """Return whether a breaker of this process is open, and its server is asked."""
        return self._runs

    def _run(self) -> None:
        while True:
            time.sleep(PROBE_PAUSE)
            for breaker, probe in list(self._watched.items()):
                if breaker.is_open:
                    try:
                        probe()
                    except (Unavailable, RedisError, OSError) as error:
                        logger.debug("Redis is not back yet: %s", error)
                        continue
                    except Exception:  # a mistake in this app: the thread must go on, but somebody must hear of it
                        logger.exception("It cannot be asked whether Redis is back. Requests are not decided.")
                        continue
                    breaker.succeeded()
            with self._lock:
                # A breaker can have opened again since its probe.
                self._watched = {breaker: probe for breaker, probe in self._watched.items() if breaker.is_open}
                if not self._watched:
                    self._runs = False
                    return


prober = Prober()
os.register_at_fork(after_in_child=prober._forget)


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
