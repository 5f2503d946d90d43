"""How a column of a report is defined: where its values come from, and how they are written and shown.

The columns themselves are the fields of `rows.Row`. Exports, schemas, digests, docs and the admin all use that table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any


class ColumnKind(Enum):
    """The kind of a column's values; each value is the name that the docs use."""

    TEXT = "text"
    #: µs since 1970 UTC, written in ISO 8601.
    MOMENT = "moment"
    #: Whole units of the meter, a string in JSON.
    QUANTITY = "quantity"
    COUNT = "count"
    VERSION = "version"
    #: A decimal, or "" if it is unknown.
    DECIMAL = "decimal"


#: Kinds whose values are whole numbers.
NUMBERS = frozenset({ColumnKind.QUANTITY, ColumnKind.COUNT, ColumnKind.VERSION})


@dataclass(frozen=True, slots=True)
class Column:
    """A column. To add a column, put it after all others, with the next version in `since`; nothing else is needed.

    A finalised report keeps the columns that existed when it was finalised, in its digest and in each export.

    A column's values come from one of three sources: the line's field with the column's name, `of_report` (called with
    a report and a status), or `of_line` (called with a line's stored fields).
    """

    kind: ColumnKind
    meaning: str
    since: int = 1
    of_report: Callable[[Any, str], Any] | None = None
    of_line: Callable[[Any], Any] | None = None
    #: Width in characters in a workbook; None for the width that its name needs.
    width: int | None = None
    #: Whether the admin shows it in the list of a report's lines.
    listed: bool = False
    #: The JSON Schema of its values, if it is not that of its kind; and what the second schema (with amounts) changes.
    schema: Mapping[str, Any] = field(default_factory=dict)
    priced_schema: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""

    @property
    def stored(self) -> bool:
        """Return whether a stored line has a field for this column."""
        return self.of_report is None and self.of_line is None

    @property
    def empty(self) -> int | str:
        """Return the value to write for a line that has no value."""
        return 0 if self.kind in NUMBERS or self.kind is ColumnKind.MOMENT else ""


text = partial(Column, ColumnKind.TEXT)
moment = partial(Column, ColumnKind.MOMENT)
quantity = partial(Column, ColumnKind.QUANTITY)
count = partial(Column, ColumnKind.COUNT)
version = partial(Column, ColumnKind.VERSION)
decimal = partial(Column, ColumnKind.DECIMAL)
