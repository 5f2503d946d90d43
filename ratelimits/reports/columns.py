"""What a column of a report is: where its values come from, and how they are written and shown.

The columns themselves are the fields of `rows.Row`. Exports, schemas, digests, docs and the admin know no more of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any


class ColumnKind(Enum):
    """What the values of a column are; its value is what docs call it."""

    TEXT = "text"
    #: µs since 1970 UTC, written in ISO 8601.
    MOMENT = "moment"
    #: Whole units of the meter, a string in JSON.
    QUANTITY = "quantity"
    COUNT = "count"
    VERSION = "version"
    #: A decimal, or "" where it is not known.
    DECIMAL = "decimal"


#: Kinds whose values are whole numbers.
NUMBERS = frozenset({ColumnKind.QUANTITY, ColumnKind.COUNT, ColumnKind.VERSION})


@dataclass(frozen=True, slots=True)
class Column:
    """One column. Add a further one after all others, with the next version in `since`: that is all.

    A report has the columns of the version that it was finalised with, in its digest and in each export, for good.
    Values are those of the line's field of this name, or else what `of_report` says of a report and a status, or what
    `of_line` says of a line's stored fields.
    """

    kind: ColumnKind
    meaning: str
    since: int = 1
    of_report: Callable[[Any, str], Any] | None = None
    of_line: Callable[[Any], Any] | None = None
    #: Characters of its width in a workbook; None: as its name needs.
    width: int | None = None
    #: Whether the admin shows it in the list of a report's lines.
    listed: bool = False
    #: What JSON Schema says of its values beside their kind, and instead of that in the second schema.
    schema: Mapping[str, Any] = field(default_factory=dict)
    priced_schema: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""

    @property
    def stored(self) -> bool:
        """Whether a line has a field for it."""
        return self.of_report is None and self.of_line is None

    @property
    def empty(self) -> int | str:
        """The value where a line has none."""
        return 0 if self.kind in NUMBERS or self.kind is ColumnKind.MOMENT else ""


text = partial(Column, ColumnKind.TEXT)
moment = partial(Column, ColumnKind.MOMENT)
quantity = partial(Column, ColumnKind.QUANTITY)
count = partial(Column, ColumnKind.COUNT)
version = partial(Column, ColumnKind.VERSION)
decimal = partial(Column, ColumnKind.DECIMAL)
