from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable
from datetime import datetime
from typing import Any
from xml.etree import ElementTree as ET

import openpyxl
import pytest
from openpyxl.utils.escape import unescape

from ratelimits.billing.reports.exports import FORMATS, cells, workbook
from ratelimits.billing.reports.rows import COLUMNS, PROVISIONAL, WHOLE_NUMBERS, Row
from tests.billing.reports.exports.samples import AWKWARD, ROW, awkward, rows

TEXT, NUMBER = "inlineStr", "n"


def written(found: Iterable[Row]) -> bytes:
    return b"".join(FORMATS["xlsx"].stream(found))


def opened(*found: Row) -> Any:
    return openpyxl.load_workbook(io.BytesIO(written(found)), rich_text=False)


def line_of(sheet: Any, row: int) -> dict[str, Any]:
    return dict(zip(COLUMNS, sheet[row], strict=True))


def test_a_report_is_a_sheet_with_a_frozen_header_that_can_be_filtered() -> None:
    book = opened(ROW, ROW)
    sheet = book.worksheets[0]
    assert sheet.title == "Report"
    assert tuple(cell.value for cell in sheet[1]) == COLUMNS
    assert all(cell.font.bold for cell in sheet[1])
    assert (sheet.freeze_panes, sheet.auto_filter.ref, sheet.max_row) == ("A2", "A1:AC3", 3)


def test_every_column_is_wide_enough_for_its_name() -> None:
    sheet, _totals = opened(ROW).worksheets
    for cell in sheet[1]:
        assert sheet.column_dimensions[cell.column_letter].width > len(cell.value)


def test_numbers_are_numbers_and_moments_are_dates_that_read_as_in_the_csv() -> None:
    line = line_of(opened(ROW._replace(overage_quantity=-3)).worksheets[0], 2)
    assert {name: line[name].value for name in WHOLE_NUMBERS} == {
        name: -3 if name == "overage_quantity" else getattr(ROW, name) for name in WHOLE_NUMBERS
    }
    assert line["limit"].value == 8
    assert line["charge_period_end"].value == datetime(2026, 11, 1, 12, 30)
    assert line["charge_period_end"].number_format == 'yyyy-mm-dd"T"hh:mm:ss"Z"'


def test_all_that_may_be_typed_is_text_and_comes_back_as_it_was() -> None:
    sheet, _totals = opened(*awkward()).worksheets
    for number, text in enumerate(AWKWARD, 2):
        line = line_of(sheet, number)
        for name in ("account", "key", "rule", "plan", "durability_gap"):
            assert (unescape(line[name].value), line[name].data_type) == (text, "s")
            assert line[name].hyperlink is None


def test_nothing_in_the_file_is_a_formula_or_a_link() -> None:
    with zipfile.ZipFile(io.BytesIO(written(awkward()))) as file:
        sheet = ET.fromstring(file.read("xl/worksheets/sheet1.xml"))
        names = file.namelist()
    kinds = {element.tag.partition("}")[2] for element in sheet.iter()}
    assert not kinds & {"f", "hyperlink", "hyperlinks"}
    assert "xl/worksheets/_rels/sheet1.xml.rels" not in names
    assert {element.get("t", NUMBER) for element in sheet.iter() if element.tag.endswith("}c")} == {TEXT, NUMBER}


@pytest.mark.parametrize(
    ("column", "value", "shown"),
    [
        ("consumed_quantity", 10**15 - 1, 999_999_999_999_999),
        ("consumed_quantity", 10**15, "1000000000000000"),
        ("consumed_quantity", -(10**15), "-1000000000000000"),
        ("limit", "0.9", 0.9),
        ("limit", "", None),
        ("limit", "1234567890.123456", "1234567890.123456"),
        ("limit", "=1", "=1"),
        ("charge_period_start", ROW.charge_period_start + 1, "2026-11-01T12:15:00.000001Z"),
        ("key", "no \uffff in XML", "no \N{REPLACEMENT CHARACTER} in XML"),
    ],
)
def test_what_a_spreadsheet_would_round_or_not_open_is_text(column: str, value: Any, shown: Any) -> None:
    assert line_of(opened(ROW._replace(**{column: value})).worksheets[0], 2)[column].value == shown


def test_a_text_too_long_for_a_cell_says_that_it_was_cut() -> None:
    fits, long = "😀" * 16_383, "😀" * 16_384
    sheet, _totals = opened(ROW._replace(durability_gap=fits), ROW._replace(durability_gap=long)).worksheets
    assert line_of(sheet, 2)["durability_gap"].value == fits
    cut = line_of(sheet, 3)["durability_gap"].value
    assert cut.endswith("😀 … (cut: the CSV has all of it)")
    assert len(cut.encode("utf-16-le")) // 2 in (cells.MAX_CELL - 1, cells.MAX_CELL)


def test_what_a_sheet_has_no_room_for_goes_on_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workbook, "SHEET_ROWS", 11)
    book = opened(*rows(25))
    assert [(sheet.title, sheet.max_row) for sheet in book.worksheets] == [
        ("Report", 11),
        ("Totals", 3),
        ("Report 2", 11),
        ("Report 3", 6),
    ]
    lines = [sheet for sheet in book.worksheets if sheet.title != "Totals"]
    keys = [line_of(sheet, row)["key"].value for sheet in lines for row in range(2, sheet.max_row + 1)]
    assert keys == [row.key for row in rows(25)]
    assert all(sheet.freeze_panes == "A2" for sheet in book.worksheets)


def test_a_full_last_sheet_is_followed_by_no_empty_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workbook, "SHEET_ROWS", 11)
    assert opened(*rows(20)).sheetnames == ["Report", "Totals", "Report 2"]


def test_a_report_without_rows_is_its_header() -> None:
    for sheet in opened().worksheets:
        assert (sheet.max_row, sheet.freeze_panes) == (1, "A2")


def totals(*found: Row) -> list[tuple[Any, ...]]:
    """Return the rows of the totals sheets, the header first."""
    sheets = [sheet for sheet in opened(*found).worksheets if sheet.title.startswith("Totals")]
    return [row for sheet in sheets for row in sheet.iter_rows(values_only=True)]


#: The token of the customer of `ROW`.
TOKEN = ROW.report_id.partition(".")[0]


def of(account: str, row: Row = ROW) -> Row:
    """Return a row of another customer, with this account."""
    return row._replace(account=account, report_id=f"{account}.20261101T000000Z")


def test_the_second_sheet_has_the_totals_of_each_account_by_meter() -> None:
    tokens = ROW._replace(meter="tokens", unit="tokens")
    header, *lines = totals(
        of("Acme"),
        ROW._replace(key="api_key:2", refunded_quantity=1, overage_quantity=2),
        tokens,
        ROW._replace(consumed_quantity=-3, included_quantity=-3, overage_quantity=0, charge_category="adjustment"),
        ROW._replace(status=PROVISIONAL),
        of("zoë"),
    )
    names = ("account", "customer", "status", "meter", "unit")
    quantities = ("consumed_quantity", "included_quantity", "overage_quantity", "refunded_quantity")
    assert header == ("row", *names, *quantities)
    assert lines == [
        ("meter", "Acme", "Acme", "final", "requests", "requests", 8, 5, 3, 0),
        ("meter", "acme", TOKEN, "final", "requests", "requests", 5, 2, 2, 1),
        ("meter", "acme", TOKEN, "final", "tokens", "tokens", 8, 5, 3, 0),
        ("meter", "acme", TOKEN, "provisional", "requests", "requests", 8, 5, 3, 0),
        ("meter", "zoë", "zoë", "final", "requests", "requests", 8, 5, 3, 0),
        ("all accounts", None, None, "final", "requests", "requests", 21, 12, 8, 1),
        ("all accounts", None, None, "final", "tokens", "tokens", 8, 5, 3, 0),
        ("all accounts", None, None, "provisional", "requests", "requests", 8, 5, 3, 0),
    ]


def test_totals_of_two_customers_of_one_account_have_their_tokens() -> None:
    other = ROW._replace(report_id="other.20261101T000000Z")
    assert [row[:3] for row in totals(ROW, other)[1:]] == [
        ("meter", "acme", TOKEN),
        ("meter", "acme", "other"),
        ("all accounts", None, None),
    ]


def test_a_total_keeps_every_digit_and_its_account_is_no_formula() -> None:
    large = ROW._replace(account="=1+1", consumed_quantity=10**15 - 1)
    assert totals(large, large)[1][1:7] == ("=1+1", TOKEN, "final", "requests", "requests", str(2 * 10**15 - 2))


def test_totals_that_a_sheet_has_no_room_for_go_on_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workbook, "SHEET_ROWS", 11)
    found = [of(f"a{number:02d}", row) for number, row in enumerate(rows(15))]
    assert opened(*found).sheetnames == ["Report", "Totals", "Report 2", "Totals 2"]
    assert [row[1] for row in totals(*found) if row[0] == "meter"] == [row.account for row in found]


def test_the_file_does_not_say_when_or_by_whom_it_was_made() -> None:
    properties = opened(ROW).properties
    assert properties.created == properties.modified == datetime(1980, 1, 1)
    assert not properties.creator
    with zipfile.ZipFile(io.BytesIO(written([ROW]))) as file:
        assert {entry.date_time[0] for entry in file.infolist()} == {1980}
