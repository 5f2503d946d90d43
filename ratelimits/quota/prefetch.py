"""Permits taken ahead: a process takes those of n requests in one call, and spends them without asking again.

Only windows that lie where the clock says lend themselves to it: their permits come back all at once, at a moment that
the reply tells, and an allotment ends before it. Anywhere else permits come back while others are held here, and the
two together would be more than the limit. What was not spent by then is given back.
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

from ratelimits.algorithms.limits import Algorithm, CalendarWindow, FixedWindow
from ratelimits.background import Background
from ratelimits.engine.call import Call, Command, Receipt
from ratelimits.engine.decide import decide_call, receipt_call
from ratelimits.engine.decision import AlreadySettled, Decision, Stale
from ratelimits.engine.server import Server
from ratelimits.engine.transport.breaker import NodeUnavailable
from ratelimits.engine.transport.connection import NotSent, Unavailable

logger = logging.getLogger(__name__)

#: An allotment ends so many seconds, and this part of what is left of it, before its window does: this machine's clock
#: and the server's do not run alike.
MARGIN, DRIFT = 0.001, 0.001
#: Of what a limit has left, a process takes at most one part of so many: others want some too.
SHARE = 8
#: Seconds between two looks for what was not spent in time.
INTERVAL = 1.0
#: Seconds for which the server remembers that something was given back: nobody tries it again.
REMEMBERED = 60.0


def lends_itself(algorithm: Algorithm) -> bool:
    """Whether permits of such a limit can be taken ahead: its windows lie where the clock says."""
    return isinstance(algorithm, CalendarWindow) or (
        isinstance(algorithm, FixedWindow) and algorithm.window_start == "epoch"
    )


class Take(NamedTuple):
    """The permits of `size` requests, to be asked for by `command`; `asked` is when, by the allotment's clock."""

    size: int
    command: Command
    asked: float = 0.0


class Taken(Decision):
    """A decision on several requests at once: what one of them took cannot be given back by itself."""

    __slots__ = ()

    @property
    def receipt(self) -> None:
        return None


class _Batch:
    """What one call took: so many requests' permits are left of `size`, to be spent until then."""

    __slots__ = ("about", "left", "receipt", "size", "until")

    def __init__(self, size: int, until: float, about: Any, receipt: Receipt | None) -> None:
        self.size = size
        self.left = size - 1
        self.until = until
        self.about = about
        self.receipt = receipt


class Allotment:
    """The permits that this process holds for requests that are alike, each one's being those of `call`.

    Taken at once are those of 1, 2, 4, … requests, `most` at most: twice as many as the last time when all those were
    spent, and no more than were spent when they were not. They end after `seconds`. `clock` is in seconds and goes only
    forward.
    """

    def __init__(
        self, server: Server, call: Call, most: int, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._server = server
        self._call = call
        self._most = most
        self._seconds = seconds
        self._clock = clock
        self._size = 1
        self._room = most
        self._commands: dict[int, Command] = {}
        self.clear()
        with _lock:
            _all.add(self)

    def clear(self) -> None:
        """Hold nothing: what is held was taken by another process, whose copy this one is."""
        self._lock = threading.Lock()
        self._held: deque[_Batch] = deque()

    def spend(self) -> Any:
        """Spend one request's permits: what they were booked with, or None when none are held."""
        held = self._held
        while held:
            with self._lock:
                if not held:
                    break
                batch = held[0]
                if batch.left and self._clock() < batch.until:
                    batch.left -= 1
                    return batch.about
                held.popleft()
                self._size = batch.size - batch.left if batch.left else 2 * batch.size
        return None

    def take(self, *, again: bool = False) -> Take:
        """Return what to ask the server for, this request's permits among them; `again`: those alone.

        What was refused for many may be there for one, and other threads may ask for many meanwhile.
        """
        size = 1 if again else _power(min(self._size, self._room, self._most))
        command = self._commands.get(size)
        if command is None:
            call = self._call._replace(costs=tuple(size * cost for cost in self._call.costs))
            command = self._commands[size] = Command(self._server.keyspace, call)
        return Take(size, command, self._clock())

    def book(self, take: Take, decision: Decision, about: Any) -> bool:
        """Hold what was admitted, and spend this request's part of it; False: it was too much, take again.

        `about` is what `spend` answers for the others.
        """
        with self._lock:
            if not decision.allowed:
                self._size, self._room = 1, 0
                return take.size == 1
            cost = max(self._call.costs, default=1) or 1
            self._room = decision.remaining // (SHARE * cost)
            # A window ends that long after the server decided, so by then or later.
            window = min(standing.reset_after for standing in decision.standings)
            until = take.asked + min(self._seconds, window * (1 - DRIFT) - MARGIN)
            receipt = decision.receipt if take.size > 1 else None
            batch = _Batch(take.size, until, about, receipt)
            self._held.append(batch)
        if receipt is not None:
            with _lock:
                _lent.append((self, batch))
            _background.start()
        return True

    def end(self, batch: _Batch, *, now: bool = False) -> int | None:
        """How many requests' permits of a batch nobody will spend; None while it can be spent, unless it ends `now`."""
        with self._lock:
            if now:
                batch.until = float("-inf")
            return batch.left if self._clock() >= batch.until else None

    def give_back(self, batch: _Batch, left: int) -> None:
        """Have the server know that so many were not spent; what is lost on the way is lost to the window.

        Raises Unavailable if the server does not answer.
        """
        assert batch.receipt is not None
        spent = tuple((batch.size - left) * cost for cost in self._call.costs)
        try:
            decide_call(self._server, receipt_call(batch.receipt, spent, REMEMBERED)._replace(now=self._call.now))
        except (ResponseError, Stale, AlreadySettled) as error:
            logger.info("Permits of %s requests that were not spent could not be given back: %s", left, error)


def _power(size: int) -> int:
    """The greatest power of two that is not greater; 1 at least."""
    return 1 << max(size, 1).bit_length() - 1


def give_back(*, everything: bool = False) -> None:
    """Give back what was not spent in time, or `everything` that is held.

    Nothing more is tried once the server does not answer; what certainly was not sent is tried again the next time.
    """
    global _lent
    with _lock:
        lent, _lent = _lent, []
    kept, away = [], False
    for allotment, batch in lent:
        left = allotment.end(batch, now=everything)
        if left is None or (left and away):
            kept.append((allotment, batch))
        elif left:
            try:
                allotment.give_back(batch, left)
            except Unavailable as error:
                logger.info("Permits of %s requests that were not spent could not be given back: %s", left, error)
                # Other nodes of a cluster may well answer.
                away = not isinstance(error, NodeUnavailable)
                if isinstance(error, NotSent):
                    kept.append((allotment, batch))
    with _lock:
        _lent += kept


_lock = threading.Lock()
_all: WeakSet[Allotment] = WeakSet()
#: What was taken and may have to be given back.
_lent: list[tuple[Allotment, _Batch]] = []
_background = Background(
    "ratelimits-allotments", lambda: INTERVAL, give_back, lambda: give_back(everything=True), turn=3
)


def _forked() -> None:
    global _lock, _lent
    _lock, _lent = threading.Lock(), []
    for allotment in list(_all):
        allotment.clear()


os.register_at_fork(after_in_child=_forked)
