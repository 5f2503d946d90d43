"""Write report rows as an Excel workbook, with XlsxWriter in its constant memory mode. Equal rows give equal bytes.

A cell contains a number, a date in UTC or a text, never a formula or a link. If the rows do not fit on a sheet, they
continue on another sheet. One more sheet has the totals.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import wrap
from typing import Any

from ratelimits.pricing.money import ZERO, plus, written
from ratelimits.reports.columns import NUMBERS, Column, ColumnKind
from ratelimits.reports.exports.amounts import MONEY, money
from ratelimits.reports.exports.chunks import SIZE
from ratelimits.reports.periods import SECOND, iso
from ratelimits.reports.rows import COLUMNS, TABLE, VERSION, Charge, Row, columns, names

#: Maximum number of rows of a sheet, including the header.
SHEET_ROWS = 1_048_576
#: Maximum length of a cell, in UTF-16 code units.
CELL = 32_767
_CUT = " … (cut: the CSV has all of it)"
#: Spreadsheets keep 15 digits of a number. A longer number is written as text.
_DIGITS = 15
_DAY = 86_400 * SECOND
#: 1970-01-01 as the number of a day in a spreadsheet.
_EPOCH = 25_569
#: The first and the last moment (µs since 1970 UTC) that all spreadsheets show as the same date.
_FIRST, _LAST = -25_000 * _DAY, 2_932_897 * _DAY
#: The creation date in every file, so that equal rows give equal bytes: the first day that ZIP supports.
_CREATED = datetime(1980, 1, 1)  # noqa: DTZ001

_CELL = {"valign": "top", "indent": 1}
_HEADER = _CELL | {"bold": True, "bottom": 1, "bg_color": "#E8EEF4"}
#: The columns with amounts. Only files with amounts have them.
_MONEY = [Column(ColumnKind.DECIMAL, "", name=name) for name in ("unit_price", "amount", "report_total")]
#: All columns by name.
_COLUMNS_BY_NAME = {
    column.name: column for column in (*TABLE, *_MONEY, Column(ColumnKind.TEXT, "", name="account_name", width=24))
}
#: The number of characters of a durability gap that fit on one line, and the height of a line in points.
_GAP_WIDTH, _LINE_HEIGHT = (_COLUMNS_BY_NAME["durability_gap"].width or 0) - 6, 15
#: The number of A4 pages side by side on which a row is printed, so that its text is large enough.
_PAGES_ACROSS = 4
#: The index of the column that each printed page repeats.
_ON_EVERY_PAGE = COLUMNS.index("key")
#: Columns by which totals are grouped.
_SUBJECT = ("account", "status", "meter", "unit")
#: Columns of which the totals are the sums.
_SUMMED = ("consumed_quantity", "included_quantity", "overage_quantity", "refunded_quantity")
#: Columns by which totals are grouped in files with amounts.
_SUBJECT_WITH_AMOUNTS = ("account", "account_name", "status", "meter", "currency")
#: Characters that XML cannot contain.
_NOT_IN_XML = re.compile("[\ud800-\udfff\ufffe\uffff]")


def stream(rows: Iterable[Row], version: int = VERSION) -> Iterator[bytes]:
    """Yield the rows as a workbook in chunks. The whole workbook is first written to a temporary file.

    Raises ModuleNotFoundError if XlsxWriter is not installed.
    """
    return _streamed(rows, partial(_fill, version=version))


def stream_with_amounts(charges: Iterable[Charge], version: int = VERSION) -> Iterator[bytes]:
    """Yield the charges as a workbook in chunks. One more sheet has the amounts that each account owes."""
    return _streamed(charges, partial(_fill_with_amounts, version=version))


def _streamed(items: Iterable[Any], fill: Callable[..., None]) -> Iterator[bytes]:
    with TemporaryDirectory(prefix="ratelimits-") as directory:
        path = Path(directory, "report.xlsx")
        _write(items, fill, path)
        with path.open("rb") as file:
            while chunk := file.read(SIZE):
                yield chunk


def _write(items: Iterable[Any], fill: Callable[..., None], path: Path) -> None:
    import xlsxwriter

    options = {"constant_memory": True, "tmpdir": str(path.parent), "use_zip64": True}
    book = xlsxwriter.Workbook(str(path), options)
    book.set_properties({"title": "Usage report", "created": _CREATED})
    try:
        fill(book, items)
    except BaseException:
        for sheet in book.worksheets():
            sheet.row_data_fh.close()
        raise
    book.close()


def _fill(book: Any, rows: Iterable[Row], version: int) -> None:
    report = _Table(book, "Report", names(version), _PAGES_ACROSS)
    totals = _Table(book, "Totals", (*_SUBJECT, *_SUMMED))
    for total in _totals(rows, report):
        totals.add(total)
    report.finish()
    totals.finish()


def _fill_with_amounts(book: Any, charges: Iterable[Charge], version: int) -> None:
    report = _Table(book, "Report", (*names(version), *MONEY), _PAGES_ACROSS)
    totals = _Table(book, "Totals", (*_SUBJECT_WITH_AMOUNTS, "amount"))
    for total in _owed(charges, report):
        totals.add(total)
    report.finish()
    totals.finish()


def _owed(charges: Iterable[Charge], report: _Table) -> Iterator[list[str]]:
    """Add the charges to the sheet `report`. After an account's last charge, yield the amounts that the account owes.

    There is a row for each meter, and a row without a meter for the rounding. Only one account is in memory at a time.
    """
    account, sums = "", dict[tuple[str, ...], Decimal]()
    for charge in charges:
        row = charge.row
        if row.account != account:
            yield from ([*subject, written(amount)] for subject, amount in sorted(sums.items()))
            account, sums = row.account, {}
        if charge.currency:
            subject = (account, charge.account_name, row.status, row.meter, charge.currency)
            sums[subject] = plus(sums.get(subject, ZERO), charge.amount or ZERO)
        report.add(
            [*_values(row, len(report.names) - len(MONEY)), *money(charge)],
            _height(row.durability_gap) if len(row.durability_gap) > _GAP_WIDTH else None,
        )
    yield from ([*subject, written(amount)] for subject, amount in sorted(sums.items()))


def _totals(rows: Iterable[Row], report: _Table) -> Iterator[list[object]]:
    """Add the rows to the sheet `report`. After an account's last row, yield the totals of the account.

    The rows are sorted by account, so only one account is in memory at a time.
    """
    account, sums = "", dict[tuple[str, ...], list[int]]()
    for row in rows:
        if row.account != account:
            yield from ([*subject, *added] for subject, added in sorted(sums.items()))
            account, sums = row.account, {}
        added = sums.setdefault((account, row.status, row.meter, row.unit), [0] * len(_SUMMED))
        for index, name in enumerate(_SUMMED):
            added[index] += getattr(row, name)
        report.add(
            _values(row, len(report.names)),
            _height(row.durability_gap) if len(row.durability_gap) > _GAP_WIDTH else None,
        )
    yield from ([*subject, *added] for subject, added in sorted(sums.items()))


def _values(row: Row, count: int) -> Sequence[object]:
    """Return a row's values for the first `count` columns of a sheet; None for columns that the row does not have."""
    in_row = len(columns(row.columns_version))
    return row[:count] if in_row >= count else (*row[:in_row], *(None for _ in range(count - in_row)))


class _Table:
    """A header and rows on a sheet with this title. If the sheet is full, the rows continue on another sheet."""

    def __init__(self, book: Any, title: str, names: Sequence[str], pages_across: int = 1) -> None:
        self._book, self._title, self.names, self._pages_across = book, title, names, pages_across
        self._columns = [_column(name) for name in names]
        self._headers = [book.add_format(_HEADER | {"align": column.align}) for column in self._columns]
        self._styles = [
            book.add_format(
                _CELL | {"align": column.align, "num_format": column.number_format, "text_wrap": column.wraps}
            )
            for column in self._columns
        ]
        self._count = 0
        self._begin()

    def add(self, values: Sequence[object], height: int | None = None) -> None:
        """Write a row. `height` is in points; without it, the row has the height of one line."""
        if self._rows == SHEET_ROWS - 1:
            self.finish()
            self._begin()
        self._rows += 1
        if height is not None:
            self._sheet.set_row(self._rows, height)
        for index, (column, value) in enumerate(zip(self._columns, values, strict=True)):
            if value is not None:
                column.write(self._sheet, self._rows, index, value)

    def finish(self) -> None:
        """Set the filter and the print area of the present sheet to the rows that were written."""
        self._sheet.autofilter(0, 0, self._rows, len(self.names) - 1)
        self._sheet.print_area(0, 0, self._rows, len(self.names) - 1)

    def _begin(self) -> None:
        self._count, self._rows = self._count + 1, 0
        self._sheet = sheet = self._book.add_worksheet(self._title + (f" {self._count}" if self._count > 1 else ""))
        for index, (name, column) in enumerate(zip(self.names, self._columns, strict=True)):
            sheet.set_column(index, index, column.width, self._styles[index])
            sheet.write_string(0, index, name, self._headers[index])
        sheet.freeze_panes(1, 0)
        sheet.repeat_rows(0)
        sheet.set_landscape()
        sheet.set_paper(9)  # A4
        sheet.set_margins(left=0.3, right=0.3, top=0.4, bottom=0.6)
        sheet.fit_to_pages(self._pages_across, 0)
        if self._pages_across > 1:
            sheet.repeat_columns(_ON_EVERY_PAGE)
            sheet.print_across()
        sheet.set_footer("&R&P / &N")


@lru_cache(maxsize=256)
def _height(text: str) -> int:
    """Return the height of a row with a wrapped text, in points. Excel allows at most 409.

    The file must contain the height, because some programs do not compute it.
    """
    lines = wrap(text[: 64 * _GAP_WIDTH], _GAP_WIDTH, break_on_hyphens=False)
    return min(_LINE_HEIGHT * len(lines), 409)


def _text(sheet: Any, row: int, column: int, text: str) -> None:
    if not text:
        return
    text = _NOT_IN_XML.sub("\N{REPLACEMENT CHARACTER}", text)
    if len(text) * 2 > CELL:
        text = _fitting(text)
    if text.startswith("<r>") and text.endswith("</r>"):
        # XlsxWriter's `write_string` would write this text as XML. `write_rich_string` writes it as a text.
        sheet.write_rich_string(row, column, text[0], text[1], text[2:])
    else:
        sheet.write_string(row, column, text)


def _fitting(text: str) -> str:
    """Return the text. If it does not fit in a cell, return its beginning, with a note that it was cut."""
    units = text.encode("utf-16-le")
    if len(units) <= 2 * CELL:
        return text
    return units[: 2 * (CELL - len(_CUT))].decode("utf-16-le", "ignore") + _CUT


def _number(sheet: Any, row: int, column: int, number: int) -> None:
    if abs(number) < 10**_DIGITS:
        sheet.write_number(row, column, number)
    else:
        sheet.write_string(row, column, str(number))


def _decimal(sheet: Any, row: int, column: int, text: str) -> None:
    """Write a decimal from its text. If the text is "", the decimal is not known, and the cell stays empty."""
    digits = text.removeprefix("-").replace(".", "", 1)
    if digits.isascii() and digits.isdecimal() and len(digits) <= _DIGITS:
        sheet.write_number(row, column, float(text))
    else:
        _text(sheet, row, column, text)


def _moment(sheet: Any, row: int, column: int, microseconds: int) -> None:
    if microseconds % SECOND == 0 and _FIRST <= microseconds < _LAST:
        sheet.write_number(row, column, _EPOCH + microseconds / _DAY)
    else:
        sheet.write_string(row, column, iso(microseconds))


@dataclass(frozen=True, slots=True)
class _Column:
    """How the cells of a column are written and shown."""

    write: Callable[[Any, int, int, Any], None]
    #: The width in characters.
    width: int
    align: str = "left"
    #: The number format; "@" means text.
    number_format: str = "@"
    wraps: bool = False


def _column(name: str) -> _Column:
    column = _COLUMNS_BY_NAME.get(name) or Column(ColumnKind.TEXT, "", name=name)
    width = column.width or max(len(name) + 4, 11)
    if column.kind is ColumnKind.MOMENT:
        return _Column(_moment, max(width, 22), number_format='yyyy-mm-dd"T"hh:mm:ss"Z"')
    if column.kind is ColumnKind.DECIMAL:
        return _Column(_decimal, width, "right", "General")
    if column.kind is ColumnKind.VERSION:
        return _Column(_number, width, "right", "0")
    if column.kind in NUMBERS:
        return _Column(_number, width, "right", "#,##0")
    # A long text that does not wrap would be printed on additional pages.
    return _Column(_text, width, wraps=name == "durability_gap")
