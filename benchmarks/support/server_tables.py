"""Make the tables of docs/performance.md about the server, and about the algorithms of this app and other packages."""

from __future__ import annotations

from typing import Any

from benchmarks.measured import ratios
from benchmarks.pairs import packages, parts
from benchmarks.support.report import markdown

Run = dict[str, Any]


def server(runs: dict[str, Run]) -> str:
    """Return the table of the server's work for a decision."""
    rows = [
        (result["title"], result["usec_per_call"], result["core_us"], result["per_second"])
        for result in runs["server"]["results"].values()
    ]
    return markdown(("decision", "script, µs", "all of the server's work, µs", "decisions/s of one core"), rows)


def memory(runs: dict[str, Run]) -> str:
    """Return the table of bytes per key."""
    rows = [
        (
            result["title"],
            result["memory_usage"],
            float(result["growth_per_key"]),
            f"{result['growth_per_key']:,.0f} MB",
        )
        for result in runs["server"]["memory"].values()
    ]
    heads = ("state of one user", "`MEMORY USAGE`, bytes", "growth per key, bytes", "per 1,000,000 keys")
    return markdown(heads, rows)


def algorithms(runs: dict[str, Run]) -> str:
    """Return the table of the algorithms on the first server."""
    server = next(iter(runs["measured.algorithms"]["results"].values()))
    rows = [
        (f"`{name}`", result["admitted_us"], *(result[ratio] for ratio in ratios.ALGORITHMS))
        for name, result in server["algorithms"].items()
    ]
    return markdown(("algorithm", "admitted, µs", *(title for title, _bound in ratios.ALGORITHMS.values())), rows)


def algorithms_by_server(runs: dict[str, Run]) -> str:
    """Return the table of the algorithms on all servers."""
    results = runs["measured.algorithms"]["results"]
    names = ("admitted_us", "refused_us", "of_token_bucket")
    rows = [
        (f"`{name}`", *(server["algorithms"][name][column] for column in names for server in results.values()))
        for name in next(iter(results.values()))["algorithms"]
    ]
    titles = ("admitted, µs", "refused, µs", "admitted ÷ token bucket")
    return markdown(("algorithm", *(f"{title}, {server}" for title in titles for server in results)), rows)


def server_ratios(runs: dict[str, Run]) -> str:
    """Return the table of all ratios of server times. Each server has a column."""
    results = runs["measured.algorithms"]["results"]
    return markdown(("ratio", "target", *results), ratios.rows_of(results))


def beside(runs: dict[str, Run]) -> str:
    """Return the table that compares the algorithms with those of other packages."""
    return markdown(packages.COLUMNS, packages.rows_of(runs["pairs.packages"]))


def script_parts(runs: dict[str, Run]) -> str:
    """Return the table of the parts of a script."""
    return markdown(parts.COLUMNS, parts.rows_of(runs["pairs.parts"]))
