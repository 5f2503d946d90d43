"""A table of texts for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

#: The widths of the columns are computed from at most this number of rows, the first ones. So a table of any length
#: needs little memory.
_MEASURED_ROWS = 200


def table(
    headers: Sequence[str], rows: Iterable[Sequence[object]], heading: Callable[[str], str] = str
) -> Iterator[str]:
    """Yield the lines of a table. A column of whole numbers is aligned to the right. `heading` colours the first line.

    Control characters in texts are escaped, since they could move the cursor or hide lines.
    """
    remaining = iter(rows)
    first = list(islice(remaining, _MEASURED_ROWS))
    widths = [max(map(len, map(_text, column))) for column in zip(headers, *first, strict=True)]
    numbers = [bool(first) and isinstance(first[0][index], int) for index in range(len(headers))]
    for line in (headers, *first):
        text = _line(line, widths, numbers)
        yield heading(text) if line is headers else text
    for row in remaining:
        yield _line(row, widths, numbers)


def _line(row: Sequence[object], widths: Sequence[int], numbers: Sequence[bool]) -> str:
    cells = (
        f"{_text(value):>{width}}" if number else f"{_text(value):<{width}}"
        for value, width, number in zip(row, widths, numbers, strict=True)
    )
    return "  ".join(cells).rstrip()


def _text(value: object) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    # `ascii` adds quotation marks, and the slice removes them.
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in str(value))
