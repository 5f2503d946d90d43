from __future__ import annotations

import csv
import io
from typing import Any

import pytest

from ratelimits.reports.exports import FORMATS
from ratelimits.reports.rows import COLUMNS, QUANTITIES
from tests.reports.exports.samples import AWKWARD, ROW, awkward

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


def written(*rows: object) -> str:
    return b"".join(FORMATS["csv"].stream(rows)).decode()  # type: ignore[arg-type]


def test_a_report_is_a_header_and_a_line_for_each_row_to_the_byte() -> None:
    assert written(ROW, ROW) == HEADER + LINE + LINE


def test_a_report_without_rows_is_its_header() -> None:
    assert written() == HEADER


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r", "\n"])
def test_a_text_that_looks_like_a_formula_gets_an_apostrophe(start: str) -> None:
    (read,) = csv.DictReader(io.StringIO(written(ROW._replace(account=f"{start}1+1")), newline=""))
    assert read["account"] == f"'{start}1+1"


def test_no_text_ends_its_line_early_so_that_a_formula_could_follow() -> None:
    line = "a\r=1+1"
    assert written(ROW._replace(account=line)) == HEADER + LINE.replace(",acme,", f',"{line}",')


def test_a_number_below_zero_stays_a_number() -> None:
    below: dict[str, Any] = dict.fromkeys(QUANTITIES, -7)
    row = ROW._replace(**below)
    (read,) = csv.DictReader(io.StringIO(written(row)))
    assert {read[name] for name in QUANTITIES} == {"-7"}


def test_other_texts_come_back_as_they_were() -> None:
    read = list(csv.DictReader(io.StringIO(written(*awkward()), newline="")))
    assert tuple(read[0]) == COLUMNS
    assert [line["key"].removeprefix("'") for line in read] == list(AWKWARD)
