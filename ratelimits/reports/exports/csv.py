"""Report rows to files: streamed, so that a report of any size is written in bounded memory."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from typing import Protocol

from ratelimits.reports.rows import COLUMNS, QUANTITIES, Row


class TextOut(Protocol):
    """What text can be written to."""

    def write(self, text: str, /) -> object: ...


#: What a spreadsheet takes for the start of a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
_TEXTS = [index for index, name in enumerate(COLUMNS) if name not in QUANTITIES]


def neutral(text: str) -> str:
    """Text that no spreadsheet takes for a formula: what looks like one gets an apostrophe in front."""
    return f"'{text}" if text.startswith(_FORMULA) else text


def write_csv(rows: Iterable[Row], out: TextOut) -> None:
    """RFC 4180 with a header line, in UTF-8, lines ended by a line feed."""
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        values = row.texts()
        for index in _TEXTS:
            values[index] = neutral(values[index])
        writer.writerow(values)


#: Formats by name.
TEXT_FORMATS: dict[str, Callable[[Iterable[Row], TextOut], None]] = {"csv": write_csv}
