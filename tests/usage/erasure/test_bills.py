"""Test that bills are erased by a part of their own: without it, an erasure replaces all names in usage."""

from __future__ import annotations

import pytest

from ratelimits.billing.models import Report, ReportLine
from ratelimits.usage.erasure.erase import erase, preview
from tests.support.reports.invoices import account, close, spend
from tests.support.reports.searched import found
from tests.support.usage.traffic import flow
from tests.usage.erasure.books import KEYS, NAME, NAMES, TEXT, customer

pytestmark = pytest.mark.django_db(transaction=True)
OF_BILLS = {"report lines", "reports", "adjustments"}


@pytest.fixture(autouse=True)
def _usage() -> None:
    account(TEXT, name=NAME)
    for key in KEYS:
        spend(TEXT, "2026-10-15", 5, key=key)
    flow()


def test_without_bills_usage_is_erased_and_nothing_is_said_of_bills(no_bills: None) -> None:
    assert len({place.partition(".")[0] for place in found(NAMES)}) > 3
    said = preview(customer()).rows
    assert OF_BILLS.isdisjoint(said)
    assert said["ledger lines"] == len(KEYS)
    assert said == erase(customer()).rows
    assert found(NAMES) == []


def test_with_bills_reports_are_erased_too() -> None:
    close("2026-11-05")
    owner = customer()
    said = erase(owner).rows
    assert {name: said[name] for name in OF_BILLS} == {"report lines": len(KEYS), "reports": 1, "adjustments": 0}
    assert found(NAMES) == []
    assert Report.objects.get().customer_id == owner.token
    assert not ReportLine.objects.filter(key__in=KEYS).exists()
