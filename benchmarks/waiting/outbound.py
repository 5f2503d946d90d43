"""Let several processes wait for one limit. Measure the time until all have their permits, and count Redis commands.

    python -m benchmarks.waiting.outbound [--processes 8] [--permits 1000] [--rate 100] [--out DIR]

The ideal time is the time that the limit itself needs: (permits - permits granted at once) / rate. For `concurrency`,
each permit is held for a fixed time. So the ideal time is permits * fixed time / capacity. For comparison, the same
processes also take an element of a Redis list with BLPOP, hold it for the fixed time, and return it with RPUSH.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, cast

import redis

from benchmarks.support import report, servers

#: The algorithms whose limits are measured.
ALGORITHMS = ("token_bucket", "gcra", "leaky_bucket_queue", "smooth_bursty", "fixed_window", "concurrency")
#: Seconds for which a permit of `concurrency` is held.
HOLD_SECONDS = 0.05
#: The name of the case that uses a Redis list, and of this list.
BARE_LIST = "bare_list"
#: Promise: the largest ratio of the time to the ideal time.
MAX_TIME = 1.03
#: Promise: the largest number of Redis commands for one permit. For `concurrency`, a process that must wait needs three
#: commands: to ask, to wait and to release.
MAX_COMMANDS = dict.fromkeys(ALGORITHMS, 1.1) | {"concurrency": 3.0}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.waiting.outbound", description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=8, help="processes that share the limit")
    parser.add_argument("--permits", type=int, default=1000, help="permits of all processes together")
    parser.add_argument("--rate", type=int, default=100, help="permits per second")
    parser.add_argument("--algorithm", choices=(*ALGORITHMS, BARE_LIST), action="append", help="default: all")
    parser.add_argument("--out", type=Path, help="directory for the run's JSON")
    parser.add_argument("--process", help=argparse.SUPPRESS)  # a job as JSON: see `measure`
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    if options.process:
        servers.start_django({}, tables=False)
        take(options)
        return 0
    with servers.redis_server(None) as redis_server, servers.database("sqlite") as url:
        environment = servers.environment(redis_server, url)
        machine_info = report.machine(redis_server.url)
        results = {
            name: measure(name, options, {**os.environ, **environment}, redis_server.url)
            for name in options.algorithm or (*ALGORITHMS, BARE_LIST)
        }
    claims = [
        claim
        for name, result in results.items()
        if name != BARE_LIST
        for claim in (
            report.Claim(
                f"{options.processes} processes on one {name} limit: time ÷ ideal time", MAX_TIME, result["times_ideal"]
            ),
            report.Claim(
                f"{options.processes} processes on one {name} limit: Redis commands per permit",
                MAX_COMMANDS[name],
                result["commands_per_permit"],
            ),
        )
    ]
    if {"concurrency", BARE_LIST} <= set(results):
        ratio = results["concurrency"]["seconds"] / results[BARE_LIST]["seconds"]
        claims.append(report.Claim("concurrency limit: time ÷ the time with a Redis list", MAX_TIME, round(ratio, 4)))
    machine_info |= {"load_after": report.load()}
    run = report.run_json("waiting.outbound", machine_info, vars(options), claims, results=results)
    print(text_of(run))
    report.write(run, options.out)
    return 0


def limit(name: str, rate: int) -> dict[str, Any]:
    """Return a rule of this algorithm, as in a rule file. Its limit grants `rate` permits per second."""
    numbers: dict[str, dict[str, Any]] = {
        "token_bucket": {"capacity": 1, "rate": rate, "period": 1},
        "gcra": {"capacity": 1, "rate": rate, "period": 1},
        "leaky_bucket_queue": {"capacity": 1000, "rate": rate, "period": 1},
        "smooth_bursty": {"rate": rate, "period": 1, "max_burst_seconds": 0},
        "fixed_window": {"capacity": rate, "period": 1, "window_start": "first_hit"},
        "concurrency": {"capacity": math.ceil(rate * HOLD_SECONDS)},
    }
    return {"algorithm": name, **numbers[name]}


def ideal(name: str, permits: int, rate: int) -> float:
    """Return the seconds that the limit needs to grant the permits."""
    if name == "fixed_window":
        return float(math.ceil(permits / rate) - 1)
    if name in ("concurrency", BARE_LIST):
        return math.ceil(permits / math.ceil(rate * HOLD_SECONDS)) * HOLD_SECONDS
    return (permits - 1) / rate


def measure(name: str, options: argparse.Namespace, environment: dict[str, str], url: str) -> dict[str, Any]:
    """Let all processes take their permits of one limit. Return the time and the number of commands."""
    each = math.ceil(options.permits / options.processes)
    job = json.dumps(
        {
            "limit": None if name == BARE_LIST else limit(name, options.rate),
            "url": url,
            "permits": each,
            "held": HOLD_SECONDS if name in ("concurrency", BARE_LIST) else 0,
        }
    )
    command = [sys.executable, "-m", "benchmarks.waiting.outbound", "--process", job]
    processes = [
        subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(options.processes)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    with redis.Redis.from_url(url) as client:
        if name == BARE_LIST:
            client.rpush(BARE_LIST, *range(math.ceil(options.rate * HOLD_SECONDS)))
        sent_names = ("blpop", "rpush") if name == BARE_LIST else ("evalsha", "blpop")
        before = commands(client, sent_names)
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        spans = [json.loads(process.communicate()[0]) for process in processes]
        sent = commands(client, sent_names) - before
    taken = each * options.processes
    seconds = max(end for _begin, end in spans) - min(begin for begin, _end in spans)
    ideal_seconds = ideal(name, taken, options.rate)
    return {
        "permits": taken,
        "seconds": round(seconds, 3),
        "ideal_seconds": round(ideal_seconds, 3),
        "times_ideal": round(seconds / ideal_seconds, 4) if ideal_seconds else 1.0,
        "commands_per_permit": round(sent / taken, 3),
    }


def commands(client: redis.Redis, names: Sequence[str]) -> int:
    """Return the number of calls of these commands. Calls by scripts are included."""
    stats: Any = client.info("commandstats")
    return sum(int(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"]) for name in names)


def take(options: argparse.Namespace) -> None:
    """Take permits one after another in this process. Print when this began and ended, in seconds since 1970 UTC."""
    job = json.loads(options.process)
    permit = from_list(job["url"]) if job["limit"] is None else from_limit(job["limit"])
    print("ready", flush=True)
    sys.stdin.readline()
    begin = time.time()
    for _ in range(job["permits"]):
        with permit():
            if job["held"]:
                time.sleep(job["held"])
    print(json.dumps((begin, time.time())))


def from_limit(fields: dict[str, Any]) -> Callable[[], AbstractContextManager[Any]]:
    """Return a function that waits for a permit of a limit."""
    from ratelimits.algorithms.limits import algorithm_from_json
    from ratelimits.engine import Limit, peek
    from ratelimits.outbound import permits

    algorithm = algorithm_from_json(fields)
    # Connect to the server before the measured time begins. This takes no permits.
    peek([Limit("global", algorithm, "warm up")])
    return lambda: permits("benchmark", rate=algorithm)


def from_list(url: str) -> Callable[[], AbstractContextManager[Any]]:
    """Return a function that waits for an element of the Redis list."""
    client = redis.Redis.from_url(url)
    client.ping()

    @contextmanager
    def element() -> Iterator[None]:
        _name, taken = cast("tuple[bytes, bytes]", client.blpop([BARE_LIST]))
        try:
            yield
        finally:
            client.rpush(BARE_LIST, taken)

    return element


#: The headings of the cells that `cells` returns.
HEADS = ("permits", "s", "ideal, s", "× ideal", "Redis commands per permit")


def cells(result: dict[str, Any]) -> tuple[Any, ...]:
    """Return the cells of a result in a table, without the first cell (the name)."""
    names = ("permits", "seconds", "ideal_seconds", "times_ideal", "commands_per_permit")
    return tuple(result[name] for name in names)


def text_of(run: dict[str, Any]) -> str:
    """Return the tables for the terminal."""
    heads = ("algorithm", *HEADS)
    rows = [(name, *cells(result)) for name, result in run["results"].items()]
    return "\n".join([report.table(heads, rows), "", report.claims_table(run["claims"])])


if __name__ == "__main__":
    raise SystemExit(main())
