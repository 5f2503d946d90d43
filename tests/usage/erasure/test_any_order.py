"""Test erasures between any uses, moves, closings and joined batches: nothing is lost, and no name is left."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ratelimits.models import Account, Customer, Name, Plan, PlanInclusion
from ratelimits.usage.customers.move import NotMovedError, move
from ratelimits.usage.erasure.erase import archives_in, erase
from ratelimits.usage.ledger.retention import archive
from ratelimits.usage.ledger.retention.compact import compact
from ratelimits.usage.models import Line, PeriodUsage, ShardState
from tests.support.reports.invoices import close, spend
from tests.support.reports.searched import found
from tests.support.usage.traffic import at, flow
from tests.usage.erasure.books import manifests
from tests.usage.erasure.conftest import Findings

pytestmark = pytest.mark.django_db(transaction=True)

SECOND = 10**6
#: No text is a part of another word in the tables.
TEXTS = ("t-anna", "t-bert", "t-cleo", "t-dora")


def units() -> dict[int, int]:
    """Return the units of each customer in the totals."""
    totals: dict[int, int] = {}
    for customer, amount in PeriodUsage.objects.values_list("customer", "admitted_units"):
        totals[customer] = totals.get(customer, 0) + amount
    return totals


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 10))])
def test_customers_are_erased_in_any_order(seed: int, tmp_path: Path, findings: Findings) -> None:
    chance = random.Random(seed)
    for number, text in enumerate(TEXTS[:2]):
        plan = Plan.objects.create(name=f"Plan {number}", slug=f"plan-{number}")
        PlanInclusion.objects.create(plan=plan, meter="requests", quantity=chance.randrange(20))
        Account.objects.create(identifier=text, plan=plan)
    given: list[dict[str, Any]] = []
    month = 1
    for number in range(60):
        what, text = chance.random(), chance.choice(TEXTS)
        if what < 0.55:
            day, hour = chance.randrange(1, 28), chance.randrange(24)
            spend(
                text,
                f"2026-{month:02d}-{day:02d}T{hour:02d}:00",
                chance.randrange(1, 9),
                key=f"user:{text}-{number % 3}",
            )
        elif what < 0.7:
            flow()
            with suppress(NotMovedError):
                since = at(f"2026-{month:02d}-{chance.randrange(1, 28):02d}") // SECOND
                move(text, chance.choice([None, *Customer.objects.exclude(salt="")]), since)
        elif what < 0.85 and month < 11:
            month += 1
            close(f"2026-{month:02d}-03")
            given += manifests(f"2026-{month - 1:02d}")
        elif what < 0.93:
            ShardState.objects.update(watermark=at("2027-01-01"))
            list(compact())
            ShardState.objects.update(watermark=at(f"2026-{month:02d}-03"))
        else:
            _erase_one(chance, findings, given, tmp_path)
    flow()
    while customers := _named():
        _erase_one(chance, findings, given, tmp_path, customers)
    assert found(TEXTS) == []


def _named() -> list[Customer]:
    texts = Name.objects.filter(identifier__in=TEXTS).values("customer")
    return list(Customer.objects.filter(pk__in=texts).order_by("pk"))


def _erase_one(
    chance: random.Random, findings: Findings, given: list[dict[str, Any]], directory: Path, customers: Any = None
) -> None:
    flow()
    customers = customers or _named()
    if not customers:
        return
    before, lines = units(), sum(Line.objects.values_list("admitted_units", flat=True))
    chosen = chance.choice(customers)
    erase(chosen, archives_in([directory]))
    assert units() == before
    assert sum(Line.objects.values_list("admitted_units", flat=True)) == lines
    assert findings(given, *archive.files(directory)) == []
