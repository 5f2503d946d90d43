"""Report rows as CSV: RFC 4180 with a header line, in UTF-8, lines ended by a line feed, formulae neutralised."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator

from ratelimits.reports.exports.chunks import encoded
from ratelimits.reports.rows import COLUMNS, MOMENTS, QUANTITIES, Row

#: What a spreadsheet takes for the start of a formula.
_FORMULA = frozenset("=+-@\t\r\n")
_TEXTS = [index for index, name in enumerate(COLUMNS) if name not in QUANTITIES | MOMENTS]
_COMMAS = len(COLUMNS) - 1


class _Line:
    """A file that hands a written line back: the writer answers what write() answered."""

    def write(self, text: str) -> str:
        return text


def stream(rows: Iterable[Row]) -> Iterator[bytes]:
    """The rows as a CSV file, in chunks; reads only a little ahead of what it has given away."""
    return encoded(_lines(rows))


def neutral(text: str) -> str:
    """Text that no spreadsheet takes for a formula: what looks like one gets an apostrophe in front."""
    return f"'{text}" if text[:1] in _FORMULA else text


def _lines(rows: Iterable[Row]) -> Iterator[str]:
    # The writer quotes what is in its line end: told of CR LF, it quotes a lone CR too, which readers end lines at.
    write = csv.writer(_Line(), lineterminator="\r\n").writerow
    yield _ended(write(COLUMNS))
    for row in rows:
        values = row.texts()
        for index in _TEXTS:
            if values[index][:1] in _FORMULA:
                values[index] = neutral(values[index])
        line = ",".join(values)
        if line.count(",") == _COMMAS and '"' not in line and "\n" not in line and "\r" not in line:
            yield f"{line}\n"  # what the writer would write, in a third of the time
        else:
            yield _ended(write(values))


def _ended(line: object) -> str:
    return f"{str(line)[:-2]}\n"
