"""The tables that can be imported and exported, with their columns; and their CSV files.

A row is written as a line of cells, and a file is read into lines of cells. If a file cannot be read, one sentence says
why.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, NamedTuple

from django.utils.translation import gettext as _

from ratelimits.files import restorable, restored
from ratelimits.models import Account, KeyOverride, Plan, PlanMembership, Rule
from ratelimits.models.versioned import Versioned

#: Maximum size of a file in bytes, and maximum number of its lines below the header.
MAX_BYTES, MAX_LINES = 10 * 1024 * 1024, 100_000
#: Separators that spreadsheets write.
_SEPARATORS = ",;\t"


@dataclass(frozen=True, slots=True)
class PlansAndRules:
    """The plans by slug, and the rules by name, for lines that name them. Rules of several plans can have one name."""

    plans: dict[str, Plan]
    rules: dict[str, list[Rule]]

    @classmethod
    def read(cls, using: str) -> PlansAndRules:
        """Return all plans and rules. This needs two queries."""
        rules: dict[str, list[Rule]] = {}
        for rule in Rule.objects.using(using).select_related("plan"):
            rules.setdefault(rule.name, []).append(rule)
        return cls({plan.slug: plan for plan in Plan.objects.using(using)}, rules)


@dataclass(frozen=True, slots=True)
class FileTable:
    """A table whose rows can be imported and exported.

    columns   the columns, in the order of the file
    identity  the columns that say which row a line is about
    needed    the columns that a file must have
    check     a function that raises ValidationError if a row is not valid. It makes no query
    """

    model: type[Versioned]
    columns: tuple[str, ...]
    identity: tuple[str, ...]
    needed: tuple[str, ...]
    check: Callable[[Any, PlansAndRules], None]

    @property
    def name(self) -> str:
        """Return the name of the model."""
        return str(self.model._meta.model_name)

    @property
    def dated(self) -> bool:
        """Return whether rows have a start and an end. If so, several rows with the same identity are possible."""
        return "valid_from" in self.columns

    @property
    def numbers(self) -> set[str]:
        """Return the columns with numbers and moments. No spreadsheet reads the cells of these columns as formulas."""
        return {"valid_from", "valid_until", "capacity", "rate", "period"} & {*self.columns}


TABLES = {
    table.model: table
    for table in (
        FileTable(
            PlanMembership,
            ("key", "plan", "valid_from", "valid_until"),
            identity=("key",),
            needed=("key", "plan"),
            check=lambda row, known: row.clean_values(),
        ),
        FileTable(
            KeyOverride,
            ("key", "rule", "capacity", "rate", "period", "mode", "valid_from", "valid_until", "reason"),
            identity=("key", "rule"),
            needed=("key", "rule"),
            check=lambda row, known: row.clean_values(known.rules),
        ),
        FileTable(
            Account,
            ("identifier", "name", "plan", "timezone", "billing_anchor"),
            identity=("identifier",),
            needed=("identifier",),
            check=lambda row, known: row.clean(),
        ),
    )
}


def written(value: Any) -> str:
    """Return the text of a cell for a value: the slug for a plan, and "" for None.

    Moments are written in UTC.
    """
    if value is None:
        return ""
    if isinstance(value, Plan):
        return value.slug
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    if isinstance(value, Decimal):
        return f"{value:f}".rstrip("0").rstrip(".") if "." in f"{value:f}" else f"{value:f}"
    return str(value)


def lines(table: FileTable, rows: Iterable[Any]) -> Iterator[list[str]]:
    """Yield the cells of each row, changed so that no spreadsheet reads a cell as a formula.

    An import undoes this change, and makes the same rows again.
    """
    for row in rows:
        yield [restorable(written(getattr(row, name))) for name in table.columns]


class BadFileError(ValueError):
    """Raised if a file cannot be read. The message says what to do."""


class SourceLine(NamedTuple):
    """A line of a file.

    number   the number that a text editor shows for the line
    problem  a sentence if the line has too many or too few cells, else ""
    """

    number: int
    cells: tuple[str, ...]
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Source:
    """A file that was read: its columns in their order, and its lines."""

    columns: tuple[str, ...]
    lines: list[SourceLine]


def too_large(size: int) -> str:
    """Return a sentence if a file of `size` bytes is too large, else ""."""
    if size <= MAX_BYTES:
        return ""
    text = _("This file has %(size)s MB, but a file can have at most %(most)s MB: split it into several files.")
    return text % {"size": f"{size / 2**20:.1f}", "most": MAX_BYTES // 2**20}


def read(raw: bytes, table: FileTable) -> Source:
    """Return the lines of a CSV file. Raise BadFileError if the file cannot be read.

    The file can begin with a byte order mark. The separator of the cells is a comma, a semicolon or a tab: the one that
    the header contains most often. Empty lines are left out.
    """
    if message := too_large(len(raw)):
        raise BadFileError(message)
    text = _decoded(raw)
    header, _newline, _rest = text.partition("\n")
    separator = max(_SEPARATORS, key=header.count)
    records = _records(text, separator)
    _number, names = next(records, (1, []))  # an empty file has no names of columns
    columns = _columns(names, table)
    lines: list[SourceLine] = []
    for number, cells in records:
        if not any(map(str.strip, cells)):
            continue
        if len(lines) == MAX_LINES:
            message = _("This file has more than %(most)s lines: split it into several files.")
            raise BadFileError(message % {"most": f"{MAX_LINES:,}"})
        lines.append(_line(number, cells, columns))
    if not lines:
        raise BadFileError(_("This file has no lines below its header, so there is nothing to import."))
    return Source(columns, lines)


def _decoded(raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = raw.count(b"\n", 0, error.start) + 1
        message = _("Line %(line)s is not written in UTF-8: save the file as “CSV UTF-8”, then choose this file again.")
        raise BadFileError(message % {"line": number}) from error


def _records(text: str, separator: str) -> Iterator[tuple[int, list[str]]]:
    """Yield each record of the file, with the number of the record's first line."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    number = 1
    try:
        for cells in reader:
            yield number, cells
            number = reader.line_num + 1
    except csv.Error as error:
        message = _("Line %(line)s cannot be read (%(error)s): perhaps a quotation mark is missing in this line.")
        raise BadFileError(message % {"line": number, "error": error}) from error


def _columns(names: list[str], table: FileTable) -> tuple[str, ...]:
    columns = tuple(name.strip().casefold() for name in names)
    known = ", ".join(table.columns)
    if not set(columns) & set(table.columns):
        raise BadFileError(_("The first line must name the columns. The columns can be: %(known)s.") % {"known": known})
    for name in columns:
        if name not in table.columns:
            message = _("There is no column “%(name)s”: remove it from the file. The columns can be: %(known)s.")
            raise BadFileError(message % {"name": name, "known": known})
        if columns.count(name) > 1:
            raise BadFileError(_("The file has two columns “%(name)s”: remove one of them.") % {"name": name})
    for name in table.needed:
        if name not in columns:
            raise BadFileError(_("The column “%(name)s” is missing: add it to the file.") % {"name": name})
    return columns


def _line(number: int, cells: list[str], columns: tuple[str, ...]) -> SourceLine:
    if len(cells) == len(columns):
        # An export changes texts that a spreadsheet would read as formulas. `restored` gives the original texts.
        return SourceLine(number, tuple(map(restored, cells)))
    message = _("This line has %(found)s cells, and the header has %(wanted)s: add or remove separators.")
    return SourceLine(number, tuple(cells), message % {"found": len(cells), "wanted": len(columns)})
