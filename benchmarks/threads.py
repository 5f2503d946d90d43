"""One process with several threads: this app's pinned connections against redis-py's pooled client."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import redis
from django_redis import get_redis_connection

from benchmarks import ours
from benchmarks.pipelines import check, run_of, wait_for_bin
from benchmarks.timing import per_second
from ratelimits.engine.call import Command, nonce


def parts_of(packed: bytes) -> list[bytes]:
    """The arguments of a command in RESP."""
    count, _line, rest = packed[1:].partition(b"\r\n")
    parts = []
    for _ in range(int(count)):
        size, _line, rest = rest[1:].partition(b"\r\n")
        parts.append(rest[: int(size)])
        rest = rest[int(size) + 2 :]
    return parts


def pooled(now: int) -> Callable[[], Callable[[], object]]:
    """The same decision as an EVALSHA of redis-py's pooled client, as django-redis hands it out."""
    client: redis.Redis = get_redis_connection("ratelimits")
    here = ours.engine_server()
    call = ours.call_of(ours.three_limits(), now)
    command = Command(here.keyspace, call)
    _evalsha, sha, count, *rest = parts_of(command.to(run_of(client), b"NONCE"))
    place, keys = rest.index(b"NONCE"), int(count)
    before, behind = rest[:place], rest[place + 1 :]

    def ask() -> object:
        check(client.evalsha(sha.decode(), keys, *before, nonce(), *behind))
        return True

    return lambda: ask


def own(now: int) -> Callable[[], Callable[[], object]]:
    """The engine's prepared decision, on a connection of each thread's own."""
    here, call = ours.engine_server(), ours.call_of(ours.three_limits(), now)
    return lambda: ours.deciding(here, call)


def compare(now: int, threads: int, seconds: float, rounds: int) -> dict[str, Any]:
    """Decisions per second of both, taking turns; the ratio is the median of the rounds' ratios."""
    # The pooled client sends what was made once.
    wait_for_bin(2 * rounds * seconds)
    makers = {"ours": own(now), "pooled": pooled(now)}
    found: dict[str, list[float]] = {name: [] for name in makers}
    for _ in range(rounds):
        for name, make in makers.items():
            found[name].append(per_second(make, threads, seconds))
    return {
        "threads": threads,
        "ours_per_second": round(median(found["ours"])),
        "pooled_per_second": round(median(found["pooled"])),
        "ratio": round(median(a / b for a, b in zip(found["ours"], found["pooled"], strict=True)), 3),
    }
