"""Prefetched permits: a process takes the permits of several requests in one call, and spends them without a call.

This works only for windows whose start depends on the clock alone. Their permits all come back at one moment, which the
reply names, and prefetched permits end before it. Other algorithms give permits back one by one. These, and
the permits that a process still holds, would together exceed the limit. Permits not spent in time are given back.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakSet

from redis.exceptions import ResponseError

from ratelimits.background import Background
from ratelimits.engine.call import Call, Command, Receipt
from ratelimits.engine.decide import decide_call, receipt_call
from ratelimits.engine.decision import AlreadySettled, Decision, Stale
from ratelimits.engine.server import Server
from ratelimits.engine.transport.breaker import NodeUnavailable
from ratelimits.engine.transport.connection import NotSent, Unavailable

logger = logging.getLogger(__name__)

#: The clocks of this machine and of the server differ. So prefetched permits end earlier than their window: by MARGIN
#: seconds, and by the part DRIFT of the time until the window ends.
MARGIN, DRIFT = 0.001, 0.001
#: A process takes at most this part (1/SHARE) of what a limit has left: other processes need permits too.
SHARE = 8
#: Seconds between two searches for permits that were not spent in time.
INTERVAL = 1.0
#: Seconds for which the server keeps the receipt of what was given back. It is never given back twice.
REMEMBERED = 60.0


class Fetch(NamedTuple):
    """The command that takes the permits of `size` requests, and the moment `asked`, by PrefetchedPermits' clock."""

    size: int
    command: Command
    asked: float = 0.0


class PrefetchedDecision(Decision):
    """A decision on several requests at once. It has no receipt: one request's part cannot be given back by itself."""

    __slots__ = ()

    @property
    def receipt(self) -> None:
        return None


class _Fetched:
    """What one fetch took: the permits of `size` requests. Those of `left` requests are unspent; all end at `until`."""

    __slots__ = ("left", "payload", "receipt", "size", "until")

    def __init__(self, size: int, until: float, payload: Any, receipt: Receipt | None) -> None:
        self.size = size
        self.left = size - 1
        self.until = until
        self.payload = payload
        self.receipt = receipt


class PrefetchedPermits:
    """The permits that this process holds for requests that are alike; each request takes the permits of `call`.

    One fetch takes the permits of 1, 2, 4, … requests, up to `maximum`: twice as many as the last fetch if all of those
    were spent, otherwise as many as were spent. Unspent permits end after `seconds`. `clock` returns seconds and never
    goes back.
    """

    def __init__(
        self, server: Server, call: Call, maximum: int, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._server = server
        self._call = call
        self._maximum = maximum
        self._seconds = seconds
        self._clock = clock
        self._size = 1
        self._room = maximum
        self._commands: dict[int, Command] = {}
        self.clear()
        with _lock:
            _all.add(self)

    def clear(self) -> None:
        """Forget all permits: in a forked process they belong to the parent."""
        self._lock = threading.Lock()
        self._fetched: deque[_Fetched] = deque()

    def spend(self) -> Any:
        """Spend one request's permits. Return the payload that they were recorded with, or None if there are none."""
        waiting = self._fetched
        while waiting:
            with self._lock:
                if not waiting:
                    break
                fetched = waiting[0]
                if fetched.left and self._clock() < fetched.until:
                    fetched.left -= 1
                    return fetched.payload
                waiting.popleft()
                self._size = fetched.size - fetched.left if fetched.left else 2 * fetched.size
        return None

    def next_fetch(self, *, again: bool = False) -> Fetch:
        """Return the next fetch, which includes this request's permits. With `again` it takes only these.

        A limit that has too few permits for many requests may have enough for one. Other threads may fetch for many
        requests meanwhile.
        """
        size = 1 if again else _power(min(self._size, self._room, self._maximum))
        command = self._commands.get(size)
        if command is None:
            call = self._call._replace(costs=tuple(size * cost for cost in self._call.costs))
            command = self._commands[size] = Command(self._server.keyspace, call)
        return Fetch(size, command, self._clock())

    def record(self, fetch: Fetch, decision: Decision, payload: Any) -> bool:
        """Record what a fetch was granted, and spend this request's part. Return False if it asked for too much.

        `payload` is what `spend` returns for the other requests.
        """
        with self._lock:
            if not decision.allowed:
                self._size, self._room = 1, 0
                return fetch.size == 1
            cost = max(self._call.costs, default=1) or 1
            self._room = decision.remaining // (SHARE * cost)
            # The server counts this time from its decision, which was after `asked`. So the window ends after `until`.
            window = min(standing.reset_after for standing in decision.standings)
            until = fetch.asked + min(self._seconds, window * (1 - DRIFT) - MARGIN)
            receipt = decision.receipt if fetch.size > 1 else None
            fetched = _Fetched(fetch.size, until, payload, receipt)
            self._fetched.append(fetched)
        if receipt is not None:
            with _lock:
                _returnable.append((self, fetched))
            _background.start()
        return True

    def end(self, fetched: _Fetched, *, now: bool = False) -> int | None:
        """Return for how many requests permits are unspent; None if they can still be spent. With `now` they end."""
        with self._lock:
            if now:
                fetched.until = float("-inf")
            return fetched.left if self._clock() >= fetched.until else None

    def give_back(self, fetched: _Fetched, left: int) -> None:
        """Give the permits of `left` requests back to the server. If that fails, they are lost until the window ends.

        Raise Unavailable if the server does not answer.
        """
        assert fetched.receipt is not None
        spent = tuple((fetched.size - left) * cost for cost in self._call.costs)
        try:
            decide_call(self._server, receipt_call(fetched.receipt, spent, REMEMBERED)._replace(now=self._call.now))
        except (ResponseError, Stale, AlreadySettled) as error:
            logger.info("Permits of %s requests that were not spent could not be given back: %s", left, error)


def _power(size: int) -> int:
    """Return the greatest power of two up to `size`, at least 1."""
    return 1 << max(size, 1).bit_length() - 1


def give_back(*, everything: bool = False) -> None:
    """Give back the permits that were not spent in time, or `everything`.

    Stop trying if the server does not answer. If a command was certainly not sent, try it again next time.
    """
    global _returnable
    with _lock:
        returnable, _returnable = _returnable, []
    unfinished, away = [], False
    for permits, fetched in returnable:
        left = permits.end(fetched, now=everything)
        if left is None or (left and away):
            unfinished.append((permits, fetched))
        elif left:
            try:
                permits.give_back(fetched, left)
            except Unavailable as error:
                logger.info("Permits of %s requests that were not spent could not be given back: %s", left, error)
                # Other nodes of a cluster may answer.
                away = not isinstance(error, NodeUnavailable)
                if isinstance(error, NotSent):
                    unfinished.append((permits, fetched))
    with _lock:
        _returnable += unfinished


_lock = threading.Lock()
_all: WeakSet[PrefetchedPermits] = WeakSet()
#: Fetched permits that may have to be given back.
_returnable: list[tuple[PrefetchedPermits, _Fetched]] = []
_background = Background("ratelimits-prefetch", lambda: INTERVAL, give_back, lambda: give_back(everything=True), turn=3)


def _forked() -> None:
    global _lock, _returnable
    _lock, _returnable = threading.Lock(), []
    for permits in list(_all):
        permits.clear()


os.register_at_fork(after_in_child=_forked)
