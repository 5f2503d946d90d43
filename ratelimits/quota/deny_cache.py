"""Refusals that cannot change yet, answered in this process: who was told "in 40 seconds" is not asked about again.

A refusal is repeated until the moment it named, and for DENY_CACHE_SECONDS at most, so that what loosens a limit (an
edit, a reset, a refund) reaches a key that is being refused within that time. What tightens one changes no refusal.
Every repetition of what was counted as denied is counted, too, and so is what a limit of capacity 0 refuses, for which
no server is asked at all: the counts are sent on every second, and when the process ends.
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

#: Refusals that are remembered at most; past it, they are forgotten, not their counts.
MAX_REFUSALS = 50_000
#: Seconds between two sendings of the counts.
INTERVAL = 1.0


class Denied:
    """A refusal: the decision, when it was made and until when it may be repeated (seconds of the cache's clock).

    `payload` is whatever the asker wants to have with it again; `repeated` is as long as it was repeated often, since
    appending to a list takes no lock.
    """

    __slots__ = ("decision", "payload", "repeated", "since", "until")

    def __init__(self, decision: Decision, payload: Any, since: float, until: float) -> None:
        self.decision = decision
        self.payload = payload
        self.since = since
        self.until = until
        self.repeated: list[None] = []

    def counted(self) -> int:
        """How often it was repeated since the last time that this was asked."""
        count = len(self.repeated)
        del self.repeated[:count]
        return count


class DenyCache:
    """The refusals of one process. `clock` is in seconds and goes only forward."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._known: dict[Hashable, Denied] = {}
        self._ended: list[Denied] = []
        self._unsent: list[Counted] = []
        self._decided: deque[Decision] = deque()

    def count(self, decision: Decision) -> None:
        """Count a refusal that no server has counted; the same decision may come again and again."""
        self._decided.append(decision)

    def look(self, cache_key: Hashable) -> Denied | None:
        """The refusal that still stands for such a request, counted once more; None if it has to be asked for."""
        denied = self._known.get(cache_key)
        if denied is None or self.clock() >= denied.until:
            return None
        denied.repeated.append(None)
        return denied

    def keep(self, cache_key: Hashable, decision: Decision, seconds: float, payload: Any = None) -> None:
        """Repeat this refusal for so many seconds at most, unless it can change at any moment."""
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
        """All counts since the last time; refusals that have ended are forgotten."""
        # One that was looked up while it stood may be repeated a moment later: no sooner than now it is forgotten.
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
        """Keep counts that could not be sent for the next `take`, MOST of them at most."""
        with self._lock:
            self._unsent += unsent
            if len(self._unsent) > MAX_REFUSALS:
                logger.error("Too many refusals wait to be counted as denied: the oldest are dropped.")
                del self._unsent[:-MAX_REFUSALS]

    def clear(self) -> None:
        """Forget everything, counts included: for a process that starts out as another's copy."""
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
    """Count refusals in the open batches; return those that certainly were not sent.

    Nothing more is tried once the server does not answer. What a reply was lost of is not sent again: it is logged.
    `on_version` receives the version of the configuration that is in force where they were counted.
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
            # Other nodes of a cluster may well answer.
            away = isinstance(error, Unavailable) and not isinstance(error, NodeUnavailable)
            if isinstance(error, NotSent):
                unsent += some
            else:
                logger.error("Refusals that this process answered could not be counted as denied: %s", error)
    if version and on_version is not None:
        on_version(version)
    return unsent


class Sender:
    """Sends a cache's counts every INTERVAL seconds, from the first refusal on.

    `on_version` receives the version of the configuration that the server has then, but not as the process ends.
    """

    def __init__(
        self, cache: DenyCache, server: Callable[[], Server], on_version: Callable[[int], object] | None = None
    ) -> None:
        self._cache = cache
        self._server = server
        self._on_version = on_version
        self._background = Background("ratelimits-denied", lambda: INTERVAL, self._send, self._send_last, turn=2)
        self.start = self._background.start
        self.flush = self._background.run
        os.register_at_fork(after_in_child=cache.clear)

    def _send(self) -> None:
        counted = self._cache.take()
        if counted:
            self._cache.put_back(send(self._server(), counted, self._on_version))

    def _send_last(self) -> None:
        counted = self._cache.take()
        if counted:
            self._cache.put_back(send(self._server(), counted))
