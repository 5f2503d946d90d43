"""Measure the requests per second of a web server with and without limits. gunicorn and Redis share one core.

    python -m benchmarks.end_to_end [--out DIR]

The load comes from another core: from wrk if it is installed (`apt install wrk`), otherwise from clients in Python.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, cast

from benchmarks.support import load, report, servers
from ratelimits.embedded import die_with_parent, free_port

#: The view without a limit. All other views are compared with this view.
BASE = "unlimited"
#: Maximum number of seconds in which gunicorn must start.
START_SECONDS = 60.0


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.end_to_end", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="rounds that every view takes part in")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each measurement")
    parser.add_argument("--connections", type=int, default=8, help="clients that send requests at the same time")
    parser.add_argument("--worker-class", default="sync", help="class of gunicorn's only worker")
    parser.add_argument("--core", type=int, help="the core of gunicorn and Redis (default: the last)")
    parser.add_argument("--server", type=servers.binary, help=servers.SERVER_HELP)
    parser.add_argument("--out", type=Path, help="directory for the run's JSON and chart")
    return parser.parse_args(argv)


@contextmanager
def gunicorn(core: int, worker_class: str, environment: dict[str, str]) -> Iterator[int]:
    """Run gunicorn with one worker on one core, and yield its port."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "gunicorn",
        "benchmarks.support.wsgi",
        "--bind",
        f"127.0.0.1:{port}",
        "--workers",
        "1",
    ]
    process = subprocess.Popen(
        ["taskset", "-c", str(core), *command, "--worker-class", worker_class, "--log-level", "warning"],
        env={**os.environ, **environment},
        preexec_fn=die_with_parent,
    )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("gunicorn did not start: see above")
            time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait()


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{BASE}", timeout=1) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    available = servers.cores()
    core = available[0] if options.core is None else options.core
    with servers.redis_server(core, options.server) as redis_server, servers.database("sqlite") as database:
        environment = servers.environment(redis_server, database)
        servers.start_django(environment)
        from benchmarks.measured import ours

        ours.save_rules()
        with gunicorn(core, options.worker_class, environment) as port:
            client_core = next((other for other in available if other != core), core)
            run = measure(options, redis_server.url, port, client_core)
    print(text_of(run))
    report.write(run, options.out, {"end_to_end": chart(run)})
    return 0


def measure(options: argparse.Namespace, url: str, port: int, client_core: int) -> dict[str, Any]:
    """Run all measurements and return them for the JSON file."""
    from benchmarks.support.views import VIEWS

    machine_info = report.machine(url, ("gunicorn",))
    tool = load.generator()
    if tool != "wrk":
        print("wrk is not installed (apt install wrk): Python clients make the load", file=sys.stderr, flush=True)
    # Leave out the view "refused", because the load accepts only the status 200. Also leave out "engine": this view has
    # no failure policy, so a slow reply of Redis on a busy machine would be an error.
    wanted = {name: title for name, (title, _view) in VIEWS.items() if name not in ("refused", "engine")}
    found: dict[str, list[float]] = {name: [] for name in wanted}
    order = random.Random(1)
    for number in range(options.rounds):
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
        for name in order.sample(list(wanted), len(wanted)):
            found[name].append(
                load.requests_per_second(port, f"/{name}", client_core, options.connections, options.seconds)
            )
    results = {
        name: {
            "title": title,
            "requests_per_second": round(median(found[name]), 1),
            "share": round(median(a / b for a, b in zip(found[name], found[BASE], strict=True)), 4),
        }
        for name, title in wanted.items()
    }
    share = cast("float", results["ours"]["share"])
    return report.run_json(
        "end_to_end",
        {**machine_info, "load_after": report.load()},
        {**vars(options), "generator": tool},
        [report.Claim("end to end: requests/s, × requests/s without a limit", 0.64, share, least=True)],
        [report.Claim("end to end: requests/s, × requests/s without a limit", 0.85, share, least=True)],
        results=results,
    )


def text_of(run: dict[str, Any]) -> str:
    """Return the run as tables."""
    rows = [(result["title"], result["requests_per_second"], result["share"]) for result in run["results"].values()]
    heads = (f"gunicorn, one worker; load by {run['options']['generator']}", "requests/s", "× unlimited")
    return "\n\n".join([report.table(heads, rows), report.claims_table([*run["claims"], *run["targets"]])])


def chart(run: dict[str, Any]) -> str:
    """Return the requests per second of each view for the chart."""
    kinds = {"unlimited": "floor", "ping": "floor", "bare": "floor", "drf_one": "peer", "drf_three": "peer"}
    bars = [
        (result["title"], result["requests_per_second"], kinds.get(name, "ours"))
        for name, result in run["results"].items()
    ]
    return report.bar_chart("A trivial view behind gunicorn", "requests per second; one worker, one core", bars)


if __name__ == "__main__":
    sys.exit(main())
