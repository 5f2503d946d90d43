"""What docs/algorithms.md shows: the same bursty half minute under a rule of each algorithm.

    python -m tests.simulator.pictures

prints the pictures, on an embedded server.
"""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from ratelimits.engine.wire import Wire
from ratelimits.simulate import sandbox
from ratelimits.simulate.summary import spark
from tests.engine.replaying import opening

SLOT = Decimal("0.5")
SLOTS = 60
PATIENCE = 2
"""Seconds that a request waits at most where the algorithm lets it."""
RULES: dict[str, dict[str, Any]] = {
    "fixed_window": {"capacity": 10, "period": 2},
    "fixed_window, first_hit": {"capacity": 10, "period": 2, "window_start": "first_hit"},
    "sliding_window": {"capacity": 10, "period": 2, "sub_windows": 4},
    "sliding_window, weighted": {"capacity": 10, "period": 2, "sub_windows": 1, "weighted": True},
    "sliding_log": {"capacity": 10, "period": 2},
    "token_bucket": {"capacity": 10, "rate": 5, "period": 1},
    "gcra": {"capacity": 10, "rate": 5, "period": 1},
    "leaky_bucket": {"capacity": 10, "rate": 5, "period": 1},
    "leaky_bucket_queue": {"capacity": 10, "rate": 5, "period": 1},
    "smooth_bursty": {"rate": 5, "period": 1, "max_burst_seconds": 2},
    "smooth_warming_up": {"rate": 5, "period": 1, "warm_up": 4, "cold_factor": 3},
    "concurrency": {"capacity": 10, "lease_ttl": 2},
}
PATIENT = ("leaky_bucket_queue", "smooth_bursty", "smooth_warming_up")


def asked() -> Iterator[Decimal]:
    """Two bursts of forty in a second, six seconds of eight a second, five of four a second."""
    for start, count, every in (("1.5", 40, "0.025"), (8, 48, "0.125"), ("19.5", 40, "0.025"), (25, 20, "0.25")):
        for number in range(count):
            yield Decimal(start) + number * Decimal(every)


def pictures(wire: Wire) -> Iterator[str]:
    """A line for what was asked, and one for what each algorithm lets proceed in each half second."""
    width = max(map(len, RULES))
    yield f"{'asked':{width}} {spark(slots(asked()), 20)} {len(list(asked()))}"
    with opening(wire) as open_replay:
        for name, fields in RULES.items():
            algorithm = name.split(",")[0]
            timeout = PATIENCE if algorithm in PATIENT else 0
            replay = open_replay({"algorithm": algorithm, **fields})
            lines = [{"at": at, "timeout": timeout} for at in asked()]
            answers = [answer for answer in replay.run(lines) if answer["allowed"]]
            counts = slots(answer["at"] + Decimal(repr(answer["wait"])) for answer in answers)
            yield f"{name:{width}} {spark(counts, 10)} {len(answers)}"


def slots(moments: Iterator[Decimal]) -> list[int]:
    counts = [0] * SLOTS
    for at in moments:
        if at < SLOT * SLOTS:
            counts[int(at / SLOT)] += 1
    return counts


if __name__ == "__main__":
    from django.conf import settings

    settings.configure()
    with sandbox() as wire:
        print("\n".join(pictures(wire)))
