"""One line of the table in docs/reliability.md, and how the table is written."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from tests.support import page_tables

_HEADS = (
    "fault",
    "requests",
    "exceptions",
    "refused by policy",
    "longest, s",
    "above the limit",
    "usage lost",
    "usage doubled",
    "replies lost",
    "back after, s",
)


class Row(NamedTuple):
    """What happened under one fault, as a line of the table in docs/reliability.md.

    errors    exceptions, which a view would answer with 5xx
    denied    requests that a rule with the failure policy "deny" refused
    worst     the longest request, in seconds
    over      requests that were admitted above the shared limit
    lost      admitted requests that the ledger does not have
    doubled   requests that the ledger has, but that were neither admitted nor unanswered
    unknown   requests whose reply was lost; the report says how many
    back      seconds from the end of the fault to the last request without a decision
    """

    fault: str
    sent: int
    errors: int
    denied: int
    worst: float
    over: int
    lost: int
    doubled: int
    unknown: int
    back: float


def write(page: Path, rows: list[Row]) -> None:
    """Replace the table of the page by these rows."""
    cells = [
        (
            one.fault,
            f"{one.sent:,}",
            f"{one.errors}",
            f"{one.denied:,}",
            f"{one.worst:.2f}",
            f"{one.over}",
            f"{one.lost}",
            f"{one.doubled}",
            f"{one.unknown}",
            f"{one.back:.2f}",
        )
        for one in rows
    ]
    page_tables.write(page, "faults", _HEADS, cells)
