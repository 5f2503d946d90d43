"""Fill the tables of docs/performance.md from the JSON files of runs.

    python -m benchmarks.document docs/performance [--page docs/performance.md] [--check]

A table of the page stands between `<!-- name -->` and `<!-- /name -->`. A table stays unchanged if the JSON file of its
benchmark is missing. With `--check`, the exit status is 1 if a promise does not hold.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.identities import growth_at
from benchmarks.pages import addresses
from benchmarks.pairs import draining, importing
from benchmarks.pairs.accounts import PLACES
from benchmarks.pairs.throttles import PAIRS as THROTTLES
from benchmarks.support import plan, server_tables
from benchmarks.support.report import markdown
from benchmarks.tasks import WAYS
from benchmarks.twice import PAIRS
from benchmarks.waiting import outbound

Run = dict[str, Any]


def machine(runs: dict[str, Run]) -> str:
    """Return the machine and the packages of each run."""
    rows = []
    for name, run in sorted(runs.items()):
        machine_info = run["machine"]
        packages = ", ".join(f"{package} {version}" for package, version in machine_info["packages"].items())
        where = f"{machine_info['processor']}, {machine_info['cores']} cores"
        rows.append(
            (f"`{name}`", run["at"], where, machine_info["server"], f"Python {machine_info['python']}, {packages}")
        )
    return markdown(("run", "time (UTC)", "machine", "server", "packages"), rows)


def promises(runs: dict[str, Run]) -> str:
    """Return every promise, its bound and its measured value."""
    return _claims(runs, "claims", ("promise", "bound", "measured", "holds"))


def targets(runs: dict[str, Run]) -> str:
    """Return every target, its bound and its measured value. The targets that are missed come first."""
    return _claims(runs, "targets", ("target", "bound", "measured", "reached"))


def _claims(runs: dict[str, Run], kind: str, columns: Sequence[str]) -> str:
    """Return the table of all promises (`kind` is "claims") or of all targets ("targets")."""
    rows = [
        (claim["claim"], claim["bound"], float(claim["measured"]), "yes" if claim["holds"] else "**no**")
        for _name, run in sorted(runs.items())
        for claim in run.get(kind, [])
    ]
    if kind == "targets":
        rows.sort(key=lambda row: row[-1])  # "**no**" comes before "yes"
    return markdown(columns, rows)


def broken(runs: dict[str, Run]) -> list[str]:
    """Return the promises that do not hold."""
    return [claim["claim"] for _name, run in sorted(runs.items()) for claim in run["claims"] if not claim["holds"]]


def decide(runs: dict[str, Run]) -> str:
    """Return the table of all decisions."""
    run = runs["decide"]
    rows = [
        (result["title"], result["median_us"], result["p99_us"], result["times_ping"], *_times_ours(run, name))
        for name, result in run["results"].items()
    ]
    heads = ("decision", "median, µs", "p99, µs", "× PING", "× our one rule", "× our 3 rules + metering")
    return markdown(heads, rows)


def _times_ours(run: Run, name: str) -> list[float | None]:
    """Return the time of a decision, divided by our time with one rule and by our time with three rules and metering.

    A number is None if its ratio was not measured.
    """
    found = [run["ratios"].get(ours, {}).get(name) for ours in ("engine_one", "engine_three")]
    return [None if ratio is None else 1 / ratio for ratio in found]


def in_place(runs: dict[str, Run]) -> str:
    """Return the table of the time that each kind of limit adds to a request."""
    rows = [
        (result["title"], result["median_us"], result["p99_us"], result.get("adds_us"), result.get("times_ping"))
        for result in runs["decide"]["in_place"].values()
    ]
    return markdown(("request", "median, µs", "p99, µs", "adds, µs", "adds × PING"), rows)


def threads(runs: dict[str, Run]) -> str:
    """Return the table of one process with several threads."""
    throughput = runs["decide"]["throughput"]
    rows = [
        (
            title,
            throughput[f"{name}_per_second"],
            *(f"{throughput[f'{name}_{side}_busy']:.0%}" for side in ("process", "server")),
        )
        for name, title in (
            ("ours", "this app: an idle connection for each decision"),
            ("pooled", "redis-py's client with a pool of connections"),
        )
    ]
    heads = (
        f"one process, {throughput['threads']} threads",
        "decisions/s",
        "use of the client's core",
        "use of the server's core",
    )
    return markdown(heads, rows)


def tasks(runs: dict[str, Run]) -> str:
    """Return the table of one event loop with several tasks."""
    rows = [
        (f"{int(count):,}", title, ways[name]["per_second"], ways[name]["p99_us"], ways[name]["times_ours"])
        for count, ways in runs["tasks"]["results"].items()
        for name, title in WAYS
    ]
    return markdown(("tasks at the same time", "way", "decisions/s", "p99, µs", "× ours"), rows)


def identities(runs: dict[str, Run]) -> str:
    """Return the table of the memory and the connections of a process, if each request comes from a new user."""
    run = runs["identities"]
    rows = [
        (name, *map(float, growth_at(result["grown_mb"])), result["connections"])
        for name, result in run["phases"].items()
    ]
    heads = (
        f"{int(run['options']['identities']):,} requests, each from a new user",
        "growth after a tenth of them, MB",
        "growth after half, MB",
    )
    return markdown((*heads, "growth after all, MB", "connections"), rows)


def end_to_end(runs: dict[str, Run]) -> str:
    """Return the table of requests per second behind gunicorn."""
    run = runs["end_to_end"]
    rows = [(result["title"], result["requests_per_second"], result["share"]) for result in run["results"].values()]
    return markdown((f"view (load by {run['options']['generator']})", "requests/s", "× unlimited"), rows)


def layers(runs: dict[str, Run]) -> str:
    """Return the table of the time that each layer of a request adds."""
    rows = [
        (result["title"], result["median_us"], result["adds_us"], result["min_us"])
        for result in runs["breakdown"]["layers"].values()
    ]
    return markdown(("layer (its time includes the layers above it)", "median, µs", "adds, µs", "smallest, µs"), rows)


def growth(runs: dict[str, Run]) -> str:
    """Return the table of decisions with many rules, overrides and keys."""
    rows = [
        (result["title"], result["median_us"], result["p99_us"], result["times_base"])
        for result in runs["growth"]["results"].values()
    ]
    return markdown(("size", "median, µs", "p99, µs", "× the first line"), rows)


def loads(runs: dict[str, Run]) -> str:
    """Return the table of the time and the memory that a process needs to read all overrides."""
    rows = [
        (result["overrides"], result["seconds"], result["resident_mb"], result["held_mb"])
        for result in runs["growth"]["loads"]
    ]
    return markdown(
        ("overrides", "seconds", "growth of the process, MB", "part of this growth that is in use, MB"), rows
    )


def ledger(runs: dict[str, Run]) -> str:
    """Return the table of the drain and the report."""
    run = runs["ledger"]
    rows = [
        (
            {"postgres": "PostgreSQL", "sqlite": "SQLite"}[kind],
            result["drain_lines_per_second"],
            result["tally_lines_per_second"],
            result["bare_insert_lines_per_second"],
            result["bytes_per_line"],
            float(result["report"]["seconds"]),
            result["report"]["rows"],
            result["report"]["peak_mb"],
        )
        for kind, result in run["results"].items()
    ]
    heads = ("database", "drain, lines/s", "tally, lines/s", "bare insert, lines/s", "bytes per line")
    over = f"report over {int(run['options']['lines']):,} lines, s"
    return markdown((*heads, over, "rows of the report", "peak memory of the report, MB"), rows)


def draining_parts(runs: dict[str, Run]) -> str:
    """Return the table of the parts of a drain."""
    return markdown(draining.HEADS, draining.rows_of(runs["pairs.draining"]))


def _pages(table: str) -> Callable[[dict[str, Run]], str]:
    """Return a function that makes a table of pages, with a row for each page and columns for each database."""
    names = {"postgres": "PostgreSQL", "sqlite": "SQLite"}

    def make(runs: dict[str, Run]) -> str:
        run = runs["pages"]
        pages = addresses.TABLES[table].pages
        # Name of a database -> name of a page -> the numbers of the page.
        found = {names[kind]: result["pages"] for kind, result in run["results"].items()}
        heads = [f"{int(run['options']['lines']):,} lines in the ledger: page"]
        rows: list[list[Any]] = [[page.name] for page in pages]
        for database, numbers in found.items():
            heads += [f"ms, {database}", f"slowest, ms, {database}"]
            for row, page in zip(rows, pages, strict=True):
                row += [float(numbers[page.name]["ms"]), float(numbers[page.name]["slowest_ms"])]
        heads.append("queries")
        first_database = next(iter(found.values()))
        for row, page in zip(rows, pages, strict=True):
            row.append(first_database[page.name]["queries"])
        if any(page.asks for page in pages):
            for database, numbers in found.items():
                heads.append(f"more if Redis does not answer, ms, {database}")
                for row, page in zip(rows, pages, strict=True):
                    row.append(numbers[page.name]["hanging_adds_ms"])
        return markdown(heads, rows)

    return make


def closing(runs: dict[str, Run]) -> str:
    """Return the table of closing a month."""
    run = runs["closing"]
    rows = [
        (
            {"postgres": "PostgreSQL", "sqlite": "SQLite"}[kind],
            result["reports"],
            float(result["seconds"]),
            float(result["processor_seconds"]),
            result["resident_mb"],
            result["grows_mb"],
        )
        for kind, result in run["results"].items()
    ]
    heads = (
        "database",
        "accounts",
        "seconds",
        "processor time of the process, s",
        "memory of the process, MB",
        "growth after the first tenth, MB",
    )
    return markdown(heads, rows)


def verifying(runs: dict[str, Run]) -> str:
    """Return the table of a month's manifest and verification."""
    rows = [
        (
            {"postgres": "PostgreSQL", "sqlite": "SQLite"}[result["database"]],
            f"`ratelimits_{result['what']}`",
            result["reports"],
            float(result["seconds"]),
            float(result["ms_per_report"]),
            float(result["grows_mb"]),
        )
        for result in runs["verifying"]["results"]
    ]
    return markdown(("database", "command", "reports", "seconds", "ms per report", "growth of the process, MB"), rows)


def exports(runs: dict[str, Run]) -> str:
    """Return the table of reports written to files."""
    run = runs["exports"]
    rows = int(run["options"]["rows"])
    table = [
        (
            f"`{name}`",
            float(result["seconds"]),
            round(rows / result["seconds"]),
            result["bytes"] / 1e6,
            result["peak_mb"],
        )
        for name, result in run["results"].items()
    ]
    return markdown(("format", f"{rows:,} rows, s", "rows/s", "file, MB", "peak memory, MB"), table)


def capacity(runs: dict[str, Run]) -> str:
    """Return the table of the resources that different numbers of requests per second need."""
    needed = [plan.needs(rate, runs) for rate in plan.RATES]
    rows = [
        (
            f"{result.rate:,}",
            result.redis_cores,
            result.shards,
            result.web_cores,
            f"{result.keys:,}",
            f"{result.memory_gb:,.1f} GB",
            *(f"{lines:,.0f}" for lines in result.lines_per_second),
            result.compacted_per_day,
        )
        for result in needed
    ]
    intervals = [f"lines/s, sealed every {seconds} s" for seconds in plan.SEAL_INTERVALS]
    return markdown(
        (
            "requests/s",
            "Redis cores",
            "shards",
            "web cores needed for limiting",
            "live keys",
            "memory of the live keys",
            *intervals,
            "ledger rows per day, after compaction",
        ),
        rows,
    )


def _chart(name: str, alternative_text: str) -> Callable[[dict[str, Run]], str]:
    return lambda _runs: f"![{alternative_text}](performance/{name}.svg)"


def waiting(runs: dict[str, Run]) -> str:
    """Return the table of processes that wait for one limit."""
    run = runs["waiting.outbound"]
    rows = [
        ("a Redis list, for comparison" if name == outbound.BARE_LIST else f"`{name}`", *outbound.cells(result))
        for name, result in run["results"].items()
    ]
    return markdown((f"{run['options']['processes']} processes on one limit", *outbound.HEADS), rows)


def limited_tasks(runs: dict[str, Run]) -> str:
    """Return the table of Celery workers that share one limit."""
    both = [runs["waiting.tasks"]["results"], runs["waiting.kills"]["results"]]
    rows = [(name.replace("_", " "), *(result[name] for result in both)) for name in both[0]]
    return markdown(("workers that share one limit", "no worker killed", "ten workers killed"), rows)


def imports(runs: dict[str, Run]) -> str:
    """Return the table of processes that start with and without the app."""
    return markdown(importing.COLUMNS, importing.rows_of(runs["pairs.importing"]))


def twice(runs: dict[str, Run]) -> str:
    """Return the table of the app's own implementations, each compared with a plain implementation."""
    rows = [
        (*PAIRS[name], result["own_us"], result["plain_us"], result["times"])
        for name, result in runs["twice"]["results"].items()
    ]
    return markdown(("own way", "plain way", "own, µs", "plain, µs", "plain ÷ own"), rows)


def throttles(runs: dict[str, Run]) -> str:
    """Return the table of throttles that are compared in pairs."""
    results = runs["pairs.throttles"]["results"]
    rows = [(*THROTTLES[name], result["us"], result["beside_us"], result["times"]) for name, result in results.items()]
    return markdown(("first throttle", "second throttle", "first, µs", "second, µs", "first ÷ second"), rows)


def accounts(runs: dict[str, Run]) -> str:
    """Return the table of decisions whose user and account are in one shard, or in two."""
    results = runs["pairs.accounts"]["results"]
    rows = [(PLACES[place], one["one_us"], one["two_us"], one["times"]) for place, one in results.items()]
    return markdown(("where", "in one shard, µs", "in two shards, µs", "two ÷ one"), rows)


#: Name of a table -> the runs that the table needs, and the function that makes the table.
TABLES: dict[str, tuple[tuple[str, ...], Callable[[dict[str, Run]], str]]] = {
    "machine": ((), machine),
    "promises": ((), promises),
    "targets": ((), targets),
    "decide_chart": (("decide",), _chart("decide", "One decision, as multiples of a raw PING")),
    "decide": (("decide",), decide),
    "in_place": (("decide",), in_place),
    "threads": (("decide",), threads),
    "tasks": (("tasks",), tasks),
    "identities": (("identities",), identities),
    "end_to_end_chart": (("end_to_end",), _chart("end_to_end", "Requests per second behind gunicorn")),
    "end_to_end": (("end_to_end",), end_to_end),
    "server": (("server",), server_tables.server),
    "memory": (("server",), server_tables.memory),
    "layers": (("breakdown",), layers),
    "growth": (("growth",), growth),
    "loads": (("growth",), loads),
    "ledger": (("ledger",), ledger),
    "draining": (("pairs.draining",), draining_parts),
    **{table: (("pages",), _pages(table)) for table in addresses.TABLES},
    "closing": (("closing",), closing),
    "verifying": (("verifying",), verifying),
    "exports": (("exports",), exports),
    "waiting": (("waiting.outbound",), waiting),
    "limited_tasks": (("waiting.tasks", "waiting.kills"), limited_tasks),
    "importing": (("pairs.importing",), imports),
    "twice": (("twice",), twice),
    "algorithms": (("measured.algorithms",), server_tables.algorithms),
    "algorithms_by_server": (("measured.algorithms",), server_tables.algorithms_by_server),
    "server_ratios": (("measured.algorithms",), server_tables.server_ratios),
    "beside": (("pairs.packages",), server_tables.beside),
    "script_parts": (("pairs.parts",), server_tables.script_parts),
    "throttles": (("pairs.throttles",), throttles),
    "accounts": (("pairs.accounts",), accounts),
    "capacity": (("decide", "server"), capacity),
}


def filled(page: str, runs: dict[str, Run]) -> str:
    """Return the page with the tables of these runs filled in. Raise ValueError for an unknown table."""

    def fill(found: re.Match[str]) -> str:
        name = found[1]
        if name not in TABLES:
            raise ValueError(f"there is no table {name!r}: use one of {', '.join(TABLES)}")
        needed, make = TABLES[name]
        if not runs or any(run not in runs for run in needed):
            return found[0]
        return f"<!-- {name} -->\n\n{make(runs)}\n\n<!-- /{name} -->"

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- /\1 -->", fill, page, flags=re.DOTALL)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.document", description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="directory with the JSON files of runs")
    parser.add_argument("--page", type=Path, default=Path("docs/performance.md"))
    parser.add_argument("--check", action="store_true", help="exit with status 1 if a promise does not hold")
    options = parser.parse_args(argv)
    runs = {run["benchmark"]: run for file in options.directory.glob("*.json") if (run := json.loads(file.read_text()))}
    if not runs:
        parser.error(
            f"{options.directory} has no JSON file of a run: make one with `python -m benchmarks.decide --out DIR`"
        )
    options.page.write_text(filled(options.page.read_text(), runs))
    print(f"{options.page}: {', '.join(sorted(runs))}")
    for promise in broken(runs):
        print(f"does not hold: {promise}")
    return 1 if options.check and broken(runs) else 0


if __name__ == "__main__":
    sys.exit(main())
