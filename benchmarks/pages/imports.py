"""Measure how much time, how many queries and how much memory it takes to compare and import a file of memberships.

    python -m benchmarks.pages.imports [--lines 100000] [--rows 100000] [--out DIR]

Half of the lines change an existing row, and half of the lines add a row. The two steps are those of the admin's pages:
to compare the file with the database, and to import it. Each step runs in its own process, so that its memory can be
measured.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.support import report, servers

DATABASES = ("postgres", "sqlite")
STEPS = ("compare", "import")
#: Maximum growth of a step's process in MB.
MEMORY_MB = 100
#: Maximum number of queries for 500 lines.
QUERIES_PER_500 = 20


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pages.imports", description=__doc__.splitlines()[0])
    parser.add_argument("--lines", type=int, default=100_000, help="lines of the file")
    parser.add_argument("--rows", type=int, default=100_000, help="memberships that exist before the import")
    parser.add_argument("--database", choices=DATABASES, action="append", help="default: both")
    parser.add_argument("--out", type=Path, help="directory for the run's JSON")
    parser.add_argument("--process", choices=("fill", *STEPS), help=argparse.SUPPRESS)  # see `_process`
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    if options.process:
        servers.start_django({}, tables=options.process == "fill")
        print(json.dumps(fill(options) if options.process == "fill" else step(options)))
        return 0
    with servers.redis_server(None) as redis_server:
        machine_info = report.machine(redis_server.url, ("psycopg",))
    results: dict[str, dict[str, Any]] = {}
    for kind in options.database or DATABASES:
        print(f"{kind}: {options.lines:,} lines", file=sys.stderr, flush=True)
        with servers.redis_server(None) as redis_server, servers.database(kind) as url:
            environment = {**os.environ, **servers.environment(redis_server, url)}
            _process("fill", options, environment)
            results[kind] = {name: _process(name, options, environment) for name in STEPS}
    run = report.run_json(
        "pages.imports", {**machine_info, "load_after": report.load()}, vars(options), _claims(results), results=results
    )
    print(text_of(run))
    report.write(run, options.out)
    return 0


def _process(what: str, options: argparse.Namespace, environment: dict[str, str]) -> dict[str, Any]:
    """Run the function `fill`, or a step, in a new process, and return its result.

    `what` is "fill", "compare" or "import". The last two are the steps.
    """
    sizes = [f"--{name}={getattr(options, name)}" for name in ("lines", "rows")]
    command = [sys.executable, "-m", "benchmarks.pages.imports", "--process", what, *sizes]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def fill(options: argparse.Namespace) -> dict[str, Any]:
    """Make the plans, and the memberships that exist before the import. Return an empty result."""
    from ratelimits.models import Plan, PlanMembership
    from ratelimits.models.versions import editing

    free, _pro = (Plan.objects.create(name=slug, slug=slug) for slug in ("free", "pro"))
    with editing("default"):
        for first in range(0, options.rows, 5_000):
            keys = range(first, min(first + 5_000, options.rows))
            PlanMembership.objects.bulk_create(PlanMembership(key=f"user:{n}", plan=free) for n in keys)
    return {}


def step(options: argparse.Namespace) -> dict[str, Any]:
    """Compare the file with the database, and in the step "import" also import it. Return the time and other numbers.

    An import compares the file again. So the time and the queries of the step "import" contain this second comparison
    and the writes, but not the first comparison.
    """
    from django.db import connection

    from ratelimits.models import PlanMembership
    from ratelimits.row_files import SeenEffect, effect_of_file, import_rows
    from ratelimits.row_files.tables import TABLES, read

    queries = 0

    def count(execute: Any, *arguments: Any) -> Any:
        nonlocal queries
        queries += 1
        return execute(*arguments)

    table = TABLES[PlanMembership]
    # The users of the first half of the lines have memberships.
    first_user = options.rows - options.lines // 2
    raw = ("key,plan\n" + "".join(f"user:{first_user + n},pro\n" for n in range(options.lines))).encode()
    before = _memory()
    with connection.execute_wrapper(count):
        start = time.perf_counter()
        source = read(raw, table)
        effect, lines = effect_of_file(table, source, "default")
        assert sum(1 for _line in lines) == options.lines
        if options.process == "import":
            queries, start = 0, time.perf_counter()
            seen = SeenEffect(effect.digest, effect.version)
            done = import_rows(table, source, "default", seen, good_only=False, after_portion=lambda new, changed: None)
            assert done.good == options.lines
        seconds = time.perf_counter() - start
    return {
        "seconds": round(seconds, 1),
        "queries_per_500": round(queries * 500 / options.lines, 1),
        "memory_mb": round(_memory() - before),
        "file_kb": round(len(raw) / 1024),
    }


def _memory() -> float:
    """Return the peak memory of this process so far, in MB."""
    units_per_mb = 1024 if sys.platform == "linux" else 1024 * 1024  # Linux counts KB, and macOS counts bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / units_per_mb


def _claims(results: dict[str, dict[str, Any]]) -> list[report.Claim]:
    return [
        claim
        for kind, steps in results.items()
        for name, result in steps.items()
        for claim in (
            report.Claim(f"{name}, on {kind}: memory, MB", MEMORY_MB, result["memory_mb"]),
            report.Claim(f"{name}, on {kind}: queries for 500 lines", QUERIES_PER_500, result["queries_per_500"]),
        )
    ]


def text_of(run: dict[str, Any]) -> str:
    """Return the run as tables."""
    heads = ("step", "s", "queries for 500 lines", "memory, MB")
    columns = ("seconds", "queries_per_500", "memory_mb")
    rows = [
        (f"{name}, on {kind}", *(result[column] for column in columns))
        for kind, steps in run["results"].items()
        for name, result in steps.items()
    ]
    return "\n\n".join([report.table(heads, rows), report.claims_table(run["claims"])])


if __name__ == "__main__":
    sys.exit(main())
