"""Compare this app's connections with redis-py's pooled client, in one process with several threads."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import redis
from django_redis import get_redis_connection

from benchmarks.measured import ours
from benchmarks.support.pipelines import check, run_of, wait_for_bin
from benchmarks.support.timing import per_second
from ratelimits.engine.call import new_nonce
from ratelimits.engine.command import Command


def parts_of(packed: bytes) -> list[bytes]:
    """Return the arguments of a command that is written in RESP, the protocol of Redis."""
    # A command begins with "*", the number of its arguments and a line end. Each argument is "$", its size, a line end,
    # its bytes and a line end.
    count, _line, rest = packed[1:].partition(b"\r\n")
    parts = []
    for _ in range(int(count)):
        size, _line, rest = rest[1:].partition(b"\r\n")
        parts.append(rest[: int(size)])
        rest = rest[int(size) + 2 :]
    return parts


def pooled(now: int) -> Callable[[], Callable[[], object]]:
    """Return a function that each thread calls once, to get the function that it measures.

    The measured function sends a decision (EVALSHA) with redis-py's pooled client.
    """
    client: redis.Redis = get_redis_connection("ratelimits")
    server = ours.engine_server()
    call = ours.call_of(ours.three_limits(), now)
    command = Command(server.keyspace, call)
    _evalsha, sha, count, *rest = parts_of(command.to_bytes(run_of(client), b"NONCE"))
    place, key_count = rest.index(b"NONCE"), int(count)
    before, after = rest[:place], rest[place + 1 :]

    def ask() -> object:
        check(client.evalsha(sha.decode(), key_count, *before, new_nonce(), *after))
        return True

    return lambda: ask


def own(now: int) -> Callable[[], Callable[[], object]]:
    """Return a function that each thread calls once, to get the function that it measures.

    The measured function makes the same decision as that of `pooled`, but with a prepared command on this app's
    connections.
    """
    server, call = ours.engine_server(), ours.call_of(ours.three_limits(), now)
    return lambda: ours.deciding(server, call)


def compare(url: str, now: int, threads: int, seconds: float, rounds: int) -> dict[str, Any]:
    """Return the decisions per second with both clients, and the use of the cores of the process and of the server.

    The clients take turns. The ratio (ours ÷ pooled) is the median of the ratios of the rounds.
    """
    # `pooled` makes its command only once. This command is valid only in one bin.
    wait_for_bin(2 * rounds * seconds)
    makers = {"ours": own(now), "pooled": pooled(now)}
    found: dict[str, list[_Throughput]] = {name: [] for name in makers}
    with redis.Redis.from_url(url) as client:
        for _ in range(rounds):
            for name, make in makers.items():
                found[name].append(_throughput(client, make, threads, seconds))
    rates = {name: [one.per_second for one in ones] for name, ones in found.items()}
    return {
        "threads": threads,
        **{f"{name}_per_second": round(median(ones)) for name, ones in rates.items()},
        "ratio": round(median(a / b for a, b in zip(rates["ours"], rates["pooled"], strict=True)), 3),
        **{
            f"{name}_{side}_busy": round(median(getattr(one, side) for one in ones), 3)
            for name, ones in found.items()
            for side in ("process", "server")
        },
    }


class _Throughput(NamedTuple):
    """Decisions per second, and the use of the processor by this process and by the server (1: one whole core)."""

    per_second: float
    process: float
    server: float


def _throughput(
    client: redis.Redis, make: Callable[[], Callable[[], object]], threads: int, seconds: float
) -> _Throughput:
    start, own_seconds, server_seconds = time.perf_counter(), time.process_time(), _server_seconds(client)
    rate = per_second(make, threads, seconds)
    elapsed = time.perf_counter() - start
    own_seconds, server_seconds = time.process_time() - own_seconds, _server_seconds(client) - server_seconds
    return _Throughput(rate, own_seconds / elapsed, server_seconds / elapsed)


def _server_seconds(client: redis.Redis) -> float:
    """Return the processor time that the server has used so far, in seconds."""
    info: Any = client.info("cpu")
    return float(info["used_cpu_user"] + info["used_cpu_sys"])
