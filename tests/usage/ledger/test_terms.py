"""Test the terms that customers have now: they are those that reports find for this moment."""

from __future__ import annotations

import time

import pytest

from ratelimits.billing.reports.terms import AccountTerms
from ratelimits.models import Account, Plan, PlanInclusion
from ratelimits.models.accounts.named import named_now
from ratelimits.usage.ledger.terms import Terms, TermsBook

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def texts() -> list[str]:
    """Return account texts: with and without a row, on plans with and without included quantities."""
    full, empty = (Plan.objects.create(name=slug, slug=slug) for slug in ("full", "empty"))
    for meter, quantity in (("requests", 100), ("tokens", 5)):
        PlanInclusion.objects.create(plan=full, meter=meter, quantity=quantity)
    Account.objects.create(identifier="acme", plan=full, timezone="Asia/Tokyo", billing_anchor="2026-01-15T00:00")
    Account.objects.create(identifier="bolt", plan=full)
    Account.objects.create(identifier="cord", plan=empty, timezone="Europe/Paris")
    Account.objects.create(identifier="dune")
    return ["acme", "bolt", "cord", "dune", "rowless"]


def test_they_are_those_that_reports_find(texts: list[str]) -> None:
    customers = named_now("default", texts)
    reports, book = AccountTerms("default", customers.values()), TermsBook("default")
    found = book.of(texts)
    assert found == {text: reports.at(customer, None) for text, customer in customers.items()}
    assert found["acme"] == Terms("Asia/Tokyo", "2026-01-15T00:00", "full", {"requests": 100, "tokens": 5})
    now = time.time_ns() // 1000
    for text, customer in customers.items():
        assert found[text].period(now) == reports.at(customer, None).period(now)


def test_what_a_plan_includes_is_read_once(texts: list[str]) -> None:
    book = TermsBook("default")
    customers = named_now("default", texts)
    book.of_customers(customers.values())
    Account.objects.filter(identifier="dune").update(plan=Plan.objects.get(slug="full"))
    PlanInclusion.objects.all().delete()
    assert book.of_customers(customers.values())[customers["dune"].token].included == {"requests": 100, "tokens": 5}


def test_without_bills_nobody_knows_what_plans_include(texts: list[str], no_bills: None) -> None:
    found = TermsBook("default").of(texts)
    assert found["acme"] == Terms("Asia/Tokyo", "2026-01-15T00:00", "full")
    assert found["rowless"] == Terms()
