"""Compare three ways to decide in one process: tasks on this app's connection, tasks on redis.asyncio's pool, threads.

    python -m benchmarks.tasks [--out DIR]

Each task or thread decides again and again. All three ways send the same EVALSHA (3 rules on one key, with metering).
They take turns in each round. Client and server have one core each.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import redis.asyncio
from django.conf import settings

from benchmarks.support import report, servers

#: Number of connections of redis.asyncio's pool. 50 is a usual number.
POOL = 50
#: The compared ways: name and title.
WAYS = (
    ("ours", "ours, one connection"),
    ("pooled", f"redis.asyncio, a pool of {POOL}"),
    ("threads", "ours, a thread for each task"),
)
#: Promises, the largest number of tasks first. Each has a number of tasks and a factor. With this number of tasks or
#: more, this app makes at least `factor` times as many decisions per second as redis.asyncio's pool.
BOUNDS = ((1000, 3), (64, 2))


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tasks", description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", type=int, nargs="+", default=[1, 64, 1000], help="numbers of tasks at the same time")
    parser.add_argument("--rounds", type=int, default=10, help="rounds that each way takes part in")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of each measurement")
    parser.add_argument("--out", type=Path, help="directory for the run's JSON")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    available = servers.cores()
    with servers.redis_server(available[0]) as redis_server, servers.database("sqlite") as database:
        servers.start_django(servers.environment(redis_server, database))
        servers.pin(available[-1])
        run = measure(options, redis_server.url)
    print(text_of(run))
    report.write(run, options.out)
    return 0


def measure(options: argparse.Namespace, url: str) -> dict[str, Any]:
    """Run all measurements and return them for the JSON file."""
    from benchmarks.support.pipelines import wait_for_bin

    machine_info = report.machine(url)
    results: dict[str, dict[str, Any]] = {}
    for tasks in options.tasks:
        # The pooled client sends the same command again and again, and the command is valid in one bin only. On a slow
        # machine the rounds can take twice as long as planned.
        wait_for_bin(2 * len(WAYS) * options.rounds * (options.seconds + 1))
        measured: dict[str, list[tuple[float, float]]] = {name: [] for name, _title in WAYS}
        for _round in range(options.rounds):
            for name, times in one_round(tasks, options.seconds).items():
                measured[name].append(times)
        results[str(tasks)] = {
            name: {
                "per_second": round(median(rate for rate, _p99 in rounds)),
                "p99_us": round(median(p99 for _rate, p99 in rounds), 1),
                "times_ours": round(
                    median(rate / mine for (rate, _), (mine, _) in zip(rounds, measured["ours"], strict=True)), 3
                ),
            }
            for name, rounds in measured.items()
        }
    machine_info = {**machine_info, "load_after": report.load()}
    return report.run_json("tasks", machine_info, vars(options), *_claims(results), results=results)


def _claims(results: dict[str, dict[str, Any]]) -> tuple[list[report.Claim], list[report.Claim]]:
    """Return the promises of BOUNDS, and the targets. For fewer tasks than in BOUNDS, a factor of 1 is the target."""
    claims: list[report.Claim] = []
    targets: list[report.Claim] = []
    for tasks, ways in results.items():
        bound = next((bound for min_tasks, bound in BOUNDS if int(tasks) >= min_tasks), 1)
        count = f"{int(tasks):,} {'task' if int(tasks) == 1 else 'tasks'}"
        text = f"{count} in one event loop: decisions/s, × those of redis.asyncio's pool"
        claim = report.Claim(text, bound, 1 / ways["pooled"]["times_ours"], least=True)
        (claims if bound > 1 else targets).append(claim)
    return claims, targets


def one_round(tasks: int, seconds: float) -> dict[str, tuple[float, float]]:
    """Measure each way once. Return, by name of the way, the decisions per second and the p99 in µs."""
    from benchmarks.measured import ours
    from ratelimits.engine.command import Command
    from ratelimits.engine.decide import adecide_call, decide_call

    server, call = ours.engine_server(), ours.call_of(ours.three_limits(), time.time_ns() // 1000)
    command = Command(server.keyspace, call)

    async def decide() -> object:
        return (await adecide_call(server, call, command)).allowed

    return {
        "ours": asyncio.run(in_tasks(decide, tasks, seconds)),
        "pooled": asyncio.run(pooled(command, tasks, seconds)),
        "threads": in_threads(lambda: decide_call(server, call, command).allowed, tasks, seconds),
    }


async def pooled(command: Any, tasks: int, seconds: float) -> tuple[float, float]:
    """Send the same EVALSHA by redis.asyncio's client, whose tasks wait for a free connection.

    Return the decisions per second and the p99 in µs.
    """
    from benchmarks.measured.threads import parts_of
    from benchmarks.support.pipelines import check
    from ratelimits.engine.call import new_nonce
    from ratelimits.engine.transport.connection import ASK_RUN, run_of

    url = settings.CACHES["ratelimits"]["LOCATION"]
    pool: Any = redis.asyncio.BlockingConnectionPool.from_url(url, max_connections=POOL, timeout=None)
    client = redis.asyncio.Redis(connection_pool=pool)
    connection = await pool.get_connection()
    await connection.send_packed_command([ASK_RUN], check_health=False)
    run = run_of(await connection.read_response(disable_decoding=True))
    await pool.release(connection)
    # The arguments are made once. Only the nonce differs from call to call.
    _evalsha, sha, count, *rest = parts_of(command.to_bytes(run, b"NONCE"))
    place, keys = rest.index(b"NONCE"), int(count)
    before, after = rest[:place], rest[place + 1 :]

    async def decide() -> object:
        check(await client.evalsha(sha.decode(), keys, *before, new_nonce(), *after))
        return True

    try:
        return await in_tasks(decide, tasks, seconds)
    finally:
        await pool.disconnect()


async def in_tasks(decide: Callable[[], Awaitable[object]], tasks: int, seconds: float) -> tuple[float, float]:
    """Run tasks that decide again and again. Return the decisions per second and the p99 in µs.

    A refusal ends the run.
    """
    times: list[int] = []
    await asyncio.gather(*(decide() for _ in range(tasks)))
    clock = time.perf_counter_ns
    start = clock()
    end = start + int(seconds * 1e9)

    async def work() -> None:
        now = clock()
        while True:
            if not await decide():
                raise AssertionError("a decision was answered with a refusal")
            before, now = now, clock()
            times.append(now - before)
            if now >= end:
                break

    await asyncio.gather(*(work() for _ in range(tasks)))
    return rate_and_p99(times, clock() - start)


def in_threads(decide: Callable[[], object], threads: int, seconds: float) -> tuple[float, float]:
    """Run threads that decide again and again. Return the decisions per second and the p99 in µs.

    A refusal or an error ends the run.
    """
    times: list[list[int]] = [[] for _ in range(threads)]
    errors: list[BaseException] = []
    ready, clock = threading.Barrier(threads + 1), time.perf_counter_ns
    end = 0  # ns

    def work(mine: list[int]) -> None:
        try:
            decide()
            ready.wait()
            now = clock()
            while now < end:
                if not decide():
                    raise AssertionError("a decision was answered with a refusal")
                before, now = now, clock()
                mine.append(now - before)
        except BaseException as error:  # noqa: BLE001  (raised in the main thread)
            errors.append(error)
            ready.abort()

    workers = [threading.Thread(target=work, args=(mine,)) for mine in times]
    for worker in workers:
        worker.start()
    start = clock()
    end = start + int((seconds + 3600) * 1e9)  # so that no thread ends before the true end is set below
    try:
        ready.wait()
        start = clock()
        end = start + int(seconds * 1e9)
    except threading.BrokenBarrierError:
        end = 0
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
    return rate_and_p99([one for mine in times for one in mine], clock() - start)


def rate_and_p99(times: list[int], elapsed: int) -> tuple[float, float]:
    """Return the number of decisions per second, and the time in µs that 99 % of them did not exceed.

    `times` has the time of each decision, and `elapsed` is the time of the whole run, both in ns.
    """
    ordered = sorted(times)
    return len(ordered) / elapsed * 1e9, ordered[min(int(0.99 * len(ordered)), len(ordered) - 1)] / 1000


def text_of(run: dict[str, Any]) -> str:
    """Return the run as tables."""
    rows = [
        (title, int(tasks), ways[name]["per_second"], ways[name]["p99_us"], ways[name]["times_ours"])
        for tasks, ways in run["results"].items()
        for name, title in WAYS
    ]
    heads = ("one process", "at once", "decisions/s", "p99 µs", "× ours")
    return "\n\n".join([report.table(heads, rows), report.claims_table([*run["claims"], *run["targets"]])])


if __name__ == "__main__":
    sys.exit(main())
