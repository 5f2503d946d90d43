"""Lines of the tables in docs/reliability.md, and how they are written."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from tests.support import page_tables


class Row(NamedTuple):
    """What happened under one fault, as a line of the table "faults".

    rate      requests a second
    errors    exceptions, which a view would answer with 5xx
    denied    requests that a rule with the failure policy "deny" refused
    worst     the longest request, in seconds
    over      requests that were admitted above the shared limit
    under     requests that were refused although the shared limit had permits left
    lost      admitted requests that the ledger does not have
    doubled   requests that the ledger has, but that were neither admitted nor unanswered
    unknown   requests whose reply was lost; the report says how many
    declared  whether a gap is declared, so that reports say that usage may be missing
    back      seconds from the end of the fault to the last request without a decision
    drained   seconds from the end of the fault until a worker drained; None if there was no worker
    """

    fault: str
    sent: int
    rate: float
    errors: int
    denied: int
    worst: float
    over: int
    under: int
    lost: int
    doubled: int
    unknown: int
    declared: bool
    back: float
    drained: float | None = None

    @property
    def cells(self) -> dict[str, str]:
        """Return the cells of the line, by the heads of their columns."""
        return {
            "fault": self.fault,
            "requests": f"{self.sent:,}",
            "a second": f"{self.rate:,.0f}",
            "exceptions": f"{self.errors}",
            "refused by policy": f"{self.denied:,}",
            "longest, s": f"{self.worst:.2f}",
            "above the limit": f"{self.over}",
            "below the limit": f"{self.under}",
            "usage lost": f"{self.lost}",
            "usage doubled": f"{self.doubled}",
            "replies lost": f"{self.unknown}",
            "gap declared": "yes" if self.declared else "no",
            "back after, s": f"{self.back:.2f}",
            "drains after, s": "–" if self.drained is None else f"{self.drained:.1f}",
        }


class Hanging(NamedTuple):
    """What a server that hangs adds to the requests of one thread, as a line of the table "hanging".

    first   how many requests wait for the server
    waited  the longest of them, in seconds
    median, most  the following requests, in ms: the median, and the time that 99 of 100 stay below
    """

    function: str
    first: int
    waited: float
    median: float
    most: float

    @property
    def cells(self) -> dict[str, str]:
        """Return the cells of the line, by the heads of their columns."""
        return {
            "function": f"`{self.function}`",
            "requests that wait": f"{self.first}",
            "longest, s": f"{self.waited:.2f}",
            "later requests, ms: median": f"{self.median:.3f}",
            "99 %": f"{self.most:.3f}",
        }


def write(page: Path, table: str, lines: list[dict[str, str]]) -> None:
    """Write lines into a table of the page. Replace lines with the same first cell, and keep all others."""
    heads = list(lines[0])
    new = {line[heads[0]]: [*line.values()] for line in lines}
    kept = {row[0]: row for row in page_tables.read(page, table) if len(row) == len(heads)}
    page_tables.write(page, table, heads, {**kept, **new}.values())
