from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from ratelimits.billing.reports.exports import FORMATS
from ratelimits.billing.reports.exports.json import schema
from ratelimits.billing.reports.rows import COLUMNS, PROVISIONAL, Row
from tests.billing.reports.exports import columns
from tests.billing.reports.exports.samples import AWKWARD, DECEMBER, ROW, awkward

VALIDATOR = Draft202012Validator(schema())


def written(*rows: Row) -> dict[str, Any]:
    document = json.loads(b"".join(FORMATS["json"].stream(rows)))
    assert isinstance(document, dict)
    return document


def test_the_schema_is_one_and_has_the_columns_in_their_order() -> None:
    Draft202012Validator.check_schema(schema())
    line = schema()["$defs"]["line"]
    assert tuple(line["properties"]) == tuple(line["required"]) == COLUMNS
    published = Path("ratelimits/billing/reports/schema/report.v1.json")
    assert schema(1) == json.loads(published.read_text())  # what was published stays
    assert all(described["description"] for described in line["properties"].values())


CORRECTION = ROW._replace(
    report_version=2,
    charge_category="adjustment",
    charge_class="correction",
    corrects_line_id=ROW.line_id,
    consumed_quantity=-(10**20),
    overage_quantity=-(10**20),
    limit="0.9",
    durability_gap="restart 2026-11-01T00:00:00.000001Z/2026-11-01T00:00:01Z appendfsync=everysec",
)
ROWS = [
    ROW,
    CORRECTION,
    ROW._replace(status=PROVISIONAL, report_version=0, account="", limit="", rule=""),
    ROW._replace(charge_period_end=DECEMBER - 1),
    *awkward(),
]


def test_what_is_written_validates_against_the_published_schema() -> None:
    VALIDATOR.validate(written(*ROWS))
    VALIDATOR.validate(written())


@pytest.mark.parametrize(
    "change",
    [
        {"consumed_quantity": 8},
        {"consumed_quantity": "8.0000001"},
        {"admitted_count": "8"},
        {"charge_period_end": "2026-11-01T12:30:00+01:00"},
        {"status": "draft"},
        {"further": ""},
    ],
)
def test_what_is_no_such_report_does_not_validate(change: dict[str, Any]) -> None:
    document = written(ROW)
    document["lines"][0] |= change
    with pytest.raises(ValidationError):
        VALIDATOR.validate(document)


def test_quantities_are_strings_that_keep_every_digit_and_counts_are_numbers() -> None:
    (line,) = written(CORRECTION)["lines"]
    assert (line["consumed_quantity"], line["admitted_count"], line["limit"]) == ("-100000000000000000000", 8, "0.9")


def test_texts_come_back_as_they_were() -> None:
    assert [line["account"] for line in written(*awkward())["lines"]] == list(AWKWARD)


def test_the_same_rows_give_the_same_bytes_each_line_on_its_own() -> None:
    first, second = (b"".join(FORMATS["json"].stream(ROWS)) for _ in range(2))
    assert first == second
    assert len(first.splitlines()) == len(ROWS) + 2


def test_the_page_lists_the_columns_of_the_table() -> None:
    page = columns.PAGE.read_text()
    assert columns.table() in page
    assert page == columns.written(page)
