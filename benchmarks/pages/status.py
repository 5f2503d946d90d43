"""Measure how long the status page and the admin's index take with a large ledger, and how many queries they make.

    python -m benchmarks.pages.status [--lines 5000000] [--keys 10000] [--out DIR]

The ledger covers 30 days. The pages are requested by Django's test client. At the end Redis is replaced by a server
that accepts connections and never answers.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.support import report, servers

DATABASES = ("postgres", "sqlite")
#: Maximum milliseconds for a page, and maximum seconds that a hanging server may add.
BOUND, TIMEOUT = 500, 0.25
PAGES = {
    "status, 24 hours": "/admin/ratelimits/status/",
    "status, 30 days": "/admin/ratelimits/status/?window=month",
    "the admin's index": "/admin/",
}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pages.status", description=__doc__.splitlines()[0])
    parser.add_argument("--lines", type=int, default=5_000_000, help="lines of the ledger")
    parser.add_argument("--keys", type=int, default=10_000, help="keys, all of which are used every few hours")
    parser.add_argument("--rules", type=int, default=20, help="rules that bill and refuse")
    parser.add_argument("--rounds", type=int, default=21, help="times that each page is asked for")
    parser.add_argument("--database", choices=DATABASES, action="append", help="default: both")
    parser.add_argument("--out", type=Path, help="directory for the run's JSON")
    parser.add_argument("--process", action="store_true", help=argparse.SUPPRESS)  # for this command itself
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    if options.process:
        print(json.dumps(work(options)))
        return 0
    with servers.redis_server(None) as redis_server:
        about = report.machine(redis_server.url, ("psycopg",))
    results = {}
    for kind in options.database or DATABASES:
        print(f"{kind}: {options.lines:,} lines", file=sys.stderr, flush=True)
        with servers.redis_server(None) as redis_server, servers.database(kind) as url:
            environment = servers.environment(redis_server, url)
            sizes = [f"--{name}={getattr(options, name)}" for name in ("lines", "keys", "rules", "rounds")]
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.pages.status", "--process", *sizes],
                env={**os.environ, **environment, "DJANGO_SETTINGS_MODULE": "benchmarks.pages.settings"},
                stdout=subprocess.PIPE,
                check=True,
            )
            results[kind] = json.loads(done.stdout)
    run = report.run_json(
        "pages.status", {**about, "load_behind": report.load()}, vars(options), _claims(results), results=results
    )
    print(text_of(run))
    report.write(run, options.out)
    return 0


def work(options: argparse.Namespace) -> dict[str, Any]:
    """Measure one database."""
    servers.start_django({})
    from django.contrib.auth.models import User
    from django.db import connection
    from django.test import Client

    from benchmarks.pages.filling import declare_outage, fill_ledger, make_rules
    from ratelimits.models import KeyTotal, Line, RuleTotal
    from ratelimits.usage.tally import tally

    rules = make_rules(options.rules)
    start = time.perf_counter()
    fill_ledger(options.lines, options.keys, rules)
    filled = time.perf_counter() - start
    print(f"filled in {filled:.0f} s", file=sys.stderr, flush=True)
    start = time.perf_counter()
    tally()
    tallied = time.perf_counter() - start
    print(f"tallied in {tallied:.0f} s", file=sys.stderr, flush=True)
    declare_outage(options.keys // 10)
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("ANALYZE")  # autovacuum does this within a minute
    assert Line.objects.count() == options.lines
    client = Client()
    client.force_login(User.objects.create_superuser("admin"))
    pages = {name: _measure(client, url, options.rounds) for name, url in PAGES.items()}
    with socket.create_server(("127.0.0.1", 0)) as silent:
        _use_server(silent.getsockname()[1])
        for name, url in PAGES.items():
            hanging = _measure(client, url, options.rounds)
            pages[name]["hanging_ms"] = hanging["ms"]
            pages[name]["hanging_adds_ms"] = round(hanging["ms"] - pages[name]["ms"], 1)
    return {
        "tally_lines_per_second": round(options.lines / tallied),
        "totals": KeyTotal.objects.count() + RuleTotal.objects.count(),
        "pages": pages,
    }


def _use_server(port: int) -> None:
    from django.conf import settings
    from django.test import override_settings

    place = {**settings.CACHES["ratelimits"], "LOCATION": f"redis://127.0.0.1:{port}/0"}
    override_settings(CACHES={**settings.CACHES, "ratelimits": place}).enable()


def _measure(client: Any, url: str, rounds: int) -> dict[str, Any]:
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    with CaptureQueriesContext(connection) as queries:  # and the templates are read
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
        # The processor time of this process. Other work on the machine does not make it longer.
        "processor_ms": round(median(processor), 1),
        "queries": count,
        "kb": round(len(response.content) / 1024),
    }


def _claims(results: dict[str, Any]) -> list[report.Claim]:
    claims = []
    for kind, result in results.items():
        for name, page in result["pages"].items():
            claims.append(report.Claim(f"{name}, on {kind}, ms", BOUND, page["ms"]))
            # A tenth of a second more than the timeout, to start threads and to make the page.
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
    tallies = [(kind, result["tally_lines_per_second"], result["totals"]) for kind, result in run["results"].items()]
    return "\n\n".join(
        [
            report.table(heads, rows),
            report.table(("ledger", "tally, lines/s", "rows of totals"), tallies),
            report.claims_table(run["claims"]),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
