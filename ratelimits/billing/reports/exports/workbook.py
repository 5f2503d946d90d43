"""Write tables as an Excel workbook. Equal tables give equal bytes.

XlsxWriter makes the workbook with the header of each sheet. The rows below the headers are written here, because this
module writes them many times faster than XlsxWriter. A cell contains a number, a date in UTC or a
text, never a formula or a link.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from shutil import copyfileobj
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, Self
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

from ratelimits.billing.reports.exports import cells
from ratelimits.files import SIZE

#: Maximum number of rows of a sheet, including the header.
SHEET_ROWS = 1_048_576
#: The height of a line and the maximum height of a row, in points.
LINE_HEIGHT, _MAX_HEIGHT = 15, 409
#: The creation date in the properties of every workbook. It is always the same, so that equal rows give equal bytes.
_CREATED = datetime(1980, 1, 1)  # noqa: DTZ001
#: A workbook is a ZIP file. These are the date and the permissions of each file in it. The upper 16 bits of the
#: permissions are those of Unix: a regular file that only its owner can read and write.
_DATE, _PERMISSIONS = (1980, 1, 31, 0, 0, 0), 0o100600 << 16

_CELL = {"valign": "top", "indent": 1}
_HEADER = _CELL | {"bold": True, "bottom": 1, "bg_color": "#E8EEF4"}
#: The number of styles that come before the styles of columns in XlsxWriter's numbering: the default style, and two
#: styles of headers (one is aligned left, and one is aligned right).
_STYLES_BEFORE = 3
#: Matches each `<col>` element of a sheet's XML, with the number of the column's style.
_STYLE_OF_COLUMN = re.compile(rb'<col [^>]*style="(\d+)"')


class Style(NamedTuple):
    """How the cells of a column look."""

    align: str
    #: The number format; "@" means text.
    number_format: str
    wraps: bool = False


class SheetColumn(NamedTuple):
    """A column of a table."""

    name: str
    #: Takes a value. Returns the XML of its cell, without the beginning `<c r="A1" s="1"`; "" if the cell stays empty.
    write: cells.Writer
    #: The width in characters.
    width: int
    style: Style


class Workbook:
    """A workbook that is being made. Until it is written, its rows are in temporary files: about 2 KB for each row.

    Use the workbook as a context manager, which closes these files.
    """

    def __init__(self, directory: Path, title: str) -> None:
        self._directory, self._title = directory, title
        self._sheets: list[_Sheet] = []
        self._styles: dict[Style, int] = {}
        self._files = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()

    def style_number(self, style: Style) -> int:
        """Return the number that the style has in this workbook: XlsxWriter numbers styles by their first use."""
        return self._styles.setdefault(style, _STYLES_BEFORE + len(self._styles))

    def add_sheet(self, table: SheetTable, title: str) -> _Sheet:
        """Add a sheet after the existing sheets."""
        path = self._directory / f"rows-{len(self._sheets)}.xml"
        sheet = _Sheet(table, title, self._files.enter_context(path.open("w+b", buffering=SIZE)))
        self._sheets.append(sheet)
        return sheet

    def write(self, path: Path) -> None:
        """Write the workbook to a file."""
        frame = self._directory / "frame.xlsx"
        self._write_frame(frame)
        sheets = {f"xl/worksheets/sheet{number}.xml": sheet for number, sheet in enumerate(self._sheets, 1)}
        with ZipFile(frame) as source, ZipFile(path, "w") as target:
            for name in source.namelist():
                content, entry = source.read(name), ZipInfo(name, _DATE)
                entry.compress_type, entry.external_attr = ZIP_DEFLATED, _PERMISSIONS
                if name in sheets:
                    sheets[name].copy(content, entry, target)
                else:
                    target.writestr(entry, content)

    def _write_frame(self, path: Path) -> None:
        """Write the workbook with the header of each sheet, but without the rows below it."""
        import xlsxwriter

        # With `constant_memory`, XlsxWriter writes each text into its cell, as this module does. Otherwise it would
        # write all texts into a separate list of the workbook.
        book = xlsxwriter.Workbook(str(path), {"constant_memory": True, "tmpdir": str(self._directory)})
        book.set_properties({"title": self._title, "created": _CREATED})
        for sheet in self._sheets:
            sheet.add_to(book)
        book.close()


class SheetTable:
    """A header and rows on a sheet with this title. If the sheet is full, the rows continue on another sheet.

    A row is printed on `pages_across` A4 pages, side by side. If there are several, each page
    repeats the column with the index `repeated`.
    """

    def __init__(
        self, book: Workbook, title: str, columns: Sequence[SheetColumn], *, pages_across: int = 1, repeated: int = 0
    ) -> None:
        self._book, self._title, self.columns = book, title, columns
        self.pages_across, self.repeated = pages_across, repeated
        self.styles = [book.style_number(column.style) for column in columns]
        self._writers = [column.write for column in columns]
        self._letters = [_letters(index) for index in range(len(columns))]
        #: The values of the last row, and the XML of their cells. Often, most values of the next row are the same.
        self._last: list[Any] = [None] * len(columns)
        self._written = [""] * len(columns)
        self._sheet_count = 1
        self._sheet = book.add_sheet(self, title)

    def add(self, values: Sequence[Any], height: int | None = None) -> None:
        """Write a row. A value None gives an empty cell.

        `height` is in points; if it is None, the row has the height of one line.
        """
        sheet = self._sheet
        if sheet.rows == SHEET_ROWS - 1:
            self._sheet_count += 1
            sheet = self._sheet = self._book.add_sheet(self, f"{self._title} {self._sheet_count}")
        sheet.rows += 1
        last, written = self._last, self._written
        for index, value in enumerate(values):
            if value != last[index]:
                last[index] = value
                content = "" if value is None else self._writers[index](value)
                written[index] = f' s="{self.styles[index]}"{content}' if content else ""
        number = sheet.rows + 1
        row = "".join(
            [f'<c r="{letters}{number}"{xml}' for letters, xml in zip(self._letters, written, strict=True) if xml]
        )
        sheet.file.write(f'<row r="{number}"{_height(height)}>{row}</row>'.encode())


class _Sheet:
    """A sheet of a table. Its file does not contain the header. `rows` is the number of rows in its file."""

    def __init__(self, table: SheetTable, title: str, file: BinaryIO) -> None:
        self._table, self._title, self.file = table, title, file
        self.rows = 0

    def add_to(self, book: Any) -> None:
        """Add the sheet to a workbook of XlsxWriter: its columns, its header, and how it is shown and printed."""
        sheet, table = book.add_worksheet(self._title), self._table
        for index, column in enumerate(table.columns):
            align, number_format, wraps = column.style
            style = book.add_format(_CELL | {"align": align, "num_format": number_format, "text_wrap": wraps})
            sheet.set_column(index, index, column.width, style)
            sheet.write_string(0, index, column.name, book.add_format(_HEADER | {"align": align}))
            if index == 0 and self.rows:
                first_style = style
        if self.rows:
            # Write an empty cell in the last row, so that XlsxWriter knows the sheet's size. `copy` removes this row.
            sheet.write_blank(self.rows, 0, None, first_style)
        sheet.freeze_panes(1, 0)
        sheet.repeat_rows(0)
        sheet.set_landscape()
        sheet.set_paper(9)  # A4
        # Margins are in inches.
        sheet.set_margins(left=0.3, right=0.3, top=0.4, bottom=0.6)
        sheet.fit_to_pages(table.pages_across, 0)  # 0: any number of pages from top to bottom
        if table.pages_across > 1:
            sheet.repeat_columns(table.repeated)
            sheet.print_across()
        sheet.set_footer("&R&P / &N")
        sheet.autofilter(0, 0, self.rows, len(table.columns) - 1)
        sheet.print_area(0, 0, self.rows, len(table.columns) - 1)

    def copy(self, frame: bytes, entry: ZipInfo, target: ZipFile) -> None:
        """Write the sheet to the workbook: insert the rows into `frame`, the XML that XlsxWriter made without rows."""
        if [int(number) for number in _STYLE_OF_COLUMN.findall(frame)] != self._table.styles:
            raise RuntimeError("This version of XlsxWriter numbers styles in another way.")
        end = frame.index(b"</sheetData>")
        # Cut out the row with the empty cell (see `add_to`). In `frame` no other row is after the header.
        start = frame.index(b"<row ", frame.index(b"</row>")) if self.rows else end
        size_of_rows = self.file.tell()  # The rows were written up to this position.
        # ZipFile needs the size before it writes an entry of more than 2 GB.
        entry.file_size = start + size_of_rows + len(frame) - end
        self.file.seek(0)
        with target.open(entry, "w") as file:
            file.write(frame[:start])
            copyfileobj(self.file, file, SIZE)
            file.write(frame[end:])


def _letters(index: int) -> str:
    """Return the letters of the column with this index: A for 0, Z for 25, AA for 26."""
    return (_letters(index // 26 - 1) if index >= 26 else "") + chr(ord("A") + index % 26)


def _height(points: int | None) -> str:
    """Return the XML attributes for the height of a row; "" for the height of one line.

    Excel allows at most 409 points, in steps of a pixel (3/4 point).
    """
    if points is None or points == LINE_HEIGHT:
        return ""
    pixels = int(min(points, _MAX_HEIGHT) * 4 / 3 + 0.5)
    return f' ht="{pixels * 0.75:.16g}" customHeight="1"'
