from __future__ import annotations

import csv
import io
from typing import Any

import pytest

from ratelimits.billing.reports.exports import FORMATS
from ratelimits.billing.reports.rows import COLUMNS, WHOLE_NUMBERS, Row
from tests.billing.reports.exports.samples import AWKWARD, ROW, awkward

HEADER = (
    "report_id,report_version,status,line_id,account,key,meter,unit,charge_category,charge_class,corrects_line_id,"
    "billing_period_start,billing_period_end,charge_period_start,charge_period_end,timezone,consumed_quantity,"
    "included_quantity,overage_quantity,refunded_quantity,admitted_count,denied_count,unknown_count,limit,rule,"
    "rule_version,plan,batch_range,durability_gap\n"
)
LINE = (
    "acme.20261101T000000Z,1,final,0123456789abcdef0123456789abcdef,acme,api_key:1,requests,requests,usage,,,"
    "2026-11-01T00:00:00Z,2026-12-01T00:00:00Z,2026-11-01T12:15:00Z,2026-11-01T12:30:00Z,UTC,8,5,3,0,8,2,0,8,monthly,"
    "42,pro,07:12-45,\n"
)


def written(*rows: Row, name: str = "csv") -> str:
    return b"".join(FORMATS[name].stream(rows)).decode()


def for_spreadsheets(*rows: Row) -> list[dict[str, str]]:
    """Return the lines of the format for spreadsheets, as a program reads them."""
    text = written(*rows, name="csv-spreadsheet")
    return list(csv.DictReader(io.StringIO(text.removeprefix("\ufeff"), newline="")))


def test_a_report_is_a_header_and_a_line_for_each_row_to_the_byte() -> None:
    assert written(ROW, ROW) == HEADER + LINE + LINE


def test_a_report_without_rows_is_its_header() -> None:
    assert written() == HEADER


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠"])
def test_a_text_that_looks_like_a_formula_gets_an_apostrophe(start: str) -> None:
    (read,) = csv.DictReader(io.StringIO(written(ROW._replace(account=f"{start}1+1")), newline=""))
    assert read["account"] == f"'{start}1+1"


def test_no_text_ends_its_line_early_so_that_a_formula_could_follow() -> None:
    line = "a\r=1+1"
    assert written(ROW._replace(account=line)) == HEADER + LINE.replace(",acme,", ',"a\r\'=1+1",')


@pytest.mark.parametrize("separator", [";", "|", "\t"])
@pytest.mark.parametrize("text", ["x{}=1+1", "x{} @SUM(A1)", 'x{}"=1+1"', "x{}－1", "{}{}+1", "x\n=1+1"])
def test_no_cell_is_a_formula_whatever_separator_a_spreadsheet_reads_with(separator: str, text: str) -> None:
    row = ROW._replace(account=text.format(separator, separator), durability_gap="restart; failover")
    lines = csv.reader(io.StringIO(written(row), newline=""), delimiter=separator)
    cells = [cell for line in lines for cell in line]
    assert any("1" in cell or "SUM" in cell for cell in cells)
    assert not [cell for cell in cells if cell.lstrip(' "')[:1] in tuple("=+-@＝＋－＠")]


@pytest.mark.parametrize("text", ["x;y", "a=b", "x; y=1", "user@example.com", "it's", "a+b", "00:2", "1e5", "TRUE"])
def test_a_harmless_text_is_left_as_it_is(text: str) -> None:
    assert written(ROW._replace(account=text, batch_range="00:2")) == HEADER + LINE.replace(
        ",acme,", f",{text},"
    ).replace("07:12-45", "00:2")


@pytest.mark.parametrize(
    "text", ["00:2", "07:12-45", "1e5", "1.50", "2026-11-01", "3 Mar", "MAR1", "5 pm", "$5", "50 %", "TRUE", "false"]
)
def test_for_a_spreadsheet_what_reads_as_a_number_or_a_moment_is_marked_as_text(text: str) -> None:
    (line,) = for_spreadsheets(ROW._replace(batch_range=text, key=text))
    assert (line["batch_range"], line["key"]) == (f"'{text}", f"'{text}")


def test_for_a_spreadsheet_all_else_is_as_in_the_csv() -> None:
    row = ROW._replace(batch_range="")
    assert written(row, name="csv-spreadsheet") == "\ufeff" + written(row)
    formula = ROW._replace(account="=1+1", plan="x;=1")
    (line,) = for_spreadsheets(formula)
    assert (line["account"], line["plan"]) == ("'=1+1", "x;'=1")


def test_a_spreadsheet_keeps_every_digit_of_a_long_number() -> None:
    (line,) = for_spreadsheets(
        ROW._replace(consumed_quantity=10**15, included_quantity=10**15 - 1, overage_quantity=-7),
    )
    assert (line["consumed_quantity"], line["included_quantity"]) == (f"'{10**15}", f"{10**15 - 1}")
    assert line["overage_quantity"] == "-7"


def test_a_number_below_zero_stays_a_number() -> None:
    below: dict[str, Any] = dict.fromkeys(WHOLE_NUMBERS, -7)
    row = ROW._replace(**below)
    (read,) = csv.DictReader(io.StringIO(written(row)))
    assert {read[name] for name in WHOLE_NUMBERS} == {"-7"}


def test_other_texts_come_back_as_they_were() -> None:
    read = list(csv.DictReader(io.StringIO(written(*awkward()), newline="")))
    assert tuple(read[0]) == COLUMNS
    assert [line["key"].replace("'", "") for line in read] == list(AWKWARD)
