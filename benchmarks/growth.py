"""Measure whether decisions become slower with many rules, overrides, live keys or limits per request.

    python -m benchmarks.growth [--out DIR]

Live keys are keys whose states are in Redis. Each size runs in its own process. The processes take turns: each process
makes a block of calls in each round. In each round, each size is compared with the smallest size (three rules and one
key). All servers and processes share one core.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measured import grown
from benchmarks.measured.sizes import Size
from benchmarks.support import report, servers

BASE = "base"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__.splitlines()[0])
    parser.add_argument("--rules", type=int, default=1_000, help="maximum number of rules in the database")
    parser.add_argument("--overrides", type=int, default=100_000, help="maximum number of overrides in the database")
    parser.add_argument("--keys", type=int, default=1_000_000, help="maximum number of live keys")
    parser.add_argument("--rounds", type=int, default=30, help="rounds that every size takes part in")
    parser.add_argument("--calls", type=int, default=500, help="timed calls of each size in each round")
    parser.add_argument("--core", type=int, help="the core of clients and servers (default: the last)")
    parser.add_argument("--only", help="only the smallest size and the sizes whose names contain this text")
    parser.add_argument("--out", type=Path, help="directory for the run's JSON")
    parser.add_argument("--process", help=argparse.SUPPRESS)  # one size as JSON: see `Process`
    parser.add_argument("--load", choices=("time", "memory"), help=argparse.SUPPRESS)  # see grown.work
    return parser.parse_args(argv)


def _steps(most: int, start: int) -> list[int]:
    """Return `start`, 10 × `start`, 100 × `start` and so on, up to `most`: `_steps(500, 10)` is [10, 100, 500]."""
    out = []
    while start < most:
        out.append(start)
        start *= 10
    return [*out, most]


def sizes(options: argparse.Namespace) -> list[Size]:
    """Return all sizes that are measured, the smallest first."""
    rules, overrides, keys = options.rules, options.overrides, options.keys
    out = [Size(BASE, "3 rules, 1 key")]
    out += [Size(f"rules_{n}", f"{n:,} rules", rules=n) for n in _steps(rules, 10)]
    out += [Size(f"overrides_{n}", f"{n:,} overrides", overrides=n) for n in _steps(overrides, 1_000)]
    out += [Size(f"keys_{n}", f"{n:,} live keys", keys=n) for n in _steps(keys, 1_000)]
    out += [Size(f"spread_{n}", f"requests spread over {n:,} keys", keys=n, spread=n) for n in _steps(keys, 1_000)]
    out += [
        Size(f"limits_{n}", f"{n} {'limit' if n == 1 else 'limits'} per request", rules=n, limits=n)
        for n in (1, 2, 5, 10)
    ]
    title = f"{rules:,} rules, {overrides:,} overrides, {keys:,} live keys"
    out += [
        Size("all", title, rules=rules, overrides=overrides, keys=keys),
        Size(
            "all_spread",
            f"{title}, requests spread over them",
            rules=rules,
            overrides=overrides,
            keys=keys,
            spread=keys,
        ),
    ]
    return [size for size in out if options.only is None or options.only in size.name or size.name == BASE]


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    if options.process:
        return grown.work(Size(**json.loads(options.process)), options.load)
    core = servers.cores()[0] if options.core is None else options.core
    servers.pin(core)
    with ExitStack() as stack:
        run = measure(options, stack, core)
    print(text_of(run))
    report.write(run, options.out)
    return 0


class Process:
    """A process for one size. It reads numbers from its input. For each number `n`, it makes `n` calls and times them.

    With `load`, the process only measures "time" or "memory" (see grown.work).
    """

    def __init__(self, size: Size, environment: dict[str, str], load: str = "") -> None:
        command = [sys.executable, "-m", "benchmarks.growth", "--process", json.dumps(asdict(size))]
        self._process = subprocess.Popen(
            [*command, *(("--load", load) if load else ())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        #: The first line that the process prints: "ready", or with `load` the measured time or memory.
        self.answer = self._read()

    def time_block(self, calls: int) -> list[float]:
        """Let the process make a block of calls. Return their times in ns."""
        assert self._process.stdin is not None
        print(calls, file=self._process.stdin, flush=True)
        times: list[float] = self._read()
        return times

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a process of the benchmark ended with status {self._process.wait()}: see above")
        return json.loads(line)

    def end(self) -> None:
        """Tell the process to end, and wait for its end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def measure(options: argparse.Namespace, stack: ExitStack, core: int) -> dict[str, Any]:
    """Run all measurements and return them for the JSON file."""
    wanted = sizes(options)
    # Sizes with the same number of live keys share a server, and sizes with the same rows share a database.
    redis_servers = {keys: stack.enter_context(servers.redis_server(core)) for keys in sorted({s.keys for s in wanted})}
    machine_info = report.machine(redis_servers[1].url)  # the server for sizes with 1 live key
    databases: dict[tuple[int, int, int], str] = {}
    environments: dict[str, dict[str, str]] = {}
    for size in wanted:
        rows = (size.rules, size.overrides, size.limits)
        if rows not in databases:
            databases[rows] = stack.enter_context(servers.database("sqlite"))
        environments[size.name] = servers.environment(
            redis_servers[size.keys], databases[rows], f"g{size.rules}-{size.overrides}-{size.limits}"
        )
    loads = _loads(wanted, environments)
    processes: dict[str, Process] = {}
    for size in wanted:
        print(f"preparing {size.title}", file=sys.stderr, flush=True)
        processes[size.name] = Process(size, environments[size.name])
        stack.callback(processes[size.name].end)
    times: dict[str, list[list[float]]] = {size.name: [] for size in wanted}
    order = random.Random(1)
    for number in range(options.rounds):
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
        for name in order.sample(list(processes), len(processes)):
            times[name].append(processes[name].time_block(options.calls))
    results = {size.name: _result(size, times[size.name], times[BASE]) for size in wanted}
    return report.run_json(
        "growth",
        {**machine_info, "load_after": report.load()},
        vars(options),
        _claims(results, loads),
        results=results,
        loads=loads,
    )


def _result(size: Size, times: list[list[float]], base: list[list[float]]) -> dict[str, Any]:
    ordered = sorted(ns for block in times for ns in block)
    ratio = median(median(block) / median(base_block) for block, base_block in zip(times, base, strict=True))
    return {
        **asdict(size),
        "median_us": round(median(ordered) / 1000, 3),
        "p99_us": round(ordered[min(int(0.99 * len(ordered)), len(ordered) - 1)] / 1000, 3),
        "times_base": round(ratio, 4),
    }


def _loads(wanted: list[Size], environments: dict[str, dict[str, str]]) -> list[dict[str, Any]]:
    """Return how long a new process takes to read all overrides, and how much memory the overrides take."""
    out = []
    for size in wanted:
        if not size.name.startswith("overrides_"):
            continue
        print(f"loading {size.title}", file=sys.stderr, flush=True)
        # The first process makes the rows. Two other processes measure, because making the rows also takes memory.
        Process(size, environments[size.name], "time").end()
        time_process, memory_process = (Process(size, environments[size.name], load) for load in ("time", "memory"))
        time_process.end()
        memory_process.end()
        out.append({"overrides": size.overrides, **time_process.answer, **memory_process.answer})
    return out


def _claims(results: dict[str, dict[str, Any]], loads: list[dict[str, Any]]) -> list[report.Claim]:
    claims = []
    if "all" in results:
        title, ratio = results["all"]["title"], results["all"]["times_base"]
        claims.append(report.Claim(f"time of a decision with {title}, × that with 3 rules and 1 key", 1.05, ratio))
    if loads:
        last = loads[-1]
        text = f"loading {last['overrides']:,} overrides"
        claims += [
            report.Claim(f"{text}, seconds", 1, last["seconds"]),
            report.Claim(f"{text}, MB per process", 40, last["resident_mb"]),
        ]
    return claims


def text_of(run: dict[str, Any]) -> str:
    """Return the run as tables."""
    rows = [
        (result["title"], result["median_us"], result["p99_us"], result["times_base"])
        for result in run["results"].values()
    ]
    loads = [
        (result["overrides"], result["seconds"], result["resident_mb"], result["held_mb"]) for result in run["loads"]
    ]
    return "\n\n".join(
        [
            report.table(("quota.check, metered", "median µs", "p99 µs", "× the first line"), rows),
            report.table(("overrides in the database", "load, s", "process grows by, MB", "in use, MB"), loads),
            report.claims_table(run["claims"]),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
