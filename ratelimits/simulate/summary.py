"""Summarise a simulation in a few lines: how many requests were admitted, when, and the busiest keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ratelimits.algorithms.parsing import MICROSECONDS
from ratelimits.engine.call import Op
from ratelimits.simulate.lines import TraceLine
from ratelimits.simulate.replay import LineOutcome

BARS = "▁▂▃▄▅▆▇█"
SLOTS = 60
LENGTHS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400, 604_800)
BUSIEST = 5


def spark(counts: list[int], maximum: int = 0) -> str:
    """Return a bar for each count, in eight heights up to `maximum` (default: the greatest count); a space for 0."""
    maximum = max(maximum, *counts, 1)
    return "".join(BARS[(count * 8 - 1) // maximum] if count else " " for count in counts)


def duration(us: int) -> str:
    """Return a length of time as text in a suitable unit."""
    seconds = us / MICROSECONDS
    for name, size in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {name}"
    return f"{seconds:.6f}".rstrip("0").rstrip(".") + " s"


class Summary:
    """Counts outcomes. Only `try_acquire` and `acquire` count as requests; other lines of a trace do not."""

    def __init__(self) -> None:
        self.admitted = self.refused = self.never = self.permits = self.longest_wait = 0
        self.first: int | None = None
        self.last = 0
        self.asked: Counter[str] = Counter()
        self.passed: Counter[str] = Counter()
        self.by_second: Counter[int] = Counter()

    def add(self, line: TraceLine, outcome: LineOutcome) -> None:
        """Count one line and its outcome."""
        if line.op is not Op.TRY:
            return
        self.first = line.now if self.first is None else min(self.first, line.now)
        self.last = max(self.last, line.now)
        self.asked[line.key] += 1
        if not outcome.allowed:
            self.refused += 1
            self.never += outcome.retry_after is None
            return
        self.admitted += 1
        self.permits += line.cost
        self.passed[line.key] += 1
        self.longest_wait = max(self.longest_wait, outcome.wait)
        self.by_second[line.now // MICROSECONDS] += 1

    def slots(self) -> list[int]:
        """Return the admitted requests in each slot of time, from the first request's slot to the last one's."""
        length = self.slot_seconds()
        first = (self.first or 0) // MICROSECONDS // length
        counts = [0] * (self.last // MICROSECONDS // length - first + 1)
        for second, count in self.by_second.items():
            counts[second // length - first] += count
        return counts

    def slot_seconds(self) -> int:
        """Return the shortest length in seconds for which at most SLOTS slots cover all requests."""
        span = self.last // MICROSECONDS - (self.first or 0) // MICROSECONDS
        longer = (length for length in LENGTHS if span < (SLOTS - 1) * length)
        return next(longer, span // (SLOTS - 1) + 1)

    def text(self) -> Iterator[str]:
        """Yield the lines of the summary."""
        total = self.admitted + self.refused
        yield f"requests      {total:,}"
        if not total or self.first is None:
            return
        yield f"admitted      {self.admitted:,} ({self.admitted / total:.1%}), {self.permits:,} permits"
        never = f", {self.never:,} of them can never be admitted" if self.never else ""
        yield f"refused       {self.refused:,} ({self.refused / total:.1%}){never}"
        yield f"longest wait  {duration(self.longest_wait)}"
        yield f"keys          {len(self.asked):,}; the busiest:"
        for key, asked in sorted(self.asked.items(), key=lambda item: (-item[1], item[0]))[:BUSIEST]:
            yield f"  {key or '(no key)'}  {asked:,} asked, {self.passed[key]:,} admitted"
        counts = self.slots()
        yield f"admitted per {duration(self.slot_seconds() * MICROSECONDS)}, at most {max(counts):,}:"
        yield f"  {spark(counts)}"
