"""Try a rule before it is saved. The real scripts show what the rule admits under bursts and under a steady overload.

A *load* is a series of requests: the bursts are one load, and the overload is another one. A load has at most
`MAX_LINES` requests. Their moments and costs are calculated from the numbers of the rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from itertools import groupby
from typing import NamedTuple

from ratelimits.algorithms.base import HORIZON, MICROSECONDS, micros
from ratelimits.algorithms.limits import Algorithm
from ratelimits.engine.call import Op
from ratelimits.engine.transport.wire import Wire
from ratelimits.simulate.lines import TraceLine
from ratelimits.simulate.replay import Replay, Simulator

#: Maximum and minimum number of slots of time into which a load is divided.
SLOTS, MIN_SLOTS = 48, 12
#: Maximum number of requests of one load. If a load needs more requests, each request has a higher cost instead.
MAX_LINES = 240
#: A load usually lasts `_REFILLS` times as long as all permits need to come back (see `_loads` for the exceptions).
_REFILLS = 3
#: Number of bursts in a load of bursts.
_BURSTS = 6
#: A burst requests this many times the permits of the limit. An overload requests permits this many times as fast as
#: they come back.
_OVERLOAD_FACTOR = 2
#: Duration of a request under a concurrency limit, in µs.
_CONCURRENT_DURATION = MICROSECONDS


class Slot(NamedTuple):
    """The requested, admitted and refused permits in a slot of time.

    A request that must wait is counted as admitted in the slot in which its wait ends. If its wait ends after the last
    slot, it is counted only as requested.
    """

    requested: int
    admitted: int
    refused: int


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The result of a rule under one load. Times are in seconds.

    kind          "bursts", "overload", or "recorded" for real requests that the app recorded earlier
    length        duration of the whole load
    permits       the permits of one burst; for other loads, all requested permits
    interval      time between two bursts, or between two requests of an overload; 0 for recorded requests
    duration      duration of each request; 0 if the duration has no effect
    requested     requested permits
    admitted      admitted permits
    longest_wait  the longest time that a request waited
    slots         the numbers of each slot of time, the oldest slot first
    """

    kind: str
    length: Decimal
    permits: int
    interval: Decimal
    duration: Decimal
    requested: int
    admitted: int
    longest_wait: Decimal
    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class _Load:
    """The requests of a load, with the values that `TrialResult` explains. Times are in µs."""

    kind: str
    length: int
    permits: int
    interval: int
    duration: int
    #: For each request: its moment in µs after the start of the load, and its permits.
    requests: tuple[tuple[int, int], ...]

    @property
    def slot_count(self) -> int:
        """Return the number of slots. If possible, each slot of a steady load has the same number of requests."""
        divisors = (slots for slots in range(SLOTS, MIN_SLOTS - 1, -1) if len(self.requests) % slots == 0)
        return SLOTS if self.kind == "bursts" else next(divisors, SLOTS)

    def lines(self, start: int, timeout: int) -> Iterator[TraceLine]:
        """Yield the lines of the trace in the order of time.

        If one request ends and another one begins at the same moment, the end comes first.
        """
        # Each event: its moment, 1 for the begin of a request or 0 for its end, its permits, and its lease.
        events = [(at, 1, cost, str(number)) for number, (at, cost) in enumerate(self.requests)]
        if self.duration:
            events += [(at + self.duration, 0, cost, lease) for at, _begins, cost, lease in events]
        for at, begins, cost, lease in sorted(events):
            moment = start + at
            op = Op.TRY if begins else Op.RELEASE
            # Nobody reads the first field here. (In a trace file, it is the moment in seconds.)
            yield TraceLine(moment, moment, op, "", cost, timeout, lease if self.duration else "")


def try_rule(wire: Wire, algorithm: Algorithm, max_wait: Decimal | None, now: int) -> tuple[TrialResult, ...]:
    """Return what a rule admits under bursts and under a steady overload.

    The loads begin near the moment `now` (µs since 1970 UTC). All keys that are written to the server are deleted
    again. Raise Unavailable or redis.exceptions.RedisError if the server does not answer.
    """
    start, loads = _start(algorithm, now), _loads(algorithm, now)
    timeout = min(micros(max_wait), HORIZON) if max_wait and algorithm.may_wait else 0
    replays = {Replay((algorithm,), load.kind): load for load in loads}
    with Simulator(wire) as simulator:
        lines = ((replay, line) for replay, load in replays.items() for line in load.lines(start, timeout))
        outcomes = list(simulator.run(lines))
    results = []
    for replay, replay_outcomes in groupby(outcomes, key=lambda outcome: outcome[0]):
        load = replays[replay]
        requests = [(line, outcome) for _replay, line, outcome in replay_outcomes if line.op is Op.TRY]
        requested, admitted, refused = [0] * load.slot_count, [0] * load.slot_count, [0] * load.slot_count
        for line, outcome in requests:
            slot = (line.now - start) * load.slot_count // load.length
            requested[slot] += line.cost
            if not outcome.allowed:
                refused[slot] += line.cost
                continue
            proceeding_slot = (line.now + outcome.wait - start) * load.slot_count // load.length
            if proceeding_slot < load.slot_count:
                admitted[proceeding_slot] += line.cost
        all_admitted = [(line.cost, outcome.wait) for line, outcome in requests if outcome.allowed]
        results.append(
            TrialResult(
                load.kind,
                _seconds(load.length),
                load.permits,
                _seconds(load.interval),
                _seconds(load.duration),
                sum(line.cost for line, _outcome in requests),
                sum(cost for cost, _wait in all_admitted),
                _seconds(max((wait for _cost, wait in all_admitted), default=0)),
                tuple(map(Slot, requested, admitted, refused)),
            )
        )
    return tuple(results)


def _seconds(us: int) -> Decimal:
    return Decimal(us) / MICROSECONDS


def _span(algorithm: Algorithm, now: int) -> int:
    """Return the time in µs in which all permits come back. For a concurrency limit, return a request's duration."""
    _permits, time = algorithm.quota
    if time:
        return time
    window = algorithm.valid_span(now)
    return window[1] - window[0] if window else _CONCURRENT_DURATION


def _start(algorithm: Algorithm, now: int) -> int:
    """Return the start of the limit's window that contains `now`. Both moments are in µs since 1970 UTC.

    If the limit has no calendar window, round `now` down to a multiple of `_span`.
    """
    window = algorithm.valid_span(now)
    return window[0] if window else now - now % max(_span(algorithm, now), 1)


def _loads(algorithm: Algorithm, now: int) -> tuple[_Load, _Load]:
    """Return a load of bursts and a load of steady overload, of the same length."""
    permits, _time = algorithm.quota
    permits = max(permits, 1)
    span = max(_span(algorithm, now), 1)
    max_cost = algorithm.max_cost or permits
    duration = _CONCURRENT_DURATION if algorithm.leases else 0
    # If the rule lets requests wait, the load lasts longer than the longest wait, as far as `MAX_LINES` allows this.
    time_to_cover = max(span, micros(algorithm.suggested_max_wait or Decimal(0)))
    # The length of the longest overload for which MAX_LINES requests are enough, if each takes a tenth of `permits`.
    longest = MAX_LINES * max(permits // 10, 1) * span // (_OVERLOAD_FACTOR * permits)
    # At most a quarter of HORIZON, so that all moments are before HORIZON. At least `span`, and at least SLOTS µs, so
    # that no slot is shorter than 1 µs.
    length = max(min(_REFILLS * time_to_cover, longest, HORIZON // 4), span, SLOTS)
    return _bursts(permits, length, max_cost, duration), _overload(permits, span, length, max_cost, duration)


def _bursts(permits: int, length: int, max_cost: int, duration: int) -> _Load:
    burst, max_requests = _OVERLOAD_FACTOR * permits, MAX_LINES // _BURSTS
    cost = _cost(permits, burst, max_requests, max_cost)
    costs = _costs(min(burst, cost * max_requests), cost)
    interval = length // _BURSTS
    requests = tuple((number * interval, cost) for number in range(_BURSTS) for cost in costs)
    return _Load("bursts", length, sum(costs), interval, duration, requests)


def _overload(permits: int, span: int, length: int, max_cost: int, duration: int) -> _Load:
    total = max(_OVERLOAD_FACTOR * permits * length // span, 1)
    cost = _cost(permits, total, MAX_LINES, max_cost)
    costs = _costs(min(total, cost * MAX_LINES), cost)
    interval = max(length // len(costs), 1)
    requests = tuple((number * length // len(costs), cost) for number, cost in enumerate(costs))
    return _Load("overload", length, sum(costs), interval, duration, requests)


def _cost(permits: int, total: int, max_requests: int, max_cost: int) -> int:
    """Return the cost of a request. It is at most `max_cost`.

    If `max_cost` allows this, `max_requests` requests with this cost are enough for `total` permits. If possible, the
    cost divides the permits of the limit without a remainder.
    """
    min_cost = max(-(-total // max_requests), 1)  # rounded up
    # Look for a cost from `min_cost` to about four times `min_cost`.
    parts = permits // min_cost
    cost = next((permits // part for part in range(parts, parts // 4, -1) if permits % part == 0), min_cost)
    return max(min(cost, max_cost), 1)


def _costs(permits: int, cost: int) -> list[int]:
    """Return the costs of requests that take these permits together. Only the last cost can be lower than `cost`."""
    count, rest = divmod(permits, cost)
    return [cost] * count + ([rest] if rest else [])
