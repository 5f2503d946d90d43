"""Test the shares of included quantities, without usage and reports."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from ratelimits.billing.reports.included import IncludedBook
from ratelimits.billing.reports.terms import AccountTerms
from ratelimits.models.accounts.named import named_now
from tests.support.reports.edits import change, plan
from tests.support.reports.invoices import account
from tests.support.usage.traffic import at

pytestmark = pytest.mark.django_db(transaction=True)


def november() -> Mapping[str, int]:
    """Return what November includes, by meter."""
    customer = named_now("default", ["acme"])["acme"]
    book = IncludedBook(AccountTerms("default", [customer]))
    return book.of(customer, at("2026-11-01"), at("2026-12-01"), proration="time").included


def test_half_a_unit_is_rounded_up() -> None:
    account(included=101)
    change("2026-11-16", plan=None)
    assert november() == {"requests": 51}


def test_each_plan_gives_the_share_of_its_time() -> None:
    account(included=100)
    change("2026-11-07", plan=plan("big", 1000))
    assert november() == {"requests": 820}
