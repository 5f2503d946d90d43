from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import openpyxl
import pytest
import xlsxwriter

from ratelimits.billing.reports.exports import cells
from ratelimits.billing.reports.exports.workbook import SheetColumn, SheetTable, Style, Workbook
from tests.billing.reports.exports.samples import AWKWARD

COLUMNS = [
    SheetColumn("name", cells.text, 20, Style("left", "@")),
    SheetColumn("amount", cells.decimal, 12, Style("right", "General")),
    *(SheetColumn(f"units {number}", cells.number, 12, Style("right", "#,##0")) for number in range(27)),
    SheetColumn("note", cells.text, 40, Style("left", "@", wraps=True)),
]
Values = list[str | int | float | None]


def written(tmp_path: Path, rows: Sequence[tuple[Values, int | None]]) -> bytes:
    path = tmp_path / "written.xlsx"
    with Workbook(tmp_path, "Title") as book:
        table = SheetTable(book, "Sheet", COLUMNS)
        for values, height in rows:
            table.add(values, height)
        book.write(path)
    return path.read_bytes()


def written_by_xlsxwriter(tmp_path: Path, rows: Sequence[tuple[Values, int | None]]) -> bytes:
    """Write the same rows with XlsxWriter alone."""
    path, last = tmp_path / "reference.xlsx", len(COLUMNS) - 1
    book = xlsxwriter.Workbook(path, {"constant_memory": True})
    sheet = book.add_worksheet("Sheet")
    for index, column in enumerate(COLUMNS):
        shown = {"valign": "top", "indent": 1, "align": column.style.align}
        header = book.add_format(shown | {"bold": True, "bottom": 1, "bg_color": "#E8EEF4"})
        style = shown | {"num_format": column.style.number_format, "text_wrap": column.style.wraps}
        sheet.set_column(index, index, column.width, book.add_format(style))
        sheet.write_string(0, index, column.name, header)
    for number, (values, height) in enumerate(rows, 1):
        if height is not None:
            sheet.set_row(number, height)
        for index, value in enumerate(values):
            if isinstance(value, str) and COLUMNS[index].write is cells.decimal and value:
                sheet.write_number(number, index, float(value))
            elif isinstance(value, str) and value:
                sheet.write_string(number, index, value)
            elif isinstance(value, int):
                sheet.write_number(number, index, value)
    sheet.freeze_panes(1, 0)
    sheet.repeat_rows(0)
    sheet.set_landscape()
    sheet.set_paper(9)
    sheet.set_margins(left=0.3, right=0.3, top=0.4, bottom=0.6)
    sheet.fit_to_pages(1, 0)
    sheet.set_footer("&R&P / &N")
    sheet.autofilter(0, 0, len(rows), last)
    sheet.print_area(0, 0, len(rows), last)
    book.close()
    return path.read_bytes()


def parts(book: bytes) -> dict[str, bytes]:
    """Return the files in a workbook, without the one that says when it was made."""
    with zipfile.ZipFile(io.BytesIO(book)) as file:
        return {name: file.read(name) for name in file.namelist() if name != "docProps/core.xml"}


#: XlsxWriter would read a text that begins and ends so as XML.
TEXTS = [text for text in AWKWARD if not text.startswith("<r>")]


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([], id="no row"),
        pytest.param([(["a", "1", *range(27), "b"], None)], id="one row"),
        pytest.param(
            [([text, number, *range(27), text], None) for text, number in product(TEXTS, ("0.9", "-12", "0.000001"))],
            id="texts and decimals",
        ),
        pytest.param(
            [(["a", "1", *([number] * 27), ""], None) for number in (0, -5, 10**15 - 1, 1 - 10**15)], id="numbers"
        ),
        pytest.param(
            [(["a", "1", *range(27), "b"], height) for height in (None, 15, 30, 45, 390, 405, 409)], id="heights"
        ),
        pytest.param([(["a", "1", *([None] * 27), ""], None), (["", "", *range(27), "b"], None)], id="empty cells"),
        pytest.param([([f"row {number}", "1", *range(27), ""], None) for number in range(3_000)], id="many rows"),
    ],
)
def test_rows_are_written_as_xlsxwriter_writes_them(tmp_path: Path, rows: list[tuple[Values, int | None]]) -> None:
    ours, reference = parts(written(tmp_path, rows)), parts(written_by_xlsxwriter(tmp_path, rows))
    assert list(ours) == list(reference)
    assert ours == reference


def test_a_row_is_at_most_as_high_as_excel_allows(tmp_path: Path) -> None:
    high, highest = (parts(written(tmp_path, [(["a", "1", *range(27), "b"], height)])) for height in (9_000, 409))
    assert high == highest


def test_styles_that_xlsxwriter_numbers_in_another_way_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ratelimits.billing.reports.exports.workbook._STYLES_BEFORE", 2)
    with pytest.raises(RuntimeError, match="numbers styles in another way"):
        written(tmp_path, [(["a", "1", *range(27), "b"], None)])


def test_a_value_is_written_in_each_row_that_has_it(tmp_path: Path) -> None:
    names: Values = ["a", "a", "", "a", "b", None, "b", "b"]
    book = written(tmp_path, [([name, "1", *range(27), ""], None) for name in names])
    sheet = openpyxl.load_workbook(io.BytesIO(book)).active
    shown = [cell.value for cell in sheet["A"][1:]]
    assert shown == [name or None for name in names]
    assert sheet.max_row == len(names) + 1
