"""Summarise a simulation in a few lines: show the admitted requests by time, and the busiest keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ratelimits.algorithms.base import MICROSECONDS
from ratelimits.engine.call import Op
from ratelimits.simulate.lines import TraceLine
from ratelimits.simulate.replay import LineOutcome

#: Bars of eight heights.
BARS = "▁▂▃▄▅▆▇█"
#: Maximum number of slots of time in the summary.
SLOTS = 60
#: Lengths that a slot can have, in seconds. If a trace is too long for `SLOTS` slots of one week each, its slots are
#: longer than a week.
LENGTHS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400, 604_800)
#: How many keys the summary shows: the keys with the most requests.
BUSIEST = 5


def spark(counts: list[int], maximum: int = 0) -> str:
    """Return a bar for each count above 0, and a space for each 0.

    A bar of full height stands for the greatest count, or for `maximum` if this is larger.
    """
    maximum = max(maximum, *counts, 1)
    return "".join(BARS[(count * len(BARS) - 1) // maximum] if count else " " for count in counts)


def duration(us: int) -> str:
    """Return a length of time as text in a suitable unit."""
    seconds = us / MICROSECONDS
    for name, size in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {name}"
    return f"{seconds:.6f}".rstrip("0").rstrip(".") + " s"


class Summary:
    """Counts the outcomes of those lines of a trace that are requests: `try_acquire` and `acquire`."""

    def __init__(self) -> None:
        self.admitted = self.refused = self.never_admissible = self.permits = self.longest_wait = 0
        #: The moments of the first and the last request, in µs.
        self.first: int | None = None
        self.last = 0
        self.requests_by_key: Counter[str] = Counter()
        self.admitted_by_key: Counter[str] = Counter()
        self.admitted_by_second: Counter[int] = Counter()

    def add(self, line: TraceLine, outcome: LineOutcome) -> None:
        """Add a line and its outcome."""
        if line.op is not Op.TRY:
            return
        self.first = line.now if self.first is None else min(self.first, line.now)
        self.last = max(self.last, line.now)
        self.requests_by_key[line.key] += 1
        if not outcome.allowed:
            self.refused += 1
            self.never_admissible += outcome.retry_after is None
            return
        self.admitted += 1
        self.permits += line.cost
        self.admitted_by_key[line.key] += 1
        self.longest_wait = max(self.longest_wait, outcome.wait)
        self.admitted_by_second[line.now // MICROSECONDS] += 1

    def slots(self) -> list[int]:
        """Return the number of admitted requests in each slot of time, from the first request to the last request."""
        length = self.slot_seconds()
        first = (self.first or 0) // MICROSECONDS // length
        counts = [0] * (self.last // MICROSECONDS // length - first + 1)
        for second, count in self.admitted_by_second.items():
            counts[second // length - first] += count
        return counts

    def slot_seconds(self) -> int:
        """Return the length of a slot in seconds: the shortest length with which `SLOTS` slots are enough."""
        span = self.last // MICROSECONDS - (self.first or 0) // MICROSECONDS
        # Slots begin at multiples of `length`. So a span of SLOTS - 1 lengths can reach into SLOTS slots.
        long_enough = (length for length in LENGTHS if span < (SLOTS - 1) * length)
        return next(long_enough, span // (SLOTS - 1) + 1)

    def text(self) -> Iterator[str]:
        """Yield the lines of the summary."""
        total = self.admitted + self.refused
        yield f"requests      {total:,}"
        if not total or self.first is None:
            return
        yield f"admitted      {self.admitted:,} ({self.admitted / total:.1%}), {self.permits:,} permits"
        never = f", {self.never_admissible:,} of them can never be admitted" if self.never_admissible else ""
        yield f"refused       {self.refused:,} ({self.refused / total:.1%}){never}"
        yield f"longest wait  {duration(self.longest_wait)}"
        yield f"keys          {len(self.requests_by_key):,}; the busiest:"
        for key, requests in sorted(self.requests_by_key.items(), key=lambda item: (-item[1], item[0]))[:BUSIEST]:
            yield f"  {key or '(no key)'}  requests: {requests:,}, admitted: {self.admitted_by_key[key]:,}"
        counts = self.slots()
        yield f"admitted in each {duration(self.slot_seconds() * MICROSECONDS)} (peak: {max(counts):,}):"
        yield f"  {spark(counts)}"
