"""Report rows as CSV: RFC 4180 with a header line, in UTF-8, lines ended by a line feed, formulae neutralised.

Two formats: `stream` leaves every harmless text as it is, for programs; `stream_for_spreadsheets` also marks texts that
a spreadsheet would show as something else, such as a batch range that reads as a time of day.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain

from ratelimits.reports.columns import NUMBERS, ColumnKind
from ratelimits.reports.exports.chunks import encoded
from ratelimits.reports.rows import MOMENTS, QUANTITIES, TABLE, VERSION, Row, names

#: Signs that start a formula, also in the full width that East Asian spreadsheets take for the same.
_SIGN = "=+-@\N{FULLWIDTH EQUALS SIGN}\N{FULLWIDTH PLUS SIGN}\N{FULLWIDTH HYPHEN-MINUS}\N{FULLWIDTH COMMERCIAL AT}"
_FIRST = frozenset(_SIGN + "\t\r\n")
_SIGNS = re.escape(_SIGN)
#: What ends a cell within a text, if the spreadsheet reads with another separator than the comma.
_ENDS = ";|\\t\\r\\n"
#: Where a text needs an apostrophe: in front, and after each such end, if a formula would begin there.
_FORMULA = re.compile(f'^(?=[{_SIGNS}\\t\\r\\n])|(?<=[{_ENDS}])(?=[ "]*[{_SIGNS}])')
#: Found in the line of every row with such a text, except one that begins the line, and seldom in others.
_SUSPECT = re.compile(f'[,{_ENDS}][{_SIGNS}\\t\\r\\n "]')
#: The same for ASCII, in less time.
_SUSPECT_ASCII = re.compile(f'[,{_ENDS}][=+\\-@\\t\\r\\n "]')
#: Texts that a spreadsheet takes for a number, a moment or a truth value. They have a digit and at most one word.
_MISREAD = re.compile(r"(?=\D*\d)(?:[^\W\d_]+[ ./,-]*\d[\W\d]*+|[\W\d]++[^\W\d_]*[\W\d]*+)|true|false", re.IGNORECASE)
#: Spreadsheets keep 15 digits of a number.
_DIGITS = 15
#: Excel reads a file without this mark in the encoding of the machine.
_MARK = "\N{ZERO WIDTH NO-BREAK SPACE}"
_NO_TEXTS = QUANTITIES | MOMENTS
_SHOWN = [index for index, column in enumerate(TABLE) if column.kind is ColumnKind.TEXT]
_NUMBERS = [index for index, column in enumerate(TABLE) if column.kind in NUMBERS or column.kind is ColumnKind.DECIMAL]


class _Line:
    """A file that hands a written line back: the writer answers what write() answered."""

    def write(self, text: str) -> str:
        return text


def stream(rows: Iterable[Row], version: int = VERSION) -> Iterator[bytes]:
    """The rows as a CSV file, in chunks; reads only a little ahead of what it has given away."""
    return encoded(lines(names(version), _NO_TEXTS, (cells(row, version) for row in rows)))


def stream_for_spreadsheets(rows: Iterable[Row], version: int = VERSION) -> Iterator[bytes]:
    """The same for people: it begins with a byte order mark, and what a spreadsheet would misread stays text."""
    return encoded(chain([_MARK], lines(names(version), _NO_TEXTS, (_shown_as_text(row, version) for row in rows))))


def cells(row: Row, version: int) -> list[str]:
    """Return the texts of a row for a file of a version's columns: empty for those that the row does not have."""
    texts, count = row.texts(), len(names(version))
    return texts if len(texts) == count else (texts + [""] * count)[:count]


def neutral(text: str) -> str:
    """Text in which no spreadsheet finds a formula: an apostrophe stands where one would begin."""
    return _FORMULA.sub("'", text)


@lru_cache(maxsize=4096)
def _as_text(text: str) -> str:
    return f"'{text}" if _MISREAD.fullmatch(text) else text


def _shown_as_text(row: Row, version: int) -> list[str]:
    values = cells(row, version)
    for index in _SHOWN:
        if index < len(values):
            values[index] = _as_text(values[index])
    for index in _NUMBERS:
        if index < len(values) and len(values[index]) > _DIGITS:
            values[index] = f"'{values[index]}"
    return values


def lines(columns: Sequence[str], no_texts: Collection[str], rows: Iterable[list[str]]) -> Iterator[str]:
    """Yield the header, and a line for each row of values, in which nothing is a formula; `no_texts` cannot be one."""
    texts, commas = [index for index, name in enumerate(columns) if name not in no_texts], len(columns) - 1
    # The writer quotes what is in its line end: told of CR LF, it quotes a lone CR too, which readers end lines at.
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
            yield f"{line}\n"  # what the writer would write, in a third of the time
        else:
            yield _ended(write(values))


def _ended(line: object) -> str:
    return f"{str(line)[:-2]}\n"
