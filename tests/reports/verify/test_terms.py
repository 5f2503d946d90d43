"""Test reports against the history of the accounts' terms."""

from __future__ import annotations

import pytest

from ratelimits.models import Account, KeptPeriod
from ratelimits.verification import Verification
from tests.support.reports.edits import change, edit_at, spend
from tests.support.reports.invoices import close
from tests.support.usage.traffic import at, flow


@pytest.mark.django_db
def test_a_period_that_a_new_name_took_over_is_one_of_its_own(fsync_at_once: None) -> None:
    """The account acme uses a month in India's time zone; then another row named acme, in UTC, gets a new name."""
    with edit_at("2026-01-01"):
        Account.objects.create(identifier="acme", timezone="Asia/Kolkata")
    spend("acme", "2026-10-05", 3)
    flow()
    with edit_at("2026-10-06"):
        Account.objects.get().delete()
    with edit_at("2026-10-06T01:00"):
        Account.objects.create(identifier="acme")
    change("2026-10-06T02:00", identifier="bolt")
    spend("bolt", "2026-10-10", 4)
    assert KeptPeriod.objects.get(account="bolt").start == at("2026-09-30T18:30")
    close("2026-12-02")
    verification = Verification()
    assert list(verification.findings()) == []
    assert verification.checked["bounds of reports"] == 2
