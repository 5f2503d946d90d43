"""Try a rule before it is saved: show what the real scripts admit under bursts and under a steady overload.

The requests are calculated from the rule's own numbers. There are at most MAX_LINES.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from itertools import groupby
from typing import NamedTuple

from ratelimits.algorithms.limits import Algorithm
from ratelimits.algorithms.parsing import HORIZON, MICROSECONDS, micros
from ratelimits.engine.call import Op
from ratelimits.engine.transport.wire import Wire
from ratelimits.simulate.lines import TraceLine
from ratelimits.simulate.replay import Replay, Simulator

#: Maximum and minimum number of slots in which a load is counted.
SLOTS, FEW_SLOTS = 48, 12
#: Maximum number of requests of one load. Requests that are larger stand for several.
MAX_LINES = 240
#: A load lasts _LASTS times as long as all permits need to come back. It has _BURSTS bursts.
_LASTS, _BURSTS = 3, 6
#: A load requests this many times the limit.
_TIMES = 2
#: How long a request takes, in µs, if a limit has no period (concurrency).
_HELD = MICROSECONDS


class Slot(NamedTuple):
    """The permits in one slot of time. `admitted` counts requests in the slot in which they proceed, after any wait."""

    asked: int
    admitted: int
    refused: int


@dataclass(frozen=True, slots=True)
class Tried:
    """The result of a rule under one load. Times are in seconds.

    kind          "bursts", "overload" or "recorded"
    length        duration of the whole load
    each          permits of one burst; otherwise all requested permits
    every         time between bursts, or between the requests of an overload
    held          how long each request takes; 0 if this has no effect
    asked         requested permits
    admitted      admitted permits
    longest_wait  the longest time that a request waited
    """

    kind: str
    length: Decimal
    each: int
    every: Decimal
    held: Decimal
    asked: int
    admitted: int
    longest_wait: Decimal
    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class _Load:
    kind: str
    length: int
    each: int
    every: int
    held: int
    #: Moments in µs after the start, and permits.
    requests: tuple[tuple[int, int], ...]

    @property
    def slots(self) -> int:
        """Return a number of slots into which the requests divide evenly, so that a steady load looks steady."""
        even = (slots for slots in range(SLOTS, FEW_SLOTS - 1, -1) if len(self.requests) % slots == 0)
        return SLOTS if self.kind == "bursts" else next(even, SLOTS)

    def lines(self, start: int, timeout: int) -> Iterator[TraceLine]:
        """Yield the lines of the trace in the order of time.

        A request that ends comes before one that begins at the same moment.
        """
        events = [(at, 1, cost, str(number)) for number, (at, cost) in enumerate(self.requests)]
        if self.held:
            events += [(at + self.held, 0, cost, lease) for at, _op, cost, lease in events]
        for at, begins, cost, lease in sorted(events):
            moment = start + at
            op = Op.TRY if begins else Op.RELEASE
            yield TraceLine(moment, moment, op, "", cost, timeout, lease if self.held else "")


def try_rule(wire: Wire, algorithm: Algorithm, max_wait: Decimal | None, now: int) -> tuple[Tried, ...]:
    """Return what a rule admits under bursts and under a steady overload, beginning about `now` (µs since 1970 UTC).

    Raises Unavailable and redis.exceptions.RedisError if the server does not answer. Deletes what it writes there.
    """
    start, loads = _start(algorithm, now), _loads(algorithm, now)
    timeout = min(micros(max_wait), HORIZON) if max_wait and algorithm.may_wait else 0
    replays = {Replay((algorithm,), load.kind): load for load in loads}
    with Simulator(wire) as simulator:
        lines = ((replay, line) for replay, load in replays.items() for line in load.lines(start, timeout))
        outcomes = list(simulator.run(lines))
    tried = []
    for replay, of_one in groupby(outcomes, key=lambda outcome: outcome[0]):
        load = replays[replay]
        results = [(line, outcome) for _replay, line, outcome in of_one if line.op is Op.TRY]
        slots = [[0, 0, 0] for _ in range(load.slots)]
        for line, outcome in results:
            asked = (line.now - start) * load.slots // load.length
            slots[asked][0] += line.cost
            if not outcome.allowed:
                slots[asked][2] += line.cost
                continue
            proceeds = (line.now + outcome.wait - start) * load.slots // load.length
            if proceeds < load.slots:
                slots[proceeds][1] += line.cost
        admitted = [(line.cost, outcome.wait) for line, outcome in results if outcome.allowed]
        tried.append(
            Tried(
                load.kind,
                _seconds(load.length),
                load.each,
                _seconds(load.every),
                _seconds(load.held),
                sum(line.cost for line, _outcome in results),
                sum(cost for cost, _wait in admitted),
                _seconds(max((wait for _cost, wait in admitted), default=0)),
                tuple(Slot(*counts) for counts in slots),
            )
        )
    return tuple(tried)


def _seconds(us: int) -> Decimal:
    return Decimal(us) / MICROSECONDS


def _span(algorithm: Algorithm, now: int) -> int:
    """Return the time in µs in which all permits come back. If there is none, return how long a request takes."""
    _permits, time = algorithm.quota
    window = algorithm.valid_span(now)
    return time or (window[1] - window[0] if window else _HELD)


def _start(algorithm: Algorithm, now: int) -> int:
    """Return the last start of a window before `now`. Windows start at fixed times of the clock or the calendar."""
    window = algorithm.valid_span(now)
    return window[0] if window else now - now % max(_span(algorithm, now), 1)


def _loads(algorithm: Algorithm, now: int) -> tuple[_Load, _Load]:
    permits, _time = algorithm.quota
    permits = max(permits, 1)
    span = max(_span(algorithm, now), 1)
    most = algorithm.max_cost or permits
    held = _HELD if algorithm.leases else 0
    # For a rule that makes requests wait, the load lasts longer than the wait, if the number of lines allows it.
    long = max(span, micros(algorithm.suggested_max_wait or Decimal(0)))
    lasts = min(_LASTS * long, MAX_LINES * max(permits // 10, 1) * span // (_TIMES * permits), HORIZON // 4)
    lasts = max(lasts, span, SLOTS)
    return _bursts(permits, lasts, most, held), _overload(permits, span, lasts, most, held)


def _bursts(permits: int, length: int, most: int, held: int) -> _Load:
    each = _TIMES * permits
    cost = _cost(permits, each, MAX_LINES // _BURSTS, most)
    sizes = _sizes(min(each, cost * (MAX_LINES // _BURSTS)), cost)
    every = length // _BURSTS
    requests = tuple((number * every, size) for number in range(_BURSTS) for size in sizes)
    return _Load("bursts", length, sum(sizes), every, held, requests)


def _overload(permits: int, span: int, length: int, most: int, held: int) -> _Load:
    total = max(_TIMES * permits * length // span, 1)
    cost = _cost(permits, total, MAX_LINES, most)
    sizes = _sizes(min(total, cost * MAX_LINES), cost)
    every = max(length // len(sizes), 1)
    requests = tuple((number * length // len(sizes), size) for number, size in enumerate(sizes))
    return _Load("overload", length, sum(sizes), every, held, requests)


def _cost(permits: int, total: int, lines: int, most: int) -> int:
    """Return the permits of one request, so that this number of lines is enough for all.

    If possible, it divides the limit.
    """
    least = max(-(-total // lines), 1)
    parts = permits // least
    cost = next((permits // part for part in range(parts, parts // 4, -1) if permits % part == 0), least)
    return max(min(cost, most), 1)


def _sizes(permits: int, cost: int) -> list[int]:
    whole, rest = divmod(permits, cost)
    return [cost] * whole + [rest] * bool(rest)
