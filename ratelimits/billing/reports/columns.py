"""Describe a column of a report: where its values come from, and how they are written and shown.

The columns themselves are the fields of `rows.Row`. Exports, schemas, digests, docs and the admin use these fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any


class ColumnKind(Enum):
    """The kind of a column's values, with its name in the docs."""

    TEXT = "text"
    #: µs since 1970 UTC, written in ISO 8601.
    MOMENT = "moment"
    #: Whole units of the meter. Exports in JSON write them as strings.
    QUANTITY = "quantity"
    COUNT = "count"
    VERSION = "version"
    #: A decimal, or "" if it is unknown.
    DECIMAL = "decimal"


#: Kinds whose values are whole numbers.
NUMBERS = frozenset({ColumnKind.QUANTITY, ColumnKind.COUNT, ColumnKind.VERSION})


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a report.

    To add a column, write it in `rows.Row` after all other columns, with the next version in `since`. Nothing else is
    needed. A finalised report keeps the columns that existed when it was finalised. Its digest and its exports have
    only these columns.

    The values of a column have one of three sources. `from_report` is a function of a report and its status.
    `from_line` is a function of a line's stored fields. Without these functions, the value is the stored line's field
    with the column's name.
    """

    kind: ColumnKind
    #: What the column means, for docs and schemas.
    meaning: str
    #: The number of the first list of columns with this column (see VERSION in reports/rows.py).
    since: int = 1
    from_report: Callable[[Any, str], Any] | None = None
    from_line: Callable[[Any], Any] | None = None
    #: Width in characters in a workbook; None means the width of the column's name.
    width: int | None = None
    #: Whether the admin shows the column in the list of a report's lines.
    listed: bool = False
    #: The JSON Schema of the values; empty means the schema that belongs to the column's kind.
    schema: Mapping[str, Any] = field(default_factory=dict)
    #: In the schema of exports with amounts, these entries replace the entries in `schema`.
    priced_schema: Mapping[str, Any] = field(default_factory=dict)
    #: The name of the field of `rows.Row`. `rows.TABLE` contains the columns with their names.
    name: str = ""

    @property
    def stored(self) -> bool:
        """Return whether a stored line has a field for this column."""
        return self.from_report is None and self.from_line is None

    @property
    def empty(self) -> int | str:
        """Return the value of this column in a row that has no value for it."""
        return 0 if self.kind in NUMBERS or self.kind is ColumnKind.MOMENT else ""


text = partial(Column, ColumnKind.TEXT)
moment = partial(Column, ColumnKind.MOMENT)
quantity = partial(Column, ColumnKind.QUANTITY)
count = partial(Column, ColumnKind.COUNT)
version = partial(Column, ColumnKind.VERSION)
decimal = partial(Column, ColumnKind.DECIMAL)
