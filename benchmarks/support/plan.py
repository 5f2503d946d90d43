"""Calculate the resources for a number of requests per second, from measured numbers and the assumptions below."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

#: Requests per second.
RATES = (1_000, 10_000, 100_000, 1_000_000)
#: The part of a core that may be used. The rest is for peaks, for rewriting the append-only file, and for replicas.
USABLE_PART = 0.6
#: Number of live keys (keys whose states are in Redis) for each request per second: each key makes a request every ten
#: seconds.
KEYS_PER_REQUEST = 10
#: Seconds between two seals. Each seal makes a ledger line for every live key.
SEAL_INTERVALS = (60, 900)
#: Quarters of an hour in a day.
BINS_PER_DAY = 96
#: Smallest number of shards for each Redis core, so that a cluster can divide the shards evenly among its cores.
SHARDS_PER_CORE = 16
#: The default of the setting SHARDS.
MIN_SHARDS = 64


@dataclass(frozen=True, slots=True)
class Needs:
    """The resources for `rate` requests per second. Each request has three rules on one key, and is metered.

    web_cores          cores of web servers that are needed only for limiting
    lines_per_second   lines that a drain writes, for each of SEAL_INTERVALS
    compacted_per_day  rows of the ledger that a day has after compaction
    """

    rate: int
    redis_cores: int
    shards: int
    web_cores: float
    keys: int
    memory_gb: float
    lines_per_second: tuple[float, ...]
    compacted_per_day: int


def needs(rate: int, runs: dict[str, dict[str, Any]]) -> Needs:
    """Return the resources for a number of requests per second.

    `runs` must contain the JSON of benchmarks.server and of benchmarks.decide.
    """
    server, adds_us = runs["server"], runs["decide"]["in_place"]["ours"]["adds_us"]
    # `adds_us` was measured with the Redis server on the same core, so subtract the time of the Redis server.
    web_us = max(adds_us - server["results"]["engine_three"]["core_us"], 0)
    cores = ceil(rate / (server["results"]["engine_three"]["per_second"] * USABLE_PART))
    keys = rate * KEYS_PER_REQUEST
    shards = MIN_SHARDS
    while shards < cores * SHARDS_PER_CORE:
        shards *= 2
    return Needs(
        rate=rate,
        redis_cores=cores,
        shards=shards,
        web_cores=round(rate * web_us / 1e6, 2),
        keys=keys,
        memory_gb=keys * server["memory"]["three"]["growth_per_key"] / 1e9,
        lines_per_second=tuple(keys / seconds for seconds in SEAL_INTERVALS),
        compacted_per_day=keys * BINS_PER_DAY,
    )
