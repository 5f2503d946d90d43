"""Ask a server that does not answer, in the background, so that no request has to find out that it is back.

One thread per process does this for all breakers that are open. It asks each server every PAUSE seconds, and ends when
no breaker is open. An idle process also asks, so its first request after an outage is decided and counted.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

from redis.exceptions import RedisError

from ratelimits import logs
from ratelimits.engine.transport.connection import Unavailable

logger = logs.bounded(__name__)

#: Seconds between two probes.
PAUSE = 1.0


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
            time.sleep(PAUSE)
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
