"""Write report rows as an Excel workbook: a sheet with the rows, and a sheet with the totals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import lru_cache, partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import wrap
from typing import Any

from ratelimits.billing.reports.columns import NUMBERS, Column, ColumnKind
from ratelimits.billing.reports.exports import cells
from ratelimits.billing.reports.exports.amounts import MONEY, money
from ratelimits.billing.reports.exports.workbook import LINE_HEIGHT, SheetColumn, SheetTable, Style, Workbook
from ratelimits.billing.reports.rows import COLUMNS, TABLE, VERSION, Charge, Row, columns, names
from ratelimits.files import SIZE
from ratelimits.money import ZERO, plus, written

_WITH_AMOUNTS = [Column(ColumnKind.DECIMAL, meaning="", name=name) for name in ("unit_price", "amount", "report_total")]
#: The widths of columns with texts that no row of a report has.
_WIDTHS = {"account_name": 24, "customer": 20}
#: The columns by name. A column that is not here contains texts.
_COLUMNS_BY_NAME = {
    column.name: column
    for column in (
        *TABLE,
        *_WITH_AMOUNTS,
        *(Column(ColumnKind.TEXT, meaning="", name=name, width=width) for name, width in _WIDTHS.items()),
    )
}
#: How many characters of a text about gaps fit on one line.
_GAP_WIDTH = (_COLUMNS_BY_NAME["durability_gap"].width or 0) - 6  # less 6, because characters differ in width
#: The number of A4 pages side by side on which a row is printed, so that its text is large enough.
_PAGES_ACROSS = 4
#: The index of the column that each printed page repeats.
_ON_EVERY_PAGE = COLUMNS.index("key")
#: The first column of the totals. It says what a row adds up: the units of a meter, the rounding, everything that an
#: account owes, or the rows of all accounts. A filter on this column shows only totals that can be added up.
_ROW_KIND = "row"
_METER, _ROUNDING, _ACCOUNT, _ALL = "meter", "rounding", "account", "all accounts"
#: Columns by which totals are grouped. `customer` is the token: two customers can have the same account.
_SUBJECT = ("account", "customer", "status", "meter", "unit")
#: Columns that are summed up in the totals.
_SUMMED = ("consumed_quantity", "included_quantity", "overage_quantity", "refunded_quantity")
#: Columns by which totals are grouped in files with amounts.
_SUBJECT_WITH_AMOUNTS = ("account", "customer", "account_name", "status", "meter", "currency")
#: Returns a row's values in the columns `_SUMMED`.
_summed = attrgetter(*_SUMMED)


def stream(rows: Iterable[Row], version: int = VERSION) -> Iterator[bytes]:
    """Yield the rows as a workbook in chunks. The whole workbook is first written to a temporary file.

    `version` is the version of the columns. Raise ModuleNotFoundError if XlsxWriter is not installed.
    """
    return _streamed(rows, partial(_fill, version=version))


def stream_with_amounts(charges: Iterable[Charge], version: int = VERSION) -> Iterator[bytes]:
    """Yield the charges as a workbook in chunks. The sheet with the totals has the amounts that each account owes.

    `version` is the version of the columns. Raise ModuleNotFoundError if XlsxWriter is not installed.
    """
    return _streamed(charges, partial(_fill_with_amounts, version=version))


def _streamed(items: Iterable[Any], fill: Callable[..., None]) -> Iterator[bytes]:
    with TemporaryDirectory(prefix="ratelimits-") as directory:
        path = Path(directory, "report.xlsx")
        with Workbook(path.parent, "Usage report") as book:
            fill(book, items)
            book.write(path)
        with path.open("rb") as file:
            while chunk := file.read(SIZE):
                yield chunk


def _fill(book: Workbook, rows: Iterable[Row], version: int) -> None:
    report = _report_sheet(book, names(version))
    totals = SheetTable(book, "Totals", [_column(name) for name in (_ROW_KIND, *_SUBJECT, *_SUMMED)])
    for total in _totals(rows, report):
        totals.add(total)


def _fill_with_amounts(book: Workbook, charges: Iterable[Charge], version: int) -> None:
    report = _report_sheet(book, (*names(version), *MONEY))
    totals = SheetTable(book, "Totals", [_column(name) for name in (_ROW_KIND, *_SUBJECT_WITH_AMOUNTS, "amount")])
    for total in _owed(charges, report):
        totals.add(total)


def _report_sheet(book: Workbook, names: Iterable[str]) -> SheetTable:
    columns = [_column(name) for name in names]
    return SheetTable(book, "Report", columns, pages_across=_PAGES_ACROSS, repeated=_ON_EVERY_PAGE)


def _owed(charges: Iterable[Charge], report: SheetTable) -> Iterator[list[str]]:
    """Add the charges to the sheet `report`. After a customer's last charge, yield the amounts that the customer owes.

    There is a row for each meter, a row without a meter for the rounding, and a row for what the customer owes. At the
    end there is a row for all customers, for each currency. Only one customer is in memory at a time.
    """
    of_all = dict[tuple[str, str], Decimal]()
    for customer, group in groupby(charges, key=lambda charge: _customer_of(charge.row)):
        account, sums = "", dict[tuple[str, ...], Decimal]()
        for charge in group:
            row = charge.row
            account = row.account  # that of the newest version
            if charge.currency:
                subject = (charge.account_name, row.status, row.meter, charge.currency)
                sums[subject] = plus(sums.get(subject, ZERO), charge.amount or ZERO)
            report.add(
                [*_values(row, len(report.columns) - len(MONEY)), *money(charge)],
                _height(row.durability_gap) if len(row.durability_gap) > _GAP_WIDTH else None,
            )
        yield from _owed_by((account, customer), sums, of_all)
    for (status, currency), amount in sorted(of_all.items()):
        yield [_ALL, "", "", "", status, "", currency, written(amount)]


def _customer_of(row: Row) -> str:
    """Return the token of the customer. Two customers can have the same account, one after the other."""
    return row.report_id.partition(".")[0]


def _owed_by(
    payer: tuple[str, str], sums: Mapping[tuple[str, ...], Decimal], of_all: dict[tuple[str, str], Decimal]
) -> Iterator[list[str]]:
    """Yield the rows of one customer, and add what it owes to the totals of all customers.

    `payer` is the account and the token of the customer.
    """
    owed = dict[tuple[str, str], tuple[str, Decimal]]()
    for subject, amount in sorted(sums.items()):
        name, status, meter, currency = subject
        yield [_METER if meter else _ROUNDING, *payer, *subject, written(amount)]
        _name, before = owed.get((status, currency), ("", ZERO))
        owed[status, currency] = name, plus(before, amount)
    for (status, currency), (name, amount) in owed.items():
        yield [_ACCOUNT, *payer, name, status, "", currency, written(amount)]
        of_all[status, currency] = plus(of_all.get((status, currency), ZERO), amount)


def _totals(rows: Iterable[Row], report: SheetTable) -> Iterator[list[object]]:
    """Add the rows to the sheet `report`. After a customer's last row, yield the customer's totals of each meter.

    At the end, yield the totals of all customers for each meter. The rows are sorted by customer, so only one customer
    is in memory at a time.
    """
    of_all = dict[tuple[str, ...], list[int]]()
    for customer, group in groupby(rows, key=_customer_of):
        account, sums = "", dict[tuple[str, ...], list[int]]()
        for row in group:
            account = row.account  # that of the newest version
            subject = (row.status, row.meter, row.unit)
            for added in (totals.setdefault(subject, [0] * len(_SUMMED)) for totals in (sums, of_all)):
                for index, quantity in enumerate(_summed(row)):
                    added[index] += quantity
            report.add(
                _values(row, len(report.columns)),
                _height(row.durability_gap) if len(row.durability_gap) > _GAP_WIDTH else None,
            )
        yield from ([_METER, account, customer, *subject, *added] for subject, added in sorted(sums.items()))
    yield from ([_ALL, "", "", *subject, *added] for subject, added in sorted(of_all.items()))


def _values(row: Row, count: int) -> Sequence[object]:
    """Return a row's values for the first `count` columns of a sheet; None for columns that the row does not have."""
    in_row = len(columns(row.columns_version))
    return row[:count] if in_row >= count else (*row[:in_row], *(None for _ in range(count - in_row)))


@lru_cache(maxsize=256)
def _height(text: str) -> int:
    """Return the height, in points, of a row with a wrapped text.

    The file must contain the height, because some programs do not compute it. The module `workbook` writes at most
    409 points, because Excel allows no more. 64 lines are higher than this, so the text after 64 lines is not measured.
    """
    return LINE_HEIGHT * len(wrap(text[: 64 * _GAP_WIDTH], _GAP_WIDTH, break_on_hyphens=False))


def _column(name: str) -> SheetColumn:
    column = _COLUMNS_BY_NAME.get(name) or Column(ColumnKind.TEXT, meaning="", name=name)
    width = column.width or max(len(name) + 4, 11)  # The button of the filter needs 4 characters.
    if column.kind is ColumnKind.MOMENT:
        # A moment has 20 characters.
        return SheetColumn(name, cells.moment, max(width, 22), Style("left", 'yyyy-mm-dd"T"hh:mm:ss"Z"'))
    if column.kind is ColumnKind.DECIMAL:
        return SheetColumn(name, cells.decimal, width, Style("right", "General"))
    if column.kind is ColumnKind.VERSION:
        return SheetColumn(name, cells.number, width, Style("right", "0"))
    if column.kind in NUMBERS:
        return SheetColumn(name, cells.number, width, Style("right", "#,##0"))
    # Texts about gaps can be long. Without wrapping, they would be printed on additional pages.
    return SheetColumn(name, cells.text, width, Style("left", "@", wraps=name == "durability_gap"))
