"""Test that each line has its own `line_id`, whatever its key and meter are called."""

from __future__ import annotations

import pytest

from ratelimits.billing.models import Report, ReportLine
from ratelimits.billing.reports.rows import joined_line_id, line_id
from ratelimits.billing.verification import Verification
from tests.support.reports.invoices import close, spend, token
from tests.support.reports.tampering import redigest

pytestmark = pytest.mark.django_db

USAGE = "usage"


@pytest.fixture
def report() -> Report:
    """Make a report of two lines whose meters and keys, joined by a line feed, are the same text."""
    spend("acme", "2026-10-15", 3, meter="pages", key="read\nin")
    spend("acme", "2026-10-15", 4, meter="pages\nread", key="in")
    (report,) = close("2026-11-02")
    return report


def test_no_two_lines_have_one_name_where_line_feeds_are_in_keys_and_meters(report: Report) -> None:
    names = set(report.lines.values_list("line_id", flat=True))
    assert len(names) == 2
    assert list(Verification().findings()) == []


def test_other_lines_keep_their_names() -> None:
    plain = ("acme.20261001T000000Z", USAGE, "requests", "api_key:1", 1, 1)
    assert line_id(*plain) == joined_line_id(*plain) == "2c70fc4b3fe1f08f09cee54b7fb390f4"


def test_a_report_that_was_finalised_with_the_names_of_before_still_holds(report: Report) -> None:
    for line in report.lines.all():
        name = joined_line_id(
            f"{token()}.20261001T000000Z", USAGE, line.meter, line.key, line.rule_id, line.rule_version
        )
        ReportLine.objects.filter(pk=line.pk).update(line_id=name)
    redigest(report)
    assert len(set(report.lines.values_list("line_id", flat=True))) == 1
    assert list(Verification().findings()) == []
    ReportLine.objects.filter(pk=report.lines.earliest("number").pk).update(consumed_quantity=5)
    redigest(report)
    (finding,) = Verification().findings()
    assert "has line_id" in finding
