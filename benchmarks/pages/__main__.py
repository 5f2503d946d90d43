"""Measure how long pages of the admin take with a large database, and how many queries they make.

    python -m benchmarks.pages [--lines 5000000] [--rules 1000] [--overrides 100000] [--keep FOLDER] [--out DIR]

The ledger contains 30 days. All rules apply to every key. Each rule has its own scope. Django's test client requests
the pages. Then it requests some pages again, in turns: once with Redis, and once with a
server that never answers.

It takes minutes to fill a database. With `--keep`, the databases stay in a folder, and the next run with this folder
uses them again. The ledger of a database ends at the moment when the database was filled, and the tables fit the models
of that moment. So use another folder after a few hours, or if the models have changed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.pages.addresses import PAGES, TABLES
from benchmarks.support import report, servers

DATABASES = ("postgres", "sqlite")
_SIZES = {
    "lines": (5_000_000, "lines of the ledger"),
    "keys": (10_000, "keys with usage"),
    "rules": (1_000, "rules that bill and refuse"),
    "overrides": (100_000, "overrides, each of a different key"),
}
#: Promise: if Redis does not answer, a page takes at most this number of seconds longer. It is the default of the
#: setting TIMEOUT. The status page keeps this promise because it queries the database while it waits for Redis.
HANGING = 0.25


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of a command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pages", description=str(__doc__).splitlines()[0])
    for name, (default, what) in _SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default: {default:,})")
    parser.add_argument("--rounds", type=int, default=11, help="how often each page is requested")
    parser.add_argument("--database", choices=DATABASES, action="append", help="default: both")
    parser.add_argument("--keep", type=Path, help="folder in which the databases stay, for further runs")
    parser.add_argument("--fill-only", action="store_true", help="fill the databases of --keep, and measure nothing")
    parser.add_argument("--out", type=Path, help="directory for the run's JSON")
    parser.add_argument("--process", choices=("fill", "measure"), help=argparse.SUPPRESS)  # see `_process`
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    if options.process:
        print(json.dumps(_work(options)))
        return 0
    with servers.redis_server(None) as redis_server:
        machine_info = report.machine(redis_server.url, ("psycopg",))
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="ratelimits-benchmark-") as temporary:
        for kind in options.database or DATABASES:
            folder = (options.keep or Path(temporary)) / kind
            results[kind] = _fill_and_measure(kind, folder.resolve(), options)
    if options.fill_only:
        return 0
    machine_info["load_after"] = report.load()
    asked = {name: getattr(options, name) for name in (*_SIZES, "rounds", "database")}
    run = report.run_json("pages", machine_info, asked, _claims(results), results=results)
    print(text_of(run))
    report.write(run, options.out)
    return 0


def _fill_and_measure(kind: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Fill the database in this folder if it is not filled yet. Without --fill-only, also measure the pages."""
    sizes, filled_file = {name: getattr(options, name) for name in _SIZES}, folder / "filled.json"
    if filled_file.exists() and json.loads(filled_file.read_text())["sizes"] != sizes:
        raise SystemExit(f"{folder} has a database of another size: use another folder")
    folder.mkdir(parents=True, exist_ok=True)
    with servers.redis_server(None) as redis_server, servers.database(kind, folder) as url:
        environment = {**os.environ, **servers.environment(redis_server, url)}
        environment["DJANGO_SETTINGS_MODULE"] = "benchmarks.pages.settings"
        if not filled_file.exists():
            start = time.perf_counter()
            rows = _process("fill", options, environment)
            seconds = round(time.perf_counter() - start)
            print(f"{kind}: filled in {seconds} s", file=sys.stderr, flush=True)
            filled_file.write_text(json.dumps({"sizes": sizes, "rows": rows, "seconds": seconds}))
        filled = json.loads(filled_file.read_text())
        pages = {} if options.fill_only else _process("measure", options, environment)
    return {"rows": filled["rows"], "filled in, s": filled["seconds"], "pages": pages}


def _process(what: str, options: argparse.Namespace, environment: dict[str, str]) -> dict[str, Any]:
    """Do the work of `_work` ("fill" or "measure") in a new process, and return its result."""
    sizes = [f"--{name}={getattr(options, name)}" for name in (*_SIZES, "rounds")]
    command = [sys.executable, "-m", "benchmarks.pages", "--process", what, *sizes]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _work(options: argparse.Namespace) -> dict[str, Any]:
    """Fill the database or measure the pages, in this process."""
    servers.start_django({}, tables=options.process == "fill")
    if options.process == "fill":
        from benchmarks.pages.filling import Sizes, fill

        return fill(Sizes(**{name: getattr(options, name) for name in _SIZES}))
    from benchmarks.pages.measuring import measure

    return {name: asdict(page) for name, page in measure(PAGES, options.rounds).items()}


def _claims(results: dict[str, Any]) -> list[report.Claim]:
    """Return the promises about each table of pages. Each promise is about the slowest page of the table."""
    claims = []
    for kind, result in results.items():
        for table in TABLES.values():
            times = {page.name: result["pages"][page.name]["ms"] for page in table.pages}
            slowest = max(times, key=lambda name: times[name])
            claims.append(
                report.Claim(f"{table.about}, on {kind}: the slowest page ({slowest}), ms", table.bound, times[slowest])
            )
            hanging = [result["pages"][page.name]["hanging_adds_ms"] for page in table.pages if page.asks]
            if hanging:
                text = f"{table.about}, on {kind}: most time that a hanging Redis adds, s"
                claims.append(report.Claim(text, HANGING, max(hanging) / 1000))
    return claims


def text_of(run: dict[str, Any]) -> str:
    """Return the run as tables."""
    heads = ("ms", "slowest, ms", "processor, ms", "time of queries, ms", "queries", "KB", "hanging Redis adds, ms")
    columns = ("ms", "slowest_ms", "processor_ms", "queries_ms", "queries", "kb", "hanging_adds_ms")
    tables = [
        report.table(
            (f"{table.about}, on {kind}", *heads),
            [(page.name, *(result["pages"][page.name][column] for column in columns)) for page in table.pages],
        )
        for kind, result in run["results"].items()
        for table in TABLES.values()
    ]
    names = list(next(iter(run["results"].values()))["rows"])
    rows = [(kind, *(result["rows"][name] for name in names)) for kind, result in run["results"].items()]
    return "\n\n".join([*tables, report.table(("rows", *names), rows), report.claims_table(run["claims"])])


if __name__ == "__main__":
    sys.exit(main())
