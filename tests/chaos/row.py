"""One line of the table in docs/reliability.md, and how the table is written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

_TABLE = re.compile(r"(<!-- faults -->\n).*?(<!-- /faults -->)", re.DOTALL)
_HEAD = (
    "| fault | requests | exceptions | refused by policy | longest, s | above the limit | usage lost | usage doubled"
    " | replies lost | back after, s |\n|---|---|---|---|---|---|---|---|---|---|\n"
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
    lines = "".join(
        f"| {one.fault} | {one.sent:,} | {one.errors} | {one.denied:,} | {one.worst:.2f} | {one.over} | {one.lost}"
        f" | {one.doubled} | {one.unknown} | {one.back:.2f} |\n"
        for one in rows
    )
    text, found = _TABLE.subn(lambda old: old[1] + _HEAD + lines + old[2], page.read_text())
    if not found:
        raise ValueError(f"{page} has no place for the table: it needs <!-- faults --> and <!-- /faults -->")
    page.write_text(text)
