"""Write files: lines of CSV without formulas, texts in chunks of bytes, and files as HTTP responses.

A text in a file gets an apostrophe where a spreadsheet would read it as a formula.
"""

from __future__ import annotations

import csv
import re
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Sequence

from asgiref.sync import sync_to_async
from django.http import StreamingHttpResponse
from django.utils.http import content_disposition_header

#: Minimum number of characters in each chunk except the last: about 150 lines.
SIZE = 65_536
#: Signs that start a formula. Spreadsheets in East Asia also accept the full-width forms of these signs.
_SIGNS = "=+-@\N{FULLWIDTH EQUALS SIGN}\N{FULLWIDTH PLUS SIGN}\N{FULLWIDTH HYPHEN-MINUS}\N{FULLWIDTH COMMERCIAL AT}"
#: Separators of cells in spreadsheets that do not separate cells by commas. They are escaped for a regular expression.
_ENDS = ";|\\t\\r\\n"
_SIGNS_PATTERN = re.escape(_SIGNS)
#: Matches the places where a text needs an apostrophe: the start of the text, if a sign, a tab or a line break follows;
#: and the place after a character of `_ENDS`, if a sign follows there, directly or after spaces and quotes.
_FORMULA = re.compile(f'^(?=[{_SIGNS_PATTERN}\\t\\r\\n])|(?<=[{_ENDS}])(?=[ "]*[{_SIGNS_PATTERN}])')
#: Matches an apostrophe at a place where `neutral` could have put an apostrophe.
_MARK = re.compile(f"(?:^|(?<=[{_ENDS}]))'(?='*[ \"]*[{_SIGNS_PATTERN}\\t\\r\\n])")
#: If a line begins with one of these characters, its first value perhaps needs an apostrophe.
_FIRST = frozenset(_SIGNS + "\t\r\n")
#: A quick test. It matches each line in which a value after the first needs an apostrophe, and few other lines.
_SUSPECT = re.compile(f'[,{_ENDS}][{_SIGNS_PATTERN}\\t\\r\\n "]')
#: For lines in ASCII, this test gives the same result as `_SUSPECT`, but faster.
_SUSPECT_ASCII = re.compile(f'[,{_ENDS}][=+\\-@\\t\\r\\n "]')


def neutral(text: str) -> str:
    """Return a text with an apostrophe before each place where a spreadsheet would see the start of a formula."""
    return _FORMULA.sub("'", text)


def restorable(text: str) -> str:
    """Return a text with the apostrophes of `neutral`. From it, `restored` can make the original text again.

    If the original text already has an apostrophe at such a place, the result has two apostrophes there.
    """
    return neutral(_MARK.sub("''", text))


def restored(text: str) -> str:
    """Return the text from which `restorable` made this text."""
    return _MARK.sub("", text)


class _ReturningFile:
    """A file for `csv.writer`. Its `write` returns the line, so that `writerow` returns the line too."""

    def write(self, text: str) -> str:
        return text


def csv_lines(columns: Sequence[str], without_text: Collection[str], rows: Iterable[list[str]]) -> Iterator[str]:
    """Yield the header, then each row as a line without formulas. The columns `without_text` never contain formulas."""
    text_columns = [index for index, name in enumerate(columns) if name not in without_text]
    separators = len(columns) - 1
    # The writer quotes each value that contains a character of the line terminator. With CR LF, it also quotes values
    # with a single CR. This is needed, because some readers take a single CR as the end of a line.
    write = csv.writer(_ReturningFile(), lineterminator="\r\n").writerow
    yield _with_line_feed(write(columns))
    for values in rows:
        line = ",".join(values)
        quick_test = _SUSPECT_ASCII if line.isascii() else _SUSPECT
        if quick_test.search(line) or line[0] in _FIRST:
            for index in text_columns:
                values[index] = neutral(values[index])
            line = ",".join(values)
        if line.count(",") == separators and '"' not in line and "\n" not in line and "\r" not in line:
            yield f"{line}\n"  # The writer would make the same line, but would take three times as long.
        else:
            yield _with_line_feed(write(values))


def _with_line_feed(line: object) -> str:
    """Return a line of the writer with LF instead of CR LF at its end."""
    return f"{str(line)[:-2]}\n"


def encoded(pieces: Iterable[str]) -> Iterator[bytes]:
    """Yield the pieces in UTF-8, joined into chunks. At most `SIZE` characters and one more piece are in memory."""
    pending: list[str] = []
    length = 0
    for piece in pieces:
        pending.append(piece)
        length += len(piece)
        if length >= SIZE:
            yield "".join(pending).encode()
            pending, length = [], 0
    if pending:
        yield "".join(pending).encode()


class FileDownload(StreamingHttpResponse):
    """A response whose file is written while the response is sent.

    Under ASGI, Django uses the asynchronous iterator. Without it, Django would read all chunks before it sends the
    first one.
    """

    def __init__(self, chunks: Iterable[bytes], content_type: str, file: str) -> None:
        name = content_disposition_header(True, file)
        headers = {"Content-Disposition": name or "attachment"}
        super().__init__(chunks, content_type=content_type, headers=headers)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        chunks: Iterator[bytes] = iter(self)

        def next_chunk() -> bytes | None:
            return next(chunks, None)

        while (chunk := await sync_to_async(next_chunk)()) is not None:
            yield chunk
