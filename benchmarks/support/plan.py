"""A capacity plan from measured numbers: what so many requests per second need, under assumptions that stand here."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

RATES = (1_000, 10_000, 100_000, 1_000_000)
#: Share of a core that is planned with: the rest is for peaks, rewriting the append-only file, and replicas.
HEADROOM = 0.6
#: Live keys for each request per second: each key asks every ten seconds.
KEYS_PER_REQUEST = 10
#: Seconds between two seals, for the ledger lines that every live key then makes.
SEAL_INTERVALS = (60, 900)
BINS_PER_DAY = 96
#: Shards for each Redis core, so that a cluster spreads them evenly.
SHARDS_PER_CORE = 16
LEAST_SHARDS = 64


@dataclass(frozen=True, slots=True)
class Needs:
    """What a rate of requests needs, each with three rules on its key, metered."""

    rate: int
    redis_cores: int
    shards: int
    web_cores: float
    keys: int
    memory_gb: float
    lines_per_second: tuple[float, ...]
    compacted_per_day: int


def needs(rate: int, runs: dict[str, dict[str, Any]]) -> Needs:
    """What a rate needs, by the runs of benchmarks.server and benchmarks.decide."""
    server, adds = runs["server"], runs["decide"]["in_place"]["ours"]["adds_us"]
    # What it adds was measured with the server on the same core: its part is counted there.
    web = max(adds - server["results"]["engine_three"]["core_us"], 0)
    cores = ceil(rate / (server["results"]["engine_three"]["per_second"] * HEADROOM))
    keys = rate * KEYS_PER_REQUEST
    shards = LEAST_SHARDS
    while shards < cores * SHARDS_PER_CORE:
        shards *= 2
    return Needs(
        rate=rate,
        redis_cores=cores,
        shards=shards,
        web_cores=round(rate * web / 1e6, 2),
        keys=keys,
        memory_gb=keys * server["memory"]["three"]["growth_per_key"] / 1e9,
        lines_per_second=tuple(keys / seconds for seconds in SEAL_INTERVALS),
        compacted_per_day=keys * BINS_PER_DAY,
    )
