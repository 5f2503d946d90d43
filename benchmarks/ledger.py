"""Measure how fast usage is written to the ledger, and how long a report takes, on PostgreSQL and on SQLite.

    python -m benchmarks.ledger [--lines 5000000] [--out DIR]

Usage is written into Redis in portions, in the form in which the script of a decision writes it. One process drains
each sealed portion. Redis uses `appendfsync everysec`. The report is made by the command that people use, in its own
process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.exports import export
from benchmarks.support import report, servers

DATABASES = ("postgres", "sqlite")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ledger", description=__doc__.splitlines()[0])
    parser.add_argument("--lines", type=int, default=5_000_000, help="lines of the ledger at the end")
    parser.add_argument("--portion", type=int, default=500_000, help="lines that are sealed and drained at a time")
    parser.add_argument("--keys", type=int, default=10_000, help="keys with usage; each account has four keys")
    parser.add_argument("--database", choices=DATABASES, action="append", help="default: both")
    parser.add_argument("--out", type=Path, help="directory for the run's JSON")
    parser.add_argument(
        "--process", action="store_true", help=argparse.SUPPRESS
    )  # the command starts itself with this option
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    if options.process:
        print(json.dumps(work(options)))
        return 0
    with servers.redis_server(None) as redis_server:
        machine_info = report.machine(redis_server.url, ("psycopg",))
    results = {}
    for kind in options.database or DATABASES:
        print(f"{kind}: {options.lines:,} lines", file=sys.stderr, flush=True)
        with servers.redis_server(None) as redis_server, servers.database(kind) as url:
            command = [sys.executable, "-m", "benchmarks.ledger", "--process", "--lines", str(options.lines)]
            done = subprocess.run(
                [*command, "--portion", str(options.portion), "--keys", str(options.keys)],
                env={**os.environ, **servers.environment(redis_server, url)},
                stdout=subprocess.PIPE,
                check=False,
            )
            if done.returncode:
                return done.returncode
            results[kind] = json.loads(done.stdout)
    run = report.run_json(
        "ledger", {**machine_info, "load_after": report.load()}, vars(options), _claims(results), results=results
    )
    print(text_of(run))
    report.write(run, options.out)
    return 0


def work(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the drain and the report with one database."""
    servers.start_django({})
    from django.db import connection

    from benchmarks.measured.usage import bare_insert_rate, fill, month
    from ratelimits.usage.ledger.drain import drain
    from ratelimits.usage.ledger.tally import tally
    from ratelimits.usage.models import Line

    portions: list[dict[str, float]] = []
    done = 0
    while done < options.lines:
        count = min(options.portion, options.lines - done)
        fill(done, count, options.keys)
        start = time.perf_counter()
        drained = drain()
        middle = time.perf_counter()
        tally()
        end = time.perf_counter()
        assert drained.lines == count, drained
        done += count
        portions.append({"lines": count, "drain_seconds": middle - start, "tally_seconds": end - middle})
        print(f"{done:,} lines: drained {count / (middle - start):,.0f}/s", file=sys.stderr, flush=True)
    assert Line.objects.count() == options.lines
    bare = bare_insert_rate(min(options.portion, options.lines))
    size = _database_bytes(connection)
    connection.close()
    return {
        "drain_lines_per_second": round(median(result["lines"] / result["drain_seconds"] for result in portions)),
        "tally_lines_per_second": round(median(result["lines"] / result["tally_seconds"] for result in portions)),
        "bare_insert_lines_per_second": round(bare),
        "bytes_per_line": round(size / options.lines),
        "portions": [{name: round(value, 3) for name, value in result.items()} for result in portions],
        "report": _report(month()),
    }


def _database_bytes(connection: Any) -> int:
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute("SELECT pg_database_size(current_database())")
        else:
            cursor.execute("SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()")
        return int(cursor.fetchone()[0])


def _report(month: str) -> dict[str, Any]:
    """Make the report of a month as CSV. Return the seconds, the number of rows, the bytes, and the peak memory."""
    done = export(month, "csv")
    return {"rows": done.pop("lines") - 1, **done}  # without the header line


def _claims(results: dict[str, Any]) -> list[report.Claim]:
    claims = [
        report.Claim(
            f"drain to {kind}, lines/s, × the lines/s of a bare insert",
            bound,
            results[kind]["drain_lines_per_second"] / results[kind]["bare_insert_lines_per_second"],
            least=True,
        )
        for kind, bound in (("postgres", 0.5), ("sqlite", 0.25))
        if kind in results
    ]
    return claims + [
        report.Claim(f"report on {kind}, peak memory in MB", 200, result["report"]["peak_mb"])
        for kind, result in results.items()
    ]


def text_of(run: dict[str, Any]) -> str:
    """Return the run as tables."""
    rows = [
        (
            kind,
            result["drain_lines_per_second"],
            result["tally_lines_per_second"],
            result["bare_insert_lines_per_second"],
            result["bytes_per_line"],
        )
        for kind, result in run["results"].items()
    ]
    reports = [
        (kind, result["report"]["rows"], float(result["report"]["seconds"]), result["report"]["peak_mb"])
        for kind, result in run["results"].items()
    ]
    heads = ("ledger", "drain, lines/s", "tally, lines/s", "bare insert, lines/s", "bytes per line")
    title = f"report over {int(run['options']['lines']):,} lines, as CSV"
    return "\n\n".join(
        [
            report.table(heads, rows),
            report.table((title, "rows", "seconds", "peak memory, MB"), reports),
            report.claims_table(run["claims"]),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
