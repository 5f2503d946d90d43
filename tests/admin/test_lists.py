"""Test that a list in the admin takes the same number of queries for few rows and for many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib import admin
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from ratelimits.conf import conf
from ratelimits.models import Access, Account, Customer, KeyOverride, Plan, PlanMembership, Rule
from ratelimits.usage.models import Batch, DurabilityGap, Line, PeriodUsage, ShardState
from ratelimits.usage.models.ledger import COUNTERS, LINES_PER_BATCH
from tests.support.rows import unsaved

pytestmark = pytest.mark.django_db

#: Number of rows of the short list, of the long list, and of the longest list, with `--long`.
FEW, MANY, VERY_MANY = 2, 130, 100_000


def rules(numbers: range) -> None:
    plans = [Plan.objects.get_or_create(name=f"plan {n}", slug=f"plan{n}")[0] for n in range(2)]
    Rule.objects.bulk_create(unsaved(f"rule{n}", scope=f"scope{n}", plan=plans[n % 2]) for n in numbers)


def overrides(numbers: range) -> None:
    rules(range(numbers.start, min(numbers.stop, 1_000)))
    KeyOverride.objects.bulk_create(
        KeyOverride(key=f"user:{n}", rule=f"rule{n % 1_000}", capacity=n + 1, reason="acme") for n in numbers
    )


def memberships(numbers: range) -> None:
    plans = [Plan.objects.get_or_create(name=f"plan {n}", slug=f"plan{n}")[0] for n in range(2)]
    PlanMembership.objects.bulk_create(PlanMembership(key=f"user:{n}", plan=plans[n % 2]) for n in numbers)


def accounts(numbers: range) -> None:
    plans = [Plan.objects.get_or_create(name=f"plan {n}", slug=f"plan{n}")[0] for n in range(2)]
    Account.objects.bulk_create(Account(identifier=f"acme-{n}", name=f"Acme {n}", plan=plans[n % 2]) for n in numbers)


def accesses(numbers: range) -> None:
    Access.objects.bulk_create(Access(target=f"user:{n}", reason="acme") for n in numbers)


def gaps(numbers: range) -> None:
    DurabilityGap.objects.bulk_create(
        DurabilityGap(event=f"e{n}", kind="wipe", shard=n % conf.SHARDS, account=f"acme-{n}", since=n, until=n + 1)
        for n in numbers
    )


def batches(numbers: range) -> None:
    ShardState.objects.bulk_create(ShardState(shard=n, position=1) for n in numbers if n < conf.SHARDS)
    Batch.objects.bulk_create(
        Batch(
            **dict.fromkeys(("pk", "seq", "position", "first_seq", "first_position"), n + 1),
            **dict.fromkeys(("previous_cum", "cum", "previous_requests", "opened_at", "sealed_at", "line_count"), 1),
            shard=n % conf.SHARDS,
        )
        for n in numbers
    )


def lines(numbers: range) -> None:
    batches(numbers)
    rules(range(numbers.start, min(numbers.stop, 1_000)))
    Line.objects.bulk_create(
        Line(
            pk=(n + 1) * LINES_PER_BATCH,
            batch_id=n + 1,
            **about(n),
            key=f"user:{n}",
            version=1,
            bin=900,
            checksum=0,
            **dict.fromkeys(COUNTERS, 1),
        )
        for n in numbers
    )


def usage(numbers: range) -> None:
    rules(range(numbers.start, min(numbers.stop, 1_000)))
    customer = Customer.objects.create()
    PeriodUsage.objects.bulk_create(
        PeriodUsage(**about(n), period=0, period_end=1, shard=n % conf.SHARDS, customer=customer, position=1)
        for n in numbers
    )


def about(number: int) -> dict[str, Any]:
    """Return the account, period, meter and rule of usage. Every rule has its own name."""
    first = Rule.objects.order_by("pk").values_list("pk", flat=True)[0]
    return {"account": f"acme-{number}", "meter": "requests", "rule": first + number % 1_000}


#: By list: the function that adds rows with these numbers, and the search whose queries are counted too.
LISTS: dict[Any, tuple[Callable[[range], None], str]] = {
    Rule: (rules, "rule"),
    KeyOverride: (overrides, "acme"),
    PlanMembership: (memberships, "user:"),
    Account: (accounts, "acme"),
    Access: (accesses, "user:1"),
    DurabilityGap: (gaps, "acme-1"),
    Batch: (batches, "x"),
    Line: (lines, "acme-1"),
    PeriodUsage: (usage, "acme-1"),
}


def queries(client: Client, model: Any, search: str) -> int:
    url = reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_changelist")
    with CaptureQueriesContext(connection) as captured:
        assert client.get(url, {"q": search} if search else {}).status_code == 200
    return len(captured)


@pytest.mark.parametrize("model", LISTS)
def test_a_list_takes_the_same_queries_for_few_rows_and_for_many(
    admin_client: Client, model: Any, long_run: bool
) -> None:
    add, search = LISTS[model]
    add(range(FEW))
    before = [queries(admin_client, model, text) for text in ("", search)]
    add(range(FEW, VERY_MANY if long_run and model is KeyOverride else MANY))
    page = admin_client.get(reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_changelist"))
    assert len(page.context["cl"].result_list) == admin.site.get_model_admin(model).list_per_page
    assert [queries(admin_client, model, text) for text in ("", search)] == before
