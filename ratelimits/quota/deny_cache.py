"""Store refusals in memory, and repeat them without asking Redis.

A refusal is repeated until its retry_after has passed, but for at most DENY_CACHE_SECONDS. So an edit, a reset or a
refund takes effect after DENY_CACHE_SECONDS at the latest.

Redis is not asked about requests that get a repeated refusal, or that a limit with capacity 0 refuses. So this module
counts these requests, and sends the counts to Redis every second and when the process ends. The reply contains the
version of the rules in force. So a process that never asks Redis for a decision also learns of an edit. If there were
such requests, but none of them is counted as usage, only the version is asked for.

Everything that waits here is bounded. While Redis is away, equal counts are added up. If there are too many different
counts, the further ones are not kept. They are declared instead: the process totals state them, and the reports print
them as a gap. Denied requests are not billed.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from redis.exceptions import ResponseError

from ratelimits.background import Background
from ratelimits.engine.call import Usage, new_nonce, shard_of_usage
from ratelimits.engine.counting import Count, RefusalCount, in_bounds
from ratelimits.engine.decision import Decision
from ratelimits.engine.server import Server
from ratelimits.engine.transport.breaker import NodeUnavailable
from ratelimits.engine.transport.connection import NotSent, Unavailable
from ratelimits.logs import bounded
from ratelimits.quota.counting import counting

logger = bounded(__name__)

#: Maximum number of meters of all stored refusals together. (Most requests have one meter. A refusal with many meters
#: needs more memory.) When this number is reached, all refusals are forgotten, but not their counts.
MAX_REFUSALS = 50_000
#: Maximum number of refusals that were decided without Redis, and that wait to be added up.
_MAX_DECIDED = 10_000
#: Seconds between two sendings of the counts.
INTERVAL = 1.0
#: Seconds after which a sending ends. The counts that are left wait for the next sending. So the newest counts, which
#: need more memory, are added up in time, even if each reply is slow.
LONGEST_SENDING = 5.0
#: Maximum number of counters that a `RefusalCounts` keeps. A request has one counter for each of its meters.
MAX_COUNTERS = 50_000

#: What is counted: the fields of a RefusalCount, without its number of requests.
_Subject = tuple[Usage, tuple[int, ...], int, int]


class StoredRefusal:
    """A refusal that can be repeated.

    since     the moment of the decision, in seconds of the cache's clock
    until     the moment at which the refusal ends, in seconds of the cache's clock
    payload   any object that a caller of `keep` wants to pass on to the callers of `repeat`
    repetitions  a list with one item for each repetition that is not counted yet. Appending to a list needs no lock
    """

    __slots__ = ("decision", "payload", "repetitions", "since", "until")

    def __init__(self, decision: Decision, payload: Any, since: float, until: float) -> None:
        self.decision = decision
        self.payload = payload
        self.since = since
        self.until = until
        self.repetitions: list[None] = []

    def take_count(self) -> int:
        """Return the number of repetitions since the last call of this method."""
        count = len(self.repetitions)
        del self.repetitions[:count]
        return count


class RefusalCounts:
    """Counts of refusals that wait to be sent. The caller must hold a lock."""

    def __init__(self) -> None:
        self._requests: dict[_Subject, int] = {}
        self._counters = 0

    def __len__(self) -> int:
        """Return the number of counters."""
        return self._counters

    def add(self, counted: RefusalCount) -> None:
        """Keep a count. If there are too many counters already, declare it instead."""
        subject = counted.usage, counted.costs, counted.rule, counted.version
        if subject not in self._requests:
            counters = max(len(counted.costs), 1)
            if self._counters + counters > MAX_COUNTERS:
                logger.error("Too many refusals wait to be counted as denied. The further ones are declared as a gap.")
                declare(counted)
                return
            self._counters += counters
        self._requests[subject] = self._requests.get(subject, 0) + counted.requests

    def take(self) -> list[RefusalCount]:
        """Return all counts, and forget them."""
        taken = [RefusalCount(*subject, requests) for subject, requests in self._requests.items()]
        self.clear()
        return taken

    def clear(self) -> None:
        """Forget all counts."""
        self._requests.clear()
        self._counters = 0


def declare(counted: RefusalCount) -> None:
    """Declare refusals that are perhaps not counted as denied: add them to the process totals, which state a gap."""
    usage = counted.usage
    costs = {meter.name: cost for meter, cost in zip(usage.meters, counted.costs, strict=True)}
    counting.add("uncounted", usage.account, usage.key, costs, counted.requests)


class DenyCache:
    """The refusals of one process. `clock` returns seconds and never goes back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        #: The stored refusals by cache key. Some of them have perhaps ended.
        self.refusals: dict[Hashable, StoredRefusal] = {}
        #: How many meters these refusals have together.
        self._meters = 0
        #: Refusals that are not repeated any more, but whose last repetitions are perhaps not counted yet.
        self._ended: list[StoredRefusal] = []
        #: Counts that were added up already, such as counts that could not be sent.
        self._waiting = RefusalCounts()
        #: The refusals that `count` was called with, one item for each call.
        self._decided: deque[Decision] = deque()
        #: Whether Redis is asked for the version of the rules at the next sending, even if there is nothing to count.
        self.asks = False

    def count(self, decision: Decision) -> None:
        """Count a refusal that was decided without Redis. Call this for each refused request."""
        self._decided.append(decision)
        if len(self._decided) >= _MAX_DECIDED:
            with self._lock:
                self._add_up()

    def repeat(self, cache_key: Hashable) -> StoredRefusal | None:
        """Return the refusal that this request gets again, and count the repetition.

        Return None if no refusal is stored for the request, or if the refusal has ended.
        """
        denied = self.refusals.get(cache_key)
        if denied is None or self.clock() >= denied.until:
            return None
        denied.repetitions.append(None)
        return denied

    def keep(self, cache_key: Hashable, decision: Decision, seconds: float, payload: Any = None) -> None:
        """Store a refusal. It is repeated for at most `seconds`.

        The refusal of a limit that can admit again at any moment, such as a concurrency limit, is not stored.
        """
        binding = decision.binding
        if seconds <= 0 or binding is None:
            return
        if not decision.program.terms[binding].algorithm.refusals_stand:
            return
        now, retry_after = self.clock(), decision.retry_after
        until = now + (seconds if retry_after is None else min(retry_after, seconds))
        meters = len(decision.call.costs) or 1
        with self._lock:
            if self._meters + meters > MAX_REFUSALS:
                for ended in list(self.refusals):
                    self._end(ended, now)
            self._end(cache_key, now)
            if len(self._ended) >= MAX_REFUSALS:
                self._add_up()
            self.refusals[cache_key] = StoredRefusal(decision, payload, now, until)
            self._meters += meters

    def _end(self, cache_key: Hashable, now: float) -> None:
        """Do not repeat this refusal any more. The caller must hold the lock."""
        denied = self.refusals.pop(cache_key, None)
        if denied is not None:
            self._meters -= len(denied.decision.call.costs) or 1
            denied.until = min(denied.until, now)
            self._ended.append(denied)

    def take(self) -> list[RefusalCount]:
        """Return all counts since the last call, and forget refusals that have ended."""
        with self._lock:
            waiting = self._waiting.take()
            return waiting + self._newest()

    def _add_up(self) -> None:
        """Add up all counts, so that they need less memory until the next `take`. The caller must hold the lock."""
        for counted in self._newest():
            self._waiting.add(counted)

    def _newest(self) -> list[RefusalCount]:
        """Return the counts since the last call, and forget refusals that have ended. The caller must hold the lock."""
        now = self.clock()
        # Forget a refusal only some time after its end. Another thread that found the refusal before its end can still
        # count a repetition.
        forget_before = now - INTERVAL
        for cache_key, denied in list(self.refusals.items()):
            if denied.until <= forget_before:
                self._end(cache_key, now)
        counts = Counter(self._decided.popleft() for _ in range(len(self._decided)))
        for denied in (*self._ended, *self.refusals.values()):
            counts[denied.decision] += denied.take_count()
        self._ended = [denied for denied in self._ended if denied.until > forget_before]
        refused = [(decision, count, decision.call.counted) for decision, count in counts.items() if count]
        if refused:
            self.asks = True  # do not write False: another thread can set True at this moment
        return [_refusal_count(decision, usage, count) for decision, count, usage in refused if usage is not None]

    def put_back(self, unsent: list[RefusalCount]) -> None:
        """Store counts that were not sent. The next `take` returns them. Declare those that there is no room for."""
        with self._lock:
            for counted in unsent:
                self._waiting.add(counted)

    def clear(self) -> None:
        """Forget all refusals and counts. A forked process calls this method, because its parent sends these counts."""
        self._lock = threading.Lock()
        self.refusals.clear()
        self._meters = 0
        self._ended.clear()
        self._waiting.clear()
        self._decided.clear()
        self.asks = False


def _refusal_count(decision: Decision, usage: Usage, requests: int) -> RefusalCount:
    call, binding = decision.call, decision.binding
    assert binding is not None
    term = call.program.terms[binding]
    return RefusalCount(usage, call.costs[: len(usage.meters)], term.rule, term.version, requests)


def send(
    server: Server, counted: list[RefusalCount], on_version: Callable[[int], object] | None = None
) -> list[RefusalCount]:
    """Count refusals in the open batches in Redis. Return the counts that were certainly not sent.

    If the server does not answer, or after LONGEST_SENDING, do not send the other counts. If a reply was lost, declare
    the counts of this command, and do not return them, because the server has perhaps counted them. Call `on_version`
    with the version of the rules in Redis.
    """
    version = 0
    by_shard: dict[int, list[RefusalCount]] = {}  # all counts of one command must have the same shard
    for item in counted:
        by_shard.setdefault(shard_of_usage(server.keyspace, item.usage), []).append(item)
    unsent: list[RefusalCount] = []
    no_answer, ends = False, time.monotonic() + LONGEST_SENDING
    commands = [(shard, part) for shard, group in by_shard.items() for part in in_bounds(group)]
    for shard, group in commands:
        if no_answer or time.monotonic() > ends:
            unsent += group
            continue
        command = Count(server.keyspace.head(shard), server.keyspace.open(shard))
        for item in group:
            command.add(item)
        try:
            version = max(version, server.wire.call(command, new_nonce()))
        except (Unavailable, ResponseError) as error:
            # If only one node of a cluster failed, the other nodes can still answer.
            no_answer = isinstance(error, Unavailable) and not isinstance(error, NodeUnavailable)
            if isinstance(error, NotSent):
                unsent += group
            else:
                logger.error("It is not known whether some refusals of this process were counted as denied: %s", error)
                for item in group:
                    declare(item)
    if version and on_version is not None:
        on_version(version)
    return unsent


class Sender:
    """Sends the counts of a cache every INTERVAL seconds and when the process ends. Call `start` to begin.

    on_version  is called with the version of the rules in Redis, but not when the process ends
    more        returns further counts, which are sent too
    """

    def __init__(
        self,
        cache: DenyCache,
        server: Callable[[], Server],
        on_version: Callable[[int], object] | None = None,
        more: Callable[[], Sequence[RefusalCount]] = list,
    ) -> None:
        self._cache = cache
        self._more = more
        self._server = server
        self._on_version = on_version
        self._background = Background("ratelimits-denied", lambda: INTERVAL, self._send, self._send_last, end_order=2)
        self.start = self._background.start
        self.flush = self._background.run
        os.register_at_fork(after_in_child=cache.clear)

    def _send(self) -> None:
        counted = [*self._cache.take(), *self._more()]
        asks = self._cache.asks
        if asks:
            self._cache.asks = False
        if counted:
            self._cache.put_back(send(self._server(), counted, self._on_version))
        elif asks:
            self._ask()

    def _ask(self) -> None:
        """Ask for the version of the rules, and count nothing. If Redis does not answer, the next sending asks."""
        server = self._server()
        command = Count(server.keyspace.head(0), server.keyspace.open(0))  # an edit writes its version to every shard
        try:
            version = server.wire.call(command, new_nonce())
        except (Unavailable, ResponseError) as error:
            logger.info("The version of the rules is asked for again: %s", error)
            self._cache.asks = True
            return
        if version and self._on_version is not None:
            self._on_version(version)

    def _send_last(self) -> None:
        # The process ends, so it does not need newer rules.
        counted = [*self._cache.take(), *self._more()]
        unsent = send(self._server(), counted) if counted else []
        if unsent:
            logger.error(
                "The process ends, and %s refusals were not counted as denied", sum(i.requests for i in unsent)
            )
            self._cache.put_back(unsent)
