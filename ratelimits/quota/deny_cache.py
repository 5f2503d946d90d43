"""Repeat refusals that cannot change yet, without asking the server again.

A refusal is repeated until the moment that its retry_after names, and for DENY_CACHE_SECONDS at most. So a change that
admits more (an edit, a reset, a refund) takes effect within that time; a change that admits less makes no difference to
a refusal. Each repetition is counted as denied, and so is each refusal by a limit of capacity 0, for which no server is
asked. The counts are sent to the server every second, and when the process ends.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable
from typing import Any

from redis.exceptions import ResponseError

from ratelimits.background import Background
from ratelimits.engine.call import Usage, home, nonce
from ratelimits.engine.counting import Count, Counted
from ratelimits.engine.decision import Decision
from ratelimits.engine.server import Server
from ratelimits.engine.transport.breaker import NodeUnavailable
from ratelimits.engine.transport.connection import NotSent, Unavailable

logger = logging.getLogger(__name__)

#: Maximum number of refusals that are kept. Beyond it the refusals are forgotten, but not their counts.
MAX_REFUSALS = 50_000
#: Seconds between two times that the counts are sent.
INTERVAL = 1.0


class Denied:
    """A refusal: the decision, when it was made and until when it may be repeated (seconds of the cache's clock).

    `payload` is what the caller of `keep` wants back. `repeated` has one item for each repetition, since appending to a
    list needs no lock.
    """

    __slots__ = ("decision", "payload", "repeated", "since", "until")

    def __init__(self, decision: Decision, payload: Any, since: float, until: float) -> None:
        self.decision = decision
        self.payload = payload
        self.since = since
        self.until = until
        self.repeated: list[None] = []

    def counted(self) -> int:
        """Return how often the refusal was repeated since the last call of this method."""
        count = len(self.repeated)
        del self.repeated[:count]
        return count


class DenyCache:
    """The refusals of one process. `clock` returns seconds and never goes back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._known: dict[Hashable, Denied] = {}
        self._ended: list[Denied] = []
        self._unsent: list[Counted] = []
        self._decided: deque[Decision] = deque()

    def count(self, decision: Decision) -> None:
        """Count a refusal that no server has counted. The same decision may be counted many times."""
        self._decided.append(decision)

    def look(self, cache_key: Hashable) -> Denied | None:
        """Return the refusal that still stands for a request, and count it again; None if the server must decide."""
        denied = self._known.get(cache_key)
        if denied is None or self.clock() >= denied.until:
            return None
        denied.repeated.append(None)
        return denied

    def keep(self, cache_key: Hashable, decision: Decision, seconds: float, payload: Any = None) -> None:
        """Keep a refusal, to be repeated for at most `seconds`, unless it can change at any moment."""
        number = decision.binding
        if seconds <= 0 or number is None:
            return
        if not decision.program.terms[number].algorithm.refusals_stand:
            return
        now, retry_after = self.clock(), decision.retry_after
        until = now + (seconds if retry_after is None else min(retry_after, seconds))
        with self._lock:
            if len(self._known) >= MAX_REFUSALS:
                self._ended += self._known.values()
                self._known.clear()
            before = self._known.get(cache_key)
            if before is not None:
                self._ended.append(before)
            self._known[cache_key] = Denied(decision, payload, now, until)

    def take(self) -> list[Counted]:
        """Return all counts since the last call, and forget refusals that have ended."""
        # Forget a refusal only some time after its end: a thread that looked it up before may still count a repetition.
        ended = self.clock() - INTERVAL
        with self._lock:
            unsent, self._unsent = self._unsent, []
            every = [*self._ended, *self._known.values()]
            self._ended = [denied for denied in self._ended if denied.until > ended]
            for cache_key, denied in list(self._known.items()):
                if denied.until <= ended:
                    self._known.pop(cache_key, None)
        counts = Counter(self._decided.popleft() for _ in range(len(self._decided)))
        for denied in every:
            counts[denied.decision] += denied.counted()
        asked = [(decision, count, decision.call.usage) for decision, count in counts.items()]
        return unsent + [
            _counted(decision, usage, count) for decision, count, usage in asked if count and usage is not None
        ]

    def put_back(self, unsent: list[Counted]) -> None:
        """Keep counts that could not be sent for the next `take`, at most MAX_REFUSALS of them."""
        with self._lock:
            self._unsent += unsent
            if len(self._unsent) > MAX_REFUSALS:
                logger.error("Too many refusals wait to be counted as denied: the oldest are dropped.")
                del self._unsent[:-MAX_REFUSALS]

    def clear(self) -> None:
        """Forget everything, counts included: they belong to the parent of a forked process."""
        self._lock = threading.Lock()
        self._known.clear()
        self._ended.clear()
        self._unsent.clear()
        self._decided.clear()


def _counted(decision: Decision, usage: Usage, requests: int) -> Counted:
    call, number = decision.call, decision.binding
    assert number is not None
    term = call.program.terms[number]
    return Counted(usage, call.costs[: len(usage.meters)], term.rule, term.version, requests)


def send(server: Server, counted: list[Counted], on_version: Callable[[int], object] | None = None) -> list[Counted]:
    """Count refusals in the open batches. Return those that were certainly not sent.

    Stop trying if the server does not answer. If a reply was lost, do not send the counts again, but log an error.
    Call `on_version` with the version of the configuration that the server has.
    """
    version = 0
    together: dict[tuple[int, tuple[int, ...]], list[Counted]] = {}
    for one in counted:
        together.setdefault((home(server.keyspace, one.usage), one.usage.periods), []).append(one)
    unsent: list[Counted] = []
    away = False
    for (shard, _periods), some in together.items():
        if away:
            unsent += some
            continue
        command = Count(server.keyspace.head(shard), server.keyspace.open(shard), some[0].usage)
        for one in some:
            command.add(one)
        try:
            version = max(version, server.wire.call(command, nonce()))
        except (Unavailable, ResponseError) as error:
            # Other nodes of a cluster may answer.
            away = isinstance(error, Unavailable) and not isinstance(error, NodeUnavailable)
            if isinstance(error, NotSent):
                unsent += some
            else:
                logger.error("Refusals that this process answered could not be counted as denied: %s", error)
    if version and on_version is not None:
        on_version(version)
    return unsent


class Sender:
    """Sends a cache's counts every INTERVAL seconds, from the first refusal on, and when the process ends.

    `on_version` is called with the version of the configuration that the server has, but not when the process ends.
    `more` returns what others have counted.
    """

    def __init__(
        self,
        cache: DenyCache,
        server: Callable[[], Server],
        on_version: Callable[[int], object] | None = None,
        more: Callable[[], list[Counted]] = list,
    ) -> None:
        self._cache = cache
        self._more = more
        self._server = server
        self._on_version = on_version
        self._background = Background("ratelimits-denied", lambda: INTERVAL, self._send, self._send_last, turn=2)
        self.start = self._background.start
        self.flush = self._background.run
        os.register_at_fork(after_in_child=cache.clear)

    def _send(self) -> None:
        counted = self._cache.take() + self._more()
        if counted:
            self._cache.put_back(send(self._server(), counted, self._on_version))

    def _send_last(self) -> None:
        counted = self._cache.take() + self._more()
        if counted:
            self._cache.put_back(send(self._server(), counted))
