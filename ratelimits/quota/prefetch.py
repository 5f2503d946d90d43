"""Prefetch permits: take permits for several requests in one call, and later spend them without asking Redis.

This works only for fixed and calendar windows whose start depends on the clock alone. All permits of such a window come
back at its end. The reply of Redis says when this is, and prefetched permits end earlier. With other algorithms permits
come back one by one. Then new permits and prefetched permits together could exceed the limit.

Permits that were not spent in time are given back to Redis.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakSet

from redis.exceptions import ResponseError

from ratelimits.background import Background
from ratelimits.engine.call import Call, Receipt
from ratelimits.engine.command import Command
from ratelimits.engine.decide import decide_call, receipt_call
from ratelimits.engine.decision import AlreadySettled, Decision, Stale
from ratelimits.engine.server import Server
from ratelimits.engine.transport.breaker import NodeUnavailable
from ratelimits.engine.transport.connection import NotSent, Unavailable
from ratelimits.logs import bounded

logger = bounded(__name__)

#: The clocks of this machine and of Redis differ. So prefetched permits end before their window ends: MARGIN seconds
#: earlier, plus the fraction DRIFT of the time that the window has left.
MARGIN, DRIFT = 0.001, 0.001
#: A process takes at most 1/SHARE of the permits that a limit has left, because other processes need permits too.
SHARE = 8
#: Seconds between two times at which unspent permits are given back.
INTERVAL = 1.0
#: Seconds for which Redis remembers that permits were given back, so that they are not given back twice.
REMEMBERED = 60.0


class Fetch(NamedTuple):
    """The command that takes the permits of `size` requests.

    `asked` is the moment at which the command was made, in seconds of the clock of PrefetchedPermits.
    """

    size: int
    command: Command
    asked: float = 0.0


class PrefetchedDecision(Decision):
    """A decision about several requests together. It has no receipt, so none of these requests can be refunded."""

    __slots__ = ()

    @property
    def receipt(self) -> None:
        return None


class _Fetched:
    """The permits that one fetch took, for `size` requests.

    `left` is the number of these requests whose permits are not spent yet. They can be spent before the moment `until`,
    in seconds of the clock.
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
    spent, the next fetch takes twice as many. Otherwise the next fetch takes as many as were spent. Unspent permits end
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
        #: Maximum number of requests for which the next fetch takes permits, so that other processes get permits too.
        self._room = maximum
        self._commands: dict[int, Command] = {}
        self.clear()
        with _lock:
            _all.add(self)

    def clear(self) -> None:
        """Forget all permits. A forked process calls this, because the permits belong to its parent."""
        self._lock = threading.Lock()
        self._fetched: deque[_Fetched] = deque()

    def spend(self) -> Any:
        """Spend the permits of one request. Return the `payload` of `record`, or None if no permits are left."""
        fetches = self._fetched
        while fetches:
            with self._lock:
                if not fetches:
                    break
                fetched = fetches[0]
                if fetched.left and self._clock() < fetched.until:
                    fetched.left -= 1
                    return fetched.payload
                fetches.popleft()
                self._size = fetched.size - fetched.left if fetched.left else 2 * fetched.size
        return None

    def next_fetch(self, *, again: bool = False) -> Fetch:
        """Return the next fetch, which takes the permits of this request and of later requests.

        If `again` is true, it takes only the permits of this request. Use this after a refused fetch: the limit may
        have too few permits for many requests, but enough for one.
        """
        size = 1 if again else _power(min(self._size, self._room, self._maximum))
        command = self._commands.get(size)
        if command is None:
            call = self._call._replace(costs=tuple(size * cost for cost in self._call.costs))
            command = self._commands[size] = Command(self._server.keyspace, call)
        return Fetch(size, command, self._clock())

    def record(self, fetch: Fetch, decision: Decision, payload: Any) -> bool:
        """Record the permits that a fetch took, and spend the permits of this request.

        `spend` returns `payload` for the other requests. Return False if a fetch for several requests was refused. Then
        the caller fetches again, for one request.
        """
        with self._lock:
            if not decision.allowed:
                self._size, self._room = 1, 0
                return fetch.size == 1
            cost = max(self._call.costs, default=1) or 1
            self._room = decision.remaining // (SHARE * cost)
            # reset_after begins at the moment of the decision, which is after `asked`. So `until` is before the end of
            # the window.
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
        """Return the number of requests whose permits have ended and were not spent; None if they have not ended.

        If `now` is true, the permits end at once.
        """
        with self._lock:
            if now:
                fetched.until = float("-inf")
            return fetched.left if self._clock() >= fetched.until else None

    def give_back(self, fetched: _Fetched, unspent: int) -> None:
        """Give the permits of `unspent` requests back to Redis.

        If Redis answers with an error, nobody can use these permits until the window ends. Raise Unavailable if Redis
        does not answer.
        """
        assert fetched.receipt is not None
        spent = tuple((fetched.size - unspent) * cost for cost in self._call.costs)
        try:
            decide_call(self._server, receipt_call(fetched.receipt, spent, REMEMBERED)._replace(now=self._call.now))
        except (ResponseError, Stale, AlreadySettled) as error:
            logger.info("Unspent permits of %s requests were not given back: %s", unspent, error)


def _power(size: int) -> int:
    """Return the greatest power of two that is not above `size`; at least 1."""
    return 1 << max(size, 1).bit_length() - 1


def give_back(*, everything: bool = False) -> None:
    """Give back the permits that were not spent in time. If `everything` is true, give back all unspent permits.

    If Redis does not answer, give back the rest at the next call. Never send a command again that may have arrived.
    """
    global _returnable
    with _lock:
        returnable, _returnable = _returnable, []
    unfinished, no_answer = [], False
    for permits, fetched in returnable:
        unspent = permits.end(fetched, now=everything)
        if unspent is None or (unspent and no_answer):
            unfinished.append((permits, fetched))
        elif unspent:
            try:
                permits.give_back(fetched, unspent)
            except Unavailable as error:
                logger.info("Unspent permits of %s requests were not given back: %s", unspent, error)
                # Other nodes of a cluster may answer.
                no_answer = not isinstance(error, NodeUnavailable)
                if isinstance(error, NotSent):
                    unfinished.append((permits, fetched))
    with _lock:
        _returnable += unfinished


_lock = threading.Lock()
_all: WeakSet[PrefetchedPermits] = WeakSet()
#: Fetched permits that may have to be given back.
_returnable: list[tuple[PrefetchedPermits, _Fetched]] = []
_background = Background(
    "ratelimits-prefetch", lambda: INTERVAL, give_back, lambda: give_back(everything=True), end_order=3
)


def _forked() -> None:
    global _lock, _returnable
    _lock, _returnable = threading.Lock(), []
    for permits in list(_all):
        permits.clear()


os.register_at_fork(after_in_child=_forked)
