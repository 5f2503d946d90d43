"""Prefetched permits: a process takes permits for several requests in one call, and later spends them without a call.

This works only for fixed and calendar windows whose start depends on the clock alone. All permits of such a window come
back at its end. The reply of the server names this moment, and prefetched permits end before it. Other algorithms give
permits back one by one, so new permits and prefetched permits together could exceed the limit.

Permits that were not spent in time are given back to the server.
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
#: A process takes at most 1/SHARE of the permits that a limit has left, because other processes need permits too.
SHARE = 8
#: Permits that were not spent in time are given back every INTERVAL seconds.
INTERVAL = 1.0
#: Seconds for which the server remembers that permits were given back, so that this does not happen twice.
REMEMBERED = 60.0


class Fetch(NamedTuple):
    """The command that takes the permits of `size` requests.

    `asked` is the moment when it was made, in seconds of the clock of PrefetchedPermits.
    """

    size: int
    command: Command
    asked: float = 0.0


class PrefetchedDecision(Decision):
    """A decision on several requests at once. It has no receipt, because a single request cannot be refunded."""

    __slots__ = ()

    @property
    def receipt(self) -> None:
        return None


class _Fetched:
    """The permits that one fetch took, for `size` requests.

    The permits for `left` of these requests are not spent yet. They can be spent until `until`, in seconds of the
    clock.
    """

    __slots__ = ("left", "payload", "receipt", "size", "until")

    def __init__(self, size: int, until: float, payload: Any, receipt: Receipt | None) -> None:
        self.size = size
        self.left = size - 1
        self.until = until
        self.payload = payload
        self.receipt = receipt


class PrefetchedPermits:
    """The prefetched permits of this process for one kind of request. `call` decides one such request.

    A fetch takes permits for 1, 2, 4, … requests, but for at most `maximum`. If all permits of the last fetch were
    spent, the next one takes twice as many. Otherwise the next one takes as many as were spent. Unspent permits end
    after `seconds`. `clock` returns seconds and never goes back.
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
        """Forget all permits. A forked process does this, since they belong to its parent."""
        self._lock = threading.Lock()
        self._fetched: deque[_Fetched] = deque()

    def spend(self) -> Any:
        """Spend the permits of one request. Return the payload given to `record`, or None if no permits are left."""
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
        """Return the next fetch. It takes the permits of this request and of later ones.

        With `again` it takes only the permits of this request. Use this after a fetch was refused: the limit may have
        too few permits for many requests, but enough for one.
        """
        size = 1 if again else _power(min(self._size, self._room, self._maximum))
        command = self._commands.get(size)
        if command is None:
            call = self._call._replace(costs=tuple(size * cost for cost in self._call.costs))
            command = self._commands[size] = Command(self._server.keyspace, call)
        return Fetch(size, command, self._clock())

    def record(self, fetch: Fetch, decision: Decision, payload: Any) -> bool:
        """Record the permits that a fetch took, and spend those of this request.

        `spend` returns `payload` for the other requests. Return False if the fetch was refused but asked for permits of
        several requests: then fetch again for one request.
        """
        with self._lock:
            if not decision.allowed:
                self._size, self._room = 1, 0
                return fetch.size == 1
            cost = max(self._call.costs, default=1) or 1
            self._room = decision.remaining // (SHARE * cost)
            # The server measures reset_after from its decision, which was after `asked`. So `until` is before the
            # window's end.
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
        """Return the number of requests whose permits ended unspent; None if the permits can still be spent.

        With `now` the permits end at once.
        """
        with self._lock:
            if now:
                fetched.until = float("-inf")
            return fetched.left if self._clock() >= fetched.until else None

    def give_back(self, fetched: _Fetched, left: int) -> None:
        """Give the permits of `left` requests back to the server.

        If the server refuses, nobody can use these permits until the window ends. Raise Unavailable if it does not
        answer.
        """
        assert fetched.receipt is not None
        spent = tuple((fetched.size - left) * cost for cost in self._call.costs)
        try:
            decide_call(self._server, receipt_call(fetched.receipt, spent, REMEMBERED)._replace(now=self._call.now))
        except (ResponseError, Stale, AlreadySettled) as error:
            logger.info("Unspent permits of %s requests were not given back: %s", left, error)


def _power(size: int) -> int:
    """Return the greatest power of two up to `size`, at least 1."""
    return 1 << max(size, 1).bit_length() - 1


def give_back(*, everything: bool = False) -> None:
    """Give back the permits that were not spent in time; with `everything` also those that could still be spent.

    If the server does not answer, leave the rest for the next time. If a command was certainly not sent, send it again
    the next time.
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
                logger.info("Unspent permits of %s requests were not given back: %s", left, error)
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
