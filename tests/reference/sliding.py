"""sliding_window (N buckets that slide one at a time, plain or weighted) and sliding_log (exact)."""

from __future__ import annotations

from fractions import Fraction
from math import ceil, floor
from typing import Any

from tests.reference.amounts import duration, whole
from tests.reference.limit import NO_HOPE, PASS, Limit, Verdict

Buckets = tuple[tuple[int, int], ...]
"""(bucket number, count), oldest first."""
Entries = tuple[tuple[int, int], ...]
"""(moment in µs, count), oldest first."""


def taken_from_newest(parts: tuple[tuple[int, int], ...], cost: int, oldest: int) -> tuple[tuple[int, int], ...]:
    """Return the parts without `cost` permits: taken from the newest parts first, and from none before `oldest`."""
    left = []
    for moment, count in reversed(parts):
        back = min(cost, count) if moment >= oldest else 0
        cost -= back
        if count > back:
            left.append((moment, count - back))
    return tuple(reversed(left))


class SlidingWindow(Limit):
    algorithm = "sliding_window"

    def __init__(self, data: dict[str, Any]) -> None:
        self.capacity = self.shown = whole(data, "capacity", 0)
        self.buckets = whole(data, "sub_windows", 1, 10)
        period = duration(data, "period")
        if period % self.buckets:
            raise ValueError("period / sub_windows must be a whole number of microseconds")
        self.width = period // self.buckets
        weighted = data.get("weighted")
        if weighted not in (None, True, False):
            raise ValueError(f"weighted must be true or false, not {weighted!r}")
        self.weighted = bool(weighted)

    def live(self, state: Buckets, now: int) -> Buckets:
        """Return the buckets that count in full or in part.

        A plain window also keeps the expired bucket, without counting it.
        """
        return tuple((bucket, count) for bucket, count in state if bucket >= now // self.width - self.buckets)

    def used(self, state: Buckets, now: int) -> Fraction:
        index = now // self.width
        total = Fraction(0)
        for bucket, count in state:
            if bucket > index - self.buckets:
                total += count
            elif self.weighted and bucket == index - self.buckets:
                total += count * (1 - Fraction(now % self.width, self.width))
        return total

    def born(self, now: int) -> Buckets:
        return ()

    def judge(self, state: Buckets, now: int, cost: int, patience: int | None) -> Verdict:
        if cost > self.capacity:
            return NO_HOPE
        if self.used(state, now) + cost <= self.capacity:
            return PASS
        return Verdict(self.opening(state, now, cost) - now)

    def opening(self, state: Buckets, now: int, cost: int) -> int:
        """Return the first moment from `now` on at which `cost` fits."""
        for index in range(now // self.width, now // self.width + self.buckets + 2):
            room = self.capacity - cost - sum(count for bucket, count in state if bucket > index - self.buckets)
            if room < 0:
                continue
            start = max(now, index * self.width)
            leaving = dict(state).get(index - self.buckets, 0) if self.weighted else 0
            if leaving > room:
                start = max(start, index * self.width + ceil(self.width * (1 - Fraction(room, leaving))))
            if start < (index + 1) * self.width:
                return start
        raise AssertionError("an empty window refuses")

    def charged(self, state: Buckets, now: int, cost: int, lease: str) -> Buckets:
        index, kept = now // self.width, dict(self.live(state, now))
        kept[index] = kept.get(index, 0) + cost
        return tuple(sorted(kept.items()))

    def refunded(self, state: Buckets, now: int, cost: int, lease: str) -> Buckets:
        return taken_from_newest(state, cost, now // self.width - self.buckets + (0 if self.weighted else 1))

    def jumped(self, state: Buckets, newest: int, to: int) -> Buckets:
        back = newest // self.width - to // self.width
        return tuple((bucket - back, count) for bucket, count in state)

    def handed_over(self, state: Buckets, now: int, new: SlidingWindow) -> Buckets:
        if (self.width, self.buckets) == (new.width, new.buckets):
            return state
        index, leaving = now // new.width, now // self.width - self.buckets
        moved: dict[int, int] = {}
        for bucket, count in self.live(state, now):
            if bucket > leaving or new.weighted:
                to = min(index, max(index - new.buckets + 1, bucket * self.width // new.width))
                moved[to] = moved.get(to, 0) + count
        return tuple(sorted(moved.items()))

    def remaining(self, state: Buckets, now: int) -> int:
        return max(0, floor(self.capacity - self.used(state, now)))

    def reset_after(self, state: Buckets, now: int) -> int:
        if not self.used(state, now):
            return 0
        newest = max(bucket for bucket, count in state)
        return (newest + self.buckets + (1 if self.weighted else 0)) * self.width - now


class SlidingLog(Limit):
    algorithm = "sliding_log"

    def __init__(self, data: dict[str, Any]) -> None:
        self.capacity = self.shown = whole(data, "capacity", 0)
        self.period = duration(data, "period")

    def live(self, state: Entries, now: int) -> Entries:
        return tuple((moment, count) for moment, count in state if now < moment + self.period)

    def used(self, state: Entries, now: int) -> int:
        return sum(count for _, count in self.live(state, now))

    def born(self, now: int) -> Entries:
        return ()

    def judge(self, state: Entries, now: int, cost: int, patience: int | None) -> Verdict:
        if cost > self.capacity:
            return NO_HOPE
        excess = self.used(state, now) + cost - self.capacity
        if excess <= 0:
            return PASS
        for moment, count in self.live(state, now):
            excess -= count
            if excess <= 0:
                return Verdict(moment + self.period - now)
        raise AssertionError("an empty log refuses")

    def charged(self, state: Entries, now: int, cost: int, lease: str) -> Entries:
        live = self.live(state, now)
        if live and live[-1][0] == now:
            return (*live[:-1], (now, live[-1][1] + cost))
        return (*live, (now, cost))

    def refunded(self, state: Entries, now: int, cost: int, lease: str) -> Entries:
        return taken_from_newest(state, cost, now - self.period + 1)

    def jumped(self, state: Entries, newest: int, to: int) -> Entries:
        return tuple((moment - (newest - to), count) for moment, count in state)

    def handed_over(self, state: Entries, now: int, new: SlidingLog) -> Entries:
        return self.live(state, now)

    def remaining(self, state: Entries, now: int) -> int:
        return max(0, self.capacity - self.used(state, now))

    def reset_after(self, state: Entries, now: int) -> int:
        live = self.live(state, now)
        return live[-1][0] + self.period - now if live else 0
