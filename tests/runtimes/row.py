"""One line of the table of runtimes in docs/processes.md, and how the table is written."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from tests.support import page_tables

_HEADS = (
    "runtime",
    "processes",
    "asked at once",
    "limit",
    "admitted",
    "connections to Redis",
    "of them shared",
    "answers while a request waits for Redis",
    "refusals counted",
    "admissions in the totals",
    "leases left",
)


class Row(NamedTuple):
    """What was seen under one runtime, as a line of the table.

    processes    processes that answered
    asked        requests that came at once
    limit        the limit that these requests share
    admitted     requests of these that were admitted
    connections  most connections to Redis, of all processes together
    shared       connections that several processes have
    free         whether each process answers while a request of it waits for Redis; None: it can do only one thing
    refusals     refusals that were counted after SIGTERM, and refusals that clients got
    totals       admissions in the process totals after SIGTERM, and admissions that clients got
    leases       leases that are left after SIGTERM
    """

    runtime: str
    processes: int
    asked: int
    limit: int
    admitted: int
    connections: int
    shared: int
    free: bool | None
    refusals: tuple[int, int]
    totals: tuple[int, int]
    leases: int


def write(page: Path, rows: list[Row]) -> None:
    """Replace the table of the page by these rows."""
    cells = [
        (
            one.runtime,
            *(f"{number:,}" for number in (one.processes, one.asked, one.limit, one.admitted)),
            f"{one.connections:,}",
            f"{one.shared:,}",
            {True: "yes", False: "**no**", None: "one request at a time"}[one.free],
            *(f"{seen:,} of {all_of_them:,}" for seen, all_of_them in (one.refusals, one.totals)),
            f"{one.leases:,}",
        )
        for one in rows
    ]
    page_tables.write(page, "runtimes", _HEADS, cells)
