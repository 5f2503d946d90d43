"""Prefetch permits: take permits for several requests in one call, and later spend them without asking Redis.

This works only for fixed and calendar windows whose start depends only on the clock. All permits of such a window come
back at its end. The reply of Redis says when this is, and prefetched permits end earlier. With other algorithms permits
come back one by one. Then new permits and prefetched permits together could exceed the limit.

The call that takes the permits counts one request as usage: the request for which the call is made. `spending.py`
counts the later requests, and gives back permits that were not spent in time.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakSet

from ratelimits.algorithms.base import MICROSECONDS
from ratelimits.engine.call import Call, Receipt, bin_of
from ratelimits.engine.command import Command
from ratelimits.engine.counting import MAX_SPENT_COUNTERS, Spent, record
from ratelimits.engine.decide import receipt_call
from ratelimits.engine.decision import Decision
from ratelimits.engine.program import program
from ratelimits.engine.server import Server

#: The clocks of this machine and of Redis differ. So prefetched permits end before their window ends: MARGIN seconds
#: earlier, plus the fraction DRIFT of the time that the window has left.
MARGIN, DRIFT = 0.001, 0.001
#: A process takes at most 1/SHARE of the permits that a limit has left, because other processes need permits too.
SHARE = 8
#: Seconds for which Redis remembers that permits were given back, so that they are not given back twice.
REMEMBERED_SECONDS = 60.0
#: A moment that is always over: permits until this moment have ended.
_ENDED = float("-inf")


class Fetch(NamedTuple):
    """The command that takes the permits of `size` requests.

    `asked` is the moment just before the command is sent, in seconds of the clock of PrefetchedPermits.
    """

    size: int
    command: Command
    asked: float = 0.0


class Prefetch:
    """The permits that one fetch took for `size` requests: the request that made the fetch, and later requests.

    The first request has spent its permits at once.

    permits   the object PrefetchedPermits to which the prefetch belongs
    call      the call that decides one of these requests
    reply     the numbers of Redis's reply to the fetch
    size      the number of all requests
    unspent   the index of each later request whose permits are not spent. To spend permits, a request takes the last
              index. This needs no lock
    ended     the number of later requests whose permits ended before they were spent
    until     the moment before which permits can be spent, in seconds of the clock
    counted   the number of later requests that Redis has counted
    recorded  whether Redis has, or perhaps has, a record of the prefetch (see engine/counting.py)
    returned  whether nothing is left to give back to Redis: all permits were spent, given back or lost
    receipt   the receipt of all permits. Its usage is the usage of one request
    counted_at  when Redis counted the first request, in µs since 1970 UTC
    """

    __slots__ = (
        *("call", "counted", "counted_at", "ended", "permits", "receipt", "recorded"),
        *("reply", "returned", "size", "unspent", "until"),
    )

    def __init__(self, permits: PrefetchedPermits, size: int, decision: Decision) -> None:
        receipt = decision.receipt
        assert receipt is not None
        self.permits = permits
        self.call = permits.call
        self.receipt: Receipt = receipt
        self.reply = decision.reply
        self.counted_at = decision.counted_at
        self.size = size
        self.unspent = list(range(size - 1))
        self.ended = 0
        self.until = _ENDED
        self.counted = 0
        self.recorded = False
        self.returned = False

    @property
    def left(self) -> int:
        """Return the number of later requests whose permits were not spent."""
        return len(self.unspent) + self.ended

    def end(self) -> None:
        """End the permits that are not spent, so that no request can spend them."""
        self.until = _ENDED
        while self.unspent:
            with suppress(IndexError):  # another thread has taken the last index
                self.unspent.pop()
                self.ended += 1

    @property
    def spent(self) -> int:
        """Return the number of later requests that have spent their permits."""
        return self.size - 1 - self.left

    def receipt_of(self, index: int) -> Receipt:
        """Return the receipt of the request with this index."""
        nonce = f"{self.receipt.nonce}.{index}"
        return replace(self.receipt, nonce=nonce, program=self.call.program, costs=self.call.costs)

    def record(self) -> bytes:
        """Return the record of the prefetch for Redis. It states the end of the permits by the server's clock."""
        lasts = round((self.until - self.permits.clock()) * MICROSECONDS)
        return record(self.receipt, self.size - 1, self.counted_at + max(lasts, 0))

    def give_back_call(self) -> Call:
        """Return the call that gives back the permits that were not spent. It does not change the counted usage."""
        costs = self.call.costs
        # As in the receipt: first the costs of one request, then the costs of all requests that have spent permits.
        spent = (*costs, *((self.size - self.left) * cost for cost in costs))
        return receipt_call(replace(self.receipt, usage=None), spent, REMEMBERED_SECONDS)._replace(now=self.call.now)


class PrefetchedDecision(Decision):
    """The decision on one of the requests that share a prefetch. Its receipt is only for this request."""

    __slots__ = ("_index", "_prefetch")

    def __init__(self, prefetch: Prefetch, index: int) -> None:
        self.call = prefetch.call
        self.reply = prefetch.reply
        self._prefetch = prefetch
        self._index = index

    @property
    def receipt(self) -> Receipt:
        return self._prefetch.receipt_of(self._index)


class UnsentCounts(NamedTuple):
    """Counts that must be sent to Redis: for each prefetch of `permits`, how many requests have spent its permits.

    If `new` is not None, Redis must also record this new prefetch. If `are_all` is false, there was no room for the
    counts of further prefetches.
    """

    permits: PrefetchedPermits
    new: Prefetch | None
    items: tuple[tuple[Prefetch, Spent], ...]
    are_all: bool = True

    @property
    def counters(self) -> int:
        """Return the number of counters in Redis that these counts are added to."""
        return len(self.items) * self.permits.meters

    @property
    def receipt(self) -> Receipt:
        """Return the receipt of one of these prefetches. All these prefetches belong to one shard."""
        return self.new.receipt if self.new is not None else self.items[0][0].receipt


class PrefetchedPermits:
    """The prefetched permits of this process for one kind of request. `call` decides and counts one such request.

    A fetch takes permits for 1, 2, 4, … requests, but for at most `maximum`. If all permits of the last prefetch were
    spent, the next fetch takes twice as many. Otherwise the next fetch takes as many as were spent. Unspent permits end
    after `seconds`. They also end before the end of the window and of the bin of usage in which they were taken. So
    each request is counted in the window and bin from which its permits were taken. `clock` returns seconds and never
    goes back.

    Only one prefetch can be spent at a time, and only after Redis has counted all requests of earlier prefetches. So
    the number of requests that are not counted is always below `maximum`. If requests are not counted at all, the
    prefetch can be spent at once.
    """

    def __init__(
        self, server: Server, call: Call, maximum: int, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.server = server
        self.call = call
        #: The number of meters that count one request.
        self.meters = max(len(call.usage.meters), 1) if call.usage is not None else 1
        self.clock = clock
        self._maximum = maximum
        self._seconds = seconds
        #: For how many requests the next fetch takes permits, if `_room` and `_maximum` allow as many.
        self._size = 1
        #: Maximum number of requests for which the next fetch takes permits, so that other processes get permits too.
        self._room = maximum
        #: The commands that fetch permits, by the number of requests.
        self._commands: dict[int, Command] = {}
        self.clear()
        _all.add(self)

    def clear(self) -> None:
        """Forget all permits. A forked process calls this, because the permits belong to its parent."""
        self._lock = threading.Lock()
        #: The prefetch that can be spent.
        self._current: Prefetch | None = None
        #: A prefetch that Redis must record before it can be spent.
        self._new: Prefetch | None = None
        #: The prefetches that Redis has recorded, or has perhaps recorded.
        self._recorded: list[Prefetch] = []
        #: Whether counts are being sent.
        self._sending = False

    def spend(self) -> PrefetchedDecision | None:
        """Spend the permits of one request, and return the decision on it. Return None if no permits are left."""
        prefetch = self._current
        if prefetch is None:
            return None
        if self.clock() < prefetch.until:
            try:
                return PrefetchedDecision(prefetch, prefetch.unspent.pop())
            except IndexError:
                pass
        with self._lock:
            self._end(prefetch)
        return None

    def _end(self, prefetch: Prefetch) -> None:
        """Spend no more permits of a prefetch. The caller must hold the lock."""
        prefetch.end()
        if self._current is prefetch:
            self._current = None
            requests_served = prefetch.size - prefetch.left
            self._size = requests_served if prefetch.left else 2 * prefetch.size

    def next_fetch(self, *, again: bool = False) -> Fetch:
        """Return the next fetch, which takes the permits of this request and of later requests.

        If `again` is true, the fetch takes only the permits of this request. Use this after a refused fetch: the limit
        perhaps has too few permits for many requests, but enough for one.
        """
        size = 1
        if not again and self._current is None and self._new is None:
            size = _greatest_power_of_two(min(self._size, self._room, self._maximum))
        if size > 1:
            self._size = 1  # Until this prefetch is recorded, other threads take permits for one request each.
        command = self._commands.get(size)
        if command is None:
            command = self._commands[size] = Command(self.server.keyspace, self._fetching(size))
        return Fetch(size, command, self.clock())

    def _fetching(self, size: int) -> Call:
        """Return the call that takes the permits of several requests and counts one request."""
        call = self.call
        if size == 1:
            return call
        # First the costs of one request, which are counted as usage. Then the costs of all requests, which the limits
        # charge.
        terms = tuple(replace(term, slot=len(call.costs) + term.slot) for term in call.program.terms)
        costs = (*call.costs, *(size * cost for cost in call.costs))
        # If this call is refused, the request is decided again, by a call for one request. That decision is counted.
        return call._replace(program=program(terms), costs=costs, counts_refusal=False)

    def take(self, fetch: Fetch, decision: Decision) -> tuple[Decision, Prefetch | None] | None:
        """Take the permits of a fetch.

        Return the decision on the request that made the fetch, and the prefetch. If the fetch was for one request,
        there is None instead of the prefetch. Return None if a fetch for several requests was refused. Then the caller
        fetches again, for one request.
        """
        with self._lock:
            if not decision.allowed:
                self._size, self._room = 1, 0
                return (decision, None) if fetch.size == 1 else None
            # `remaining` is the fewest permits left of all limits. The limit with the fewest can have the highest cost.
            highest_cost = max(self.call.costs, default=1) or 1  # `or 1`: do not divide by 0
            self._room = decision.remaining // (SHARE * highest_cost)
            if fetch.size == 1:
                self._size = max(self._size, 2)
                return decision, None
            prefetch = Prefetch(self, fetch.size, decision)
            if self._current is not None and not self._current.unspent:
                self._end(self._current)
            # If there is another prefetch to spend, nobody spends this one, and its permits are given back.
            if self._current is None and self._new is None:
                prefetch.until = fetch.asked + min(self._seconds, self._seconds_left(decision))
                if self.call.counted is None:
                    self._current = prefetch  # Its requests are not counted, so Redis need not record it.
                else:
                    self._new = prefetch
        return PrefetchedDecision(prefetch, fetch.size - 1), prefetch

    def _seconds_left(self, decision: Decision) -> float:
        """Return the maximum number of seconds after a fetch in which its permits can be spent."""
        now = decision.counted_at
        _bin, counted_until = bin_of(now)
        window = min(standing.reset_after for standing in decision.standings)
        # Both durations begin at the moment of the decision. The caller adds the result to an earlier moment, at which
        # the fetch was made. So the permits end too early rather than too late.
        return min(window, (counted_until - now) / MICROSECONDS) * (1 - DRIFT) - MARGIN

    def begin_sending(self, *, everything: bool = False) -> UnsentCounts | None:
        """Return the counts to send to Redis; None if there are none, or if counts are being sent.

        If `everything` is true, all permits end. Afterwards call `end_sending` or `fail_sending`. If the result is not
        all, then call this method again. A new prefetch is recorded with the last counts.
        """
        with self._lock:
            if self._sending:
                return None
            new, self._new = self._new, None
            if everything and new is not None:
                # Redis need not record permits that nobody will spend.
                new.until = _ENDED
                new = None
            items: list[tuple[Prefetch, Spent]] = []
            now, are_all = self.clock(), True
            for prefetch in self._recorded:
                if items and (len(items) + 1) * self.meters > MAX_SPENT_COUNTERS:
                    new, self._new, are_all = None, new, False
                    break
                # Whether no more requests will spend permits of this prefetch.
                is_all = everything or not prefetch.unspent or now >= prefetch.until
                if is_all:
                    self._end(prefetch)
                if is_all or prefetch.spent > prefetch.counted:
                    items.append((prefetch, Spent(prefetch.receipt.nonce, prefetch.spent, is_all)))
            if new is None and not items:
                return None
            self._sending = True
        return UnsentCounts(self, new, tuple(items), are_all)

    def end_sending(
        self, counts: UnsentCounts, found: Sequence[int]
    ) -> tuple[list[tuple[Prefetch, int]], list[tuple[Prefetch, int]]]:
        """End the sending after a reply. `found` says for each item whether Redis had the prefetch's record.

        Return two lists of (prefetch, how many requests): the requests that were counted, and the requests that are
        perhaps not counted, because Redis has lost the record.
        """
        counted, lost = [], []
        with self._lock:
            self._sending = False
            for (prefetch, spent), was_found in zip(counts.items, found, strict=True):
                if was_found:
                    counted.append((prefetch, spent.requests - prefetch.counted))
                    prefetch.counted = spent.requests
                else:
                    self._end(prefetch)
                    lost.append((prefetch, prefetch.spent - prefetch.counted))
                if spent.is_all or not was_found:
                    prefetch.recorded = False
                    self._recorded.remove(prefetch)
            if counts.new is not None:
                counts.new.recorded = True
                self._recorded.append(counts.new)
                self._current = counts.new
        return counted, lost

    def fail_sending(self, counts: UnsentCounts, *, sent: bool) -> None:
        """End the sending without a reply. The counts are sent again later, and the new prefetch is never spent.

        `sent` is false if the counts were certainly not sent.
        """
        with self._lock:
            self._sending = False
            if counts.new is not None:
                counts.new.until = _ENDED
                if sent:
                    counts.new.recorded = True
                    self._recorded.append(counts.new)

    def has_ended(self, prefetch: Prefetch, *, end_now: bool = False) -> bool:
        """Return whether the permits of a prefetch have ended. If `end_now` is true, or their time is over, end them.

        Afterwards no thread can spend permits that the caller gives back, not even one that read the clock earlier.
        """
        with self._lock:
            if end_now or self.clock() >= prefetch.until:
                self._end(prefetch)
            return prefetch.until == _ENDED


def _greatest_power_of_two(size: int) -> int:
    """Return the greatest power of two that is not above `size`; at least 1."""
    return 1 << max(size, 1).bit_length() - 1


def clear() -> None:
    """Forget all permits of this process."""
    for permits in list(_all):
        permits.clear()


_all: WeakSet[PrefetchedPermits] = WeakSet()
os.register_at_fork(after_in_child=clear)
