"""Report rows as CSV (RFC 4180) in UTF-8: with a header line, a line feed at the end of each line, and no formulae.

There are two formats. `stream` is for programs: it changes a text only if a spreadsheet would run it as a formula.
`stream_for_spreadsheets` also marks texts that a spreadsheet would misread, such as a batch range that looks like a
time of day.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain

from ratelimits.formulas import ENDS, SIGNS, neutral
from ratelimits.reports.columns import NUMBERS, ColumnKind
from ratelimits.reports.exports.chunks import encoded
from ratelimits.reports.rows import MOMENTS, QUANTITIES, TABLE, VERSION, Row, names

_FIRST = frozenset(SIGNS + "\t\r\n")
_SIGNS = re.escape(SIGNS)
#: A quick test. It matches each line that needs an apostrophe after its first character, and few other lines.
_SUSPECT = re.compile(f'[,{ENDS}][{_SIGNS}\\t\\r\\n "]')
#: The same test for lines in ASCII; it is faster.
_SUSPECT_ASCII = re.compile(f'[,{ENDS}][=+\\-@\\t\\r\\n "]')
#: Matches texts that a spreadsheet reads as a number, a date or a boolean.
_MISREAD = re.compile(r"(?=\D*\d)(?:[^\W\d_]+[ ./,-]*\d[\W\d]*+|[\W\d]++[^\W\d_]*[\W\d]*+)|true|false", re.IGNORECASE)
#: Spreadsheets keep 15 digits of a number.
_DIGITS = 15
#: The byte order mark: without it Excel reads a file in the encoding of the machine.
_MARK = "\N{ZERO WIDTH NO-BREAK SPACE}"
_NO_TEXTS = QUANTITIES | MOMENTS
_SHOWN = [index for index, column in enumerate(TABLE) if column.kind is ColumnKind.TEXT]
_NUMBERS = [index for index, column in enumerate(TABLE) if column.kind in NUMBERS or column.kind is ColumnKind.DECIMAL]


class _Line:
    """A file for csv.writer. Its write() returns the line, and so writerow() returns the line too."""

    def write(self, text: str) -> str:
        return text


def stream(rows: Iterable[Row], version: int = VERSION) -> Iterator[bytes]:
    """Yield the rows as a CSV file in chunks. Rows are read only shortly before they are written."""
    return encoded(lines(names(version), _NO_TEXTS, cells(rows, version)))


def stream_for_spreadsheets(rows: Iterable[Row], version: int = VERSION) -> Iterator[bytes]:
    """Yield the rows as a CSV file for spreadsheets, with an apostrophe before values that they would misread."""
    return encoded(chain([_MARK], lines(names(version), _NO_TEXTS, map(_shown_as_text, cells(rows, version)))))


def cells(rows: Iterable[Row], version: int) -> Iterator[list[str]]:
    """Yield the texts of rows for a file with the columns of `version`. Columns that a row does not have are empty."""
    count = len(names(version))
    for row in rows:
        texts = row.texts()
        yield texts if len(texts) == count else (texts + [""] * count)[:count]


@lru_cache(maxsize=4096)
def _as_text(text: str) -> str:
    return f"'{text}" if _MISREAD.fullmatch(text) else text


def _shown_as_text(values: list[str]) -> list[str]:
    count = len(values)
    for index in _SHOWN:
        if index < count:
            values[index] = _as_text(values[index])
    for index in _NUMBERS:
        if index < count and len(values[index]) > _DIGITS:
            values[index] = f"'{values[index]}"
    return values


def lines(columns: Sequence[str], no_texts: Collection[str], rows: Iterable[list[str]]) -> Iterator[str]:
    """Yield the header, and each row as a line without formulae. Columns of `no_texts` never contain formulae."""
    texts, commas = [index for index, name in enumerate(columns) if name not in no_texts], len(columns) - 1
    # The writer quotes values that contain a character of its line terminator. With CR LF it also quotes a single CR,
    # which some readers would take as the end of a line.
    write = csv.writer(_Line(), lineterminator="\r\n").writerow
    yield _ended(write(columns))
    for values in rows:
        line = ",".join(values)
        suspect = _SUSPECT_ASCII if line.isascii() else _SUSPECT
        if suspect.search(line) or line[0] in _FIRST:
            for index in texts:
                values[index] = neutral(values[index])
            line = ",".join(values)
        if line.count(",") == commas and '"' not in line and "\n" not in line and "\r" not in line:
            yield f"{line}\n"  # The writer would yield the same, but take three times as long.
        else:
            yield _ended(write(values))


def _ended(line: object) -> str:
    return f"{str(line)[:-2]}\n"
