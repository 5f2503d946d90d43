"""Write report rows as CSV (RFC 4180) in UTF-8, with a header line and with a line feed at the end of each line.

There are two formats. `stream` is for programs. It changes only texts that a spreadsheet would run as a formula.
`stream_for_spreadsheets` also puts an apostrophe before a text that a spreadsheet would misread. For example, a batch
range can look like a time of day.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import chain

from ratelimits.billing.reports.columns import NUMBERS, ColumnKind
from ratelimits.billing.reports.rows import MOMENTS, TABLE, VERSION, WHOLE_NUMBERS, Row, names
from ratelimits.files import csv_lines, encoded

#: Matches texts that a spreadsheet perhaps reads as a number, a date or a boolean: a text with a digit and at most one
#: run of letters, such as "1e5", "12-45" or "3 Mar"; and "true" or "false".
_MISREAD = re.compile(r"(?=\D*\d)(?:[^\W\d_]+[ ./,-]*\d[\W\d]*+|[\W\d]++[^\W\d_]*[\W\d]*+)|true|false", re.IGNORECASE)
#: Spreadsheets keep 15 digits of a number.
_DIGITS = 15
#: The byte order mark. Without this mark, Excel reads a file in the encoding of the machine.
_MARK = "\N{ZERO WIDTH NO-BREAK SPACE}"
#: Columns that never contain a formula, because their values are not texts.
_COLUMNS_WITHOUT_TEXT = WHOLE_NUMBERS | MOMENTS
#: The indexes of the columns with texts.
_TEXTS = [index for index, column in enumerate(TABLE) if column.kind is ColumnKind.TEXT]
#: The indexes of the columns with numbers.
_NUMBERS = [index for index, column in enumerate(TABLE) if column.kind in NUMBERS or column.kind is ColumnKind.DECIMAL]


def stream(rows: Iterable[Row], version: int = VERSION) -> Iterator[bytes]:
    """Yield the rows as a CSV file in chunks. Each row is read shortly before it is written."""
    return encoded(csv_lines(names(version), _COLUMNS_WITHOUT_TEXT, cells(rows, version)))


def stream_for_spreadsheets(rows: Iterable[Row], version: int = VERSION) -> Iterator[bytes]:
    """Yield the rows as a CSV file with an apostrophe before each value that a spreadsheet would misread."""
    return encoded(
        chain([_MARK], csv_lines(names(version), _COLUMNS_WITHOUT_TEXT, map(_marked_as_texts, cells(rows, version))))
    )


def cells(rows: Iterable[Row], version: int) -> Iterator[list[str]]:
    """Yield the texts of each row for a file with the columns of `version`; "" for columns that a row does not have."""
    count = len(names(version))
    for row in rows:
        texts = row.texts()
        yield texts if len(texts) == count else (texts + [""] * count)[:count]


@lru_cache(maxsize=4096)
def _marked_as_text(text: str) -> str:
    """Put an apostrophe before a text that a spreadsheet would misread."""
    return f"'{text}" if _MISREAD.fullmatch(text) else text


def _marked_as_texts(values: list[str]) -> list[str]:
    """Put an apostrophe before each value that a spreadsheet would misread."""
    count = len(values)
    for index in _TEXTS:
        if index < count:
            values[index] = _marked_as_text(values[index])
    for index in _NUMBERS:
        if index < count and len(values[index]) > _DIGITS:
            values[index] = f"'{values[index]}"
    return values
