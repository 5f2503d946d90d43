"""What the benchmarks of pages share: their options, a run for each database, and the time that a page takes."""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.support import report, servers

DATABASES = ("postgres", "sqlite")
#: Seconds that a hanging server may add.
TIMEOUT = 0.25


class Benchmark(NamedTuple):
    """A benchmark of pages.

    name   of its module, such as "status"
    bound  milliseconds that each page is promised to take at most
    sizes  the options that say how much there is: their default and what they count
    fill   makes what the sizes say, and returns what the report says of it and the pages' addresses by name
    """

    name: str
    bound: int
    sizes: Mapping[str, tuple[int, str]]
    fill: Callable[[argparse.Namespace], tuple[dict[str, Any], dict[str, str]]]


def arguments(benchmark: Benchmark, description: str, argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of a command line."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.pages.{benchmark.name}", description=description)
    for name, (default, what) in benchmark.sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default: {default:,})")
    parser.add_argument("--rounds", type=int, default=21, help="times that each page is asked for")
    parser.add_argument("--database", choices=DATABASES, action="append", help="default: both")
    parser.add_argument("--out", type=Path, help="directory for the run's JSON")
    parser.add_argument("--process", action="store_true", help=argparse.SUPPRESS)  # for this command itself
    return parser.parse_args(argv)


def main(benchmark: Benchmark, description: str, argv: Sequence[str] | None = None) -> int:
    """Run the benchmark on each database, in a process of its own, and print the tables."""
    options = arguments(benchmark, description, argv)
    if options.process:
        print(json.dumps(_work(benchmark, options)))
        return 0
    with servers.redis_server(None) as redis_server:
        about = report.machine(redis_server.url, ("psycopg",))
    results = {}
    for kind in options.database or DATABASES:
        print(f"{kind}: {options.lines:,} lines", file=sys.stderr, flush=True)
        with servers.redis_server(None) as redis_server, servers.database(kind) as url:
            environment = servers.environment(redis_server, url)
            sizes = [f"--{name}={getattr(options, name)}" for name in (*benchmark.sizes, "rounds")]
            done = subprocess.run(
                [sys.executable, "-m", f"benchmarks.pages.{benchmark.name}", "--process", *sizes],
                env={**os.environ, **environment, "DJANGO_SETTINGS_MODULE": "benchmarks.pages.settings"},
                stdout=subprocess.PIPE,
                check=True,
            )
            results[kind] = json.loads(done.stdout)
    claims = _claims(results, benchmark.bound)
    about["load_behind"] = report.load()
    run = report.run_json(f"pages.{benchmark.name}", about, vars(options), claims, results=results)
    print(text_of(run))
    report.write(run, options.out)
    return 0


def timed(what: str, work: Callable[[], object]) -> float:
    """Do something, say on standard error how long it took, and return the seconds."""
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    print(f"{what} in {seconds:.0f} s", file=sys.stderr, flush=True)
    return seconds


def _work(benchmark: Benchmark, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one database."""
    servers.start_django({})
    from django.contrib.auth.models import User
    from django.db import connection
    from django.test import Client

    filled, urls = benchmark.fill(options)
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("ANALYZE")  # as autovacuum does within a minute
    client = Client()
    client.force_login(User.objects.create_superuser("admin"))
    pages = {name: _measure(client, url, options.rounds) for name, url in urls.items()}
    with socket.create_server(("127.0.0.1", 0)) as silent:
        _use_server(silent.getsockname()[1])
        for name, url in urls.items():
            hanging = _measure(client, url, options.rounds)
            pages[name]["hanging_ms"] = hanging["ms"]
            pages[name]["hanging_adds_ms"] = round(hanging["ms"] - pages[name]["ms"], 1)
    return {"filled": filled, "pages": pages}


def _use_server(port: int) -> None:
    from django.conf import settings
    from django.test import override_settings

    place = {**settings.CACHES["ratelimits"], "LOCATION": f"redis://127.0.0.1:{port}/0"}
    override_settings(CACHES={**settings.CACHES, "ratelimits": place}).enable()


def _measure(client: Any, url: str, rounds: int) -> dict[str, Any]:
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    assert client.get(url).status_code == 200  # and the templates and the rules are read
    with CaptureQueriesContext(connection) as queries:
        assert client.get(url).status_code == 200
    count = len(queries)
    times, processor = [], []
    for _round in range(rounds):
        start, used = time.perf_counter(), time.process_time()
        response = client.get(url)
        times.append((time.perf_counter() - start) * 1000)
        processor.append((time.process_time() - used) * 1000)
        assert response.status_code == 200
    return {
        "ms": round(median(times), 1),
        "best_ms": round(min(times), 1),
        # Of this process alone: what is left of the time on a machine that does something else beside it.
        "processor_ms": round(median(processor), 1),
        "queries": count,
        "kb": round(len(response.content) / 1024),
    }


def _claims(results: dict[str, Any], bound: int) -> list[report.Claim]:
    claims = []
    for kind, result in results.items():
        for name, page in result["pages"].items():
            claims.append(report.Claim(f"{name}, on {kind}, ms", bound, page["ms"]))
            # A tenth of a second more than the timeout, for threads to be started and a page to be made of it.
            adds = page["hanging_adds_ms"] / 1000
            claims.append(report.Claim(f"{name}, on {kind}: a hanging Redis adds, s", TIMEOUT + 0.1, adds))
    return claims


def text_of(run: dict[str, Any]) -> str:
    """Return the run as tables."""
    heads = ("page", "ms", "best, ms", "of its processor, ms", "queries", "KB", "with a hanging Redis, ms")
    columns = ("ms", "best_ms", "processor_ms", "queries", "kb", "hanging_ms")
    rows = [
        (f"{name}, on {kind}", *(page[column] for column in columns))
        for kind, result in run["results"].items()
        for name, page in result["pages"].items()
    ]
    names = list(next(iter(run["results"].values()))["filled"])
    filled = [(kind, *(result["filled"][name] for name in names)) for kind, result in run["results"].items()]
    return "\n\n".join(
        [
            report.table(heads, rows),
            report.table(("ledger", *names), filled),
            report.claims_table(run["claims"]),
        ]
    )
