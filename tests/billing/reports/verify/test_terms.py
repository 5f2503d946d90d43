"""Test reports against the history of the accounts' terms."""

from __future__ import annotations

from typing import Any

import pytest

from ratelimits.billing.verification import Verification
from ratelimits.models import Account, FrozenPeriod
from ratelimits.usage.periods import iso
from tests.support.reports.edits import edit_at, spend
from tests.support.reports.invoices import close
from tests.support.usage.traffic import at, flow


@pytest.mark.django_db
def test_periods_from_before_and_after_several_edits_are_those_of_the_history(fsync_at_once: None) -> None:
    """The account acme uses a month in India's time zone; then another row named acme, in UTC, follows."""
    with edit_at("2026-01-01"):
        Account.objects.create(identifier="acme", timezone="Asia/Kolkata")
    spend("acme", "2026-10-05", 3)
    flow()
    with edit_at("2026-10-06"):
        Account.objects.get().delete()
    with edit_at("2026-10-06T01:00"):
        Account.objects.create(identifier="acme")
    with edit_at("2026-10-06T02:00"):
        Account.objects.get().delete()
        Account.objects.create(identifier="bolt")
    spend("bolt", "2026-10-10", 4)
    spend("acme", "2026-11-10", 4)
    reports = sorted(close("2026-12-02"), key=lambda report: report.account)
    assert [(report.account, iso(report.period_start)) for report in reports] == [
        ("acme", "2026-09-30T18:30:00Z"),
        ("acme", "2026-10-31T18:30:00Z"),
        ("bolt", "2026-10-01T00:00:00Z"),
    ]
    verification = Verification()
    assert list(verification.findings()) == []
    assert verification.checked["billing periods"] == 3


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("values", "finding"),
    [
        ({"label": "2026-11"}, "belongs to the month 2026-11, but its last moment is in 2026-10"),
        ({"end": at("2026-10-20")}, "ends when no billing month of its account starts"),
        ({"start": at("2026-10-02")}, "starts when no billing month of its account starts"),
        ({"end": at("2026-12-01"), "label": "2026-11"}, "overlaps the period before it"),
        ({"timezone": "Asia/Tokyo"}, "in UTC, but the row of its billing period says"),
    ],
)
def test_a_frozen_period_that_was_changed_is_named(values: dict[str, Any], finding: str, fsync_at_once: None) -> None:
    spend("acme", "2026-10-05", 3)
    spend("acme", "2026-11-05", 3)
    close("2026-12-02")
    assert list(Verification().findings()) == []
    FrozenPeriod.objects.filter(label="2026-10").update(**values)
    assert any(finding in each for each in Verification().findings())
