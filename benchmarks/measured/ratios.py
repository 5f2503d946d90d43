"""Ratios of server times, each with its bound, and the rows of their table.

A bound is the largest value that is promised or aimed at.
"""

from __future__ import annotations

from typing import Any, NamedTuple

#: Ratios of the times that the server needs to run an algorithm's script. Name -> title and bound.
ALGORITHMS = {
    "of_token_bucket": ("admitted ÷ token bucket", 1.5),
    "refused_of_admitted": ("refused ÷ admitted", 1.1),
    "first_of_admitted": ("first request of a key ÷ admitted", 1.5),
    "shadow_of_enforced": ("in shadow mode ÷ enforced", 1.1),
}


class Ratio(NamedTuple):
    """The time of the commands `one`, divided by the time of the commands `other`."""

    text: str
    one: str
    other: str
    bound: float


#: Ratios of the server's processor times: to read commands, to run the script, and to write replies.
COMMANDS = {
    "three": Ratio("3 rules on one key + metering ÷ the bare script", "engine_three", "bare_three", 1.10),
    "kinds": Ratio("user + account + global + metering ÷ the bare script", "engine_kinds", "bare_kinds", 1.15),
    "refused": Ratio("refusals of 1,000 keys ÷ admitted requests", "refused", "admitted", 1.11),
}


def largest(server: dict[str, Any], ratio: str) -> tuple[str, float]:
    """Return the algorithm with the largest value of a ratio, and this value, from the results of one server."""
    name, one = max(server["algorithms"].items(), key=lambda item: item[1][ratio])
    return name, one[ratio]


def rows_of(results: dict[str, dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return a row for each ratio: its text, the bound, and its value on each server."""
    rows: list[tuple[Any, ...]] = []
    for name, (title, bound) in ALGORITHMS.items():
        worst = [largest(server, name) for server in results.values()]
        rows.append(
            (
                f"largest ratio of an algorithm: {title}",
                f"≤ {bound}",
                *(f"{value:.2f} (`{which}`)" for which, value in worst),
            )
        )
    for name, ratio in COMMANDS.items():
        rows.append((ratio.text, f"≤ {ratio.bound}", *(server["ratios"][name] for server in results.values())))
    return rows
