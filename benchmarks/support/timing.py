"""Time the calls of several cases, in rounds.

A round times a block of calls of each case, in random order. A ratio is calculated within a round, because the machine
was equally busy for all cases of the round. The median of the ratios of all rounds is reported.
"""

from __future__ import annotations

import gc
import random
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

#: Number of calls before each block that are not timed. They load code and data into the processor's caches.
WARM_UP = 30


@dataclass(frozen=True, slots=True)
class Case:
    """One case that is timed. `call` must return a true value, otherwise the run ends.

    `kind` is "floor" (a shortest possible time), "ours" or "peer" (another package, named by `peer`). `before` runs
    before each block, and is not timed. `inner` is the number of calls that are timed as one: more than 1 if a
    single call is too short for the clock.
    """

    name: str
    title: str
    kind: str
    call: Callable[[], object]
    peer: str = ""
    before: Callable[[], object] | None = None
    inner: int = 1


@dataclass(slots=True)
class Timed:
    """The times of one case in ns: the median of each round, and all times."""

    case: Case
    medians: list[float] = field(default_factory=list)
    times: array[float] = field(default_factory=lambda: array("d"))

    @property
    def median(self) -> float:
        return median(self.times)

    def quantile(self, share: float) -> float:
        """Return the time that a part of the calls did not exceed. The part is a number from 0 to 1."""
        ordered = sorted(self.times)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)]

    def ratio(self, other: Timed) -> float:
        """Return this case's time divided by the other case's time: the median of the ratios of the rounds."""
        return median(one / another for one, another in zip(self.medians, other.medians, strict=True))

    def to_json(self) -> dict[str, Any]:
        """Return the times in µs."""
        return {
            "title": self.case.title,
            "kind": self.case.kind,
            "peer": self.case.peer,
            "median_us": round(self.median / 1000, 3),
            "p99_us": round(self.quantile(0.99) / 1000, 3),
            "min_us": round(min(self.times) / 1000, 3),
            "calls": len(self.times) * self.case.inner,
            "round_medians_us": [round(one / 1000, 3) for one in self.medians],
        }


def _block(case: Case, calls: int) -> list[int]:
    """Return the times of a block in ns, each of `case.inner` calls."""
    call, clock, inner = case.call, time.perf_counter_ns, range(case.inner)
    times = []
    if case.inner == 1:
        for _ in range(calls):
            start = clock()
            call()
            times.append(clock() - start)
    else:
        for _ in range(calls):
            start = clock()
            for _number in inner:
                call()
            times.append(clock() - start)
    return times


def run_block(case: Case, calls: int, warm_up: int = WARM_UP) -> list[float]:
    """Make some calls and check their results. Then return the times of a block of calls in ns."""
    if case.before is not None:
        case.before()
    for _ in range(max(warm_up, 1)):
        if not case.call():
            raise AssertionError(f"{case.title}: the call was answered with a refusal or an error")
    return [one / case.inner for one in _block(case, calls)]


def interleaved(
    cases: Sequence[Case],
    rounds: int,
    calls: int,
    *,
    seed: int = 1,
    warm_up: int = WARM_UP,
    progress: Callable[[int], None] = lambda _number: None,
) -> dict[str, Timed]:
    """Time all cases in turns. Each round makes `calls` calls of each case, in an order that depends on `seed`.

    At the start of each round, `progress` is called with the number of the round, from 0.
    """
    timed = {case.name: Timed(case) for case in cases}
    order = random.Random(seed)
    for number in range(rounds):
        progress(number)
        gc.collect()
        for case in order.sample(list(cases), len(cases)):
            times = run_block(case, calls, warm_up)
            timed[case.name].medians.append(median(times))
            timed[case.name].times.extend(times)
    return timed


def per_second(make: Callable[[], Callable[[], object]], threads: int, seconds: float) -> float:
    """Return the calls per second of all threads together. Each thread gets its own call from `make`."""
    ready, ended = threading.Barrier(threads + 1), threading.Event()
    counts, errors = [0] * threads, []

    def work(number: int) -> None:
        try:
            call, count = make(), 0
            call()
            ready.wait()
            while not ended.is_set():
                call()
                count += 1
            counts[number] = count
        except Exception as error:  # noqa: BLE001 (raised in the main thread)
            errors.append(error)
            ready.abort()

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    try:
        ready.wait()
        start = time.perf_counter()
        time.sleep(seconds)
        ended.set()
        elapsed = time.perf_counter() - start
    except threading.BrokenBarrierError:
        ended.set()
        elapsed = 1.0  # not used: the error is raised below
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
    return sum(counts) / elapsed
