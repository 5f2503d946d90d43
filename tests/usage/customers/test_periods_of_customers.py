"""Test that usage of a text goes to the billing periods of its customer, whatever texts the customer has had."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from django.db.models import QuerySet, Sum

from ratelimits.algorithms.billing_periods import PeriodTerms
from ratelimits.billing.models import Report, ReportLine
from ratelimits.billing.reports.statements import statements
from ratelimits.billing.reports.verify.report import verify_report
from ratelimits.billing.reports.verify.terms import verify_terms
from ratelimits.billing.reports.verify.totals import verify_totals
from ratelimits.engine.keys import BIN_SECONDS
from ratelimits.models import Account, ConfigVersion, Customer, FrozenPeriod
from ratelimits.models.customers import make_missing
from ratelimits.rules.loader import Loader
from ratelimits.usage.api.windows import WindowQuery
from ratelimits.usage.api.windows import rows as window_rows
from ratelimits.usage.customers.move import NotMovedError, move
from ratelimits.usage.ledger.terms import Terms
from ratelimits.usage.models import PeriodUsage
from tests.reference.periods import Calendar
from tests.support.customers import present
from tests.support.reports.edits import change, edit_at
from tests.support.reports.invoices import account, close, spend
from tests.support.selection import few
from tests.support.usage.traffic import at, flow, use

pytestmark = pytest.mark.django_db(transaction=True)

SECOND = 10**6
#: The time zone and the anchor of each account at first.
TERMS = {
    "acme": ("UTC", ""),
    "bolt": ("Asia/Tokyo", "2026-01-10T00:00"),
    "cord": ("America/New_York", "2026-01-15T12:30"),
}


def customer(text: str) -> Customer:
    make_missing("default", [text])
    return present("default", [text])[text]


def errors() -> list[str]:
    reports = (error for report in Report.objects.all() for error in verify_report(report))
    return [*verify_totals("default"), *verify_terms("default", Counter()), *reports]


def billed() -> dict[tuple[str, int], int]:
    """Return the units on reports, by token of the customer and start of the billing period (µs)."""
    sums = ReportLine.objects.filter(admitted_count__gt=0).values_list("report__customer", "report__period_start")
    return {(token, start): units for token, start, units in sums.order_by().annotate(Sum("consumed_quantity"))}


def drafted() -> Counter[tuple[str, int]]:
    """Return the units on the statements of open periods, by token of the customer and start of the period (µs)."""
    sums: Counter[tuple[str, int]] = Counter()
    for month in ("2026-10", "2026-11", "2026-12"):
        for statement in statements(month):
            for row in statement.rows:
                sums[statement.report.customer_id, statement.report.period_start] += row.consumed_quantity
    return sums


def shown() -> Counter[tuple[str, int]]:
    """Return the units that `/usage/` shows staff, by account and start of the billing period (µs)."""
    query = WindowQuery("period", at("2026-09-01"), at("2027-01-01"), "UTC", Terms())
    sums: Counter[tuple[str, int]] = Counter()
    for row in window_rows("default", query, None, 1000)[0]:
        sums[row["account"], int(row["start"].timestamp()) * SECOND] += row["admitted_units"]
    return sums


@pytest.mark.parametrize("seed", few(range(4), 0))
def test_each_use_is_billed_once_in_the_period_of_its_customer_whatever_is_moved(seed: int) -> None:
    chance = random.Random(seed)
    for text, (zone, anchor) in TERMS.items():
        account(text, timezone=zone, billing_anchor=anchor)
    terms = {customer(text).pk: of_text for text, of_text in TERMS.items()}
    bins = range(at("2026-10-01") // SECOND, at("2026-11-20") // SECOND, BIN_SECONDS)
    names = {text: [(0, customer(text).pk)] for text in TERMS}
    uses: list[tuple[str, int, int]] = []
    for number in range(40):
        text, bin_ = chance.choice(list(TERMS)), chance.choice(bins)
        if chance.random() < 0.65:
            units = chance.randrange(1, 9)
            now, configuration = bin_ * SECOND, ConfigVersion.read("default")[0]
            assert use(text, key=f"api_key:{number}", cost=units, now=now, configuration=configuration).allowed
            uses.append((text, bin_, units))
        elif chance.random() < 0.4:
            flow()
        else:
            moved = move(text, chance.choice([None, *Customer.objects.all()]), bin_)
            names[text] = [*((since, pk) for since, pk in names[text] if since < bin_), (bin_, moved.customer.pk)]
    flow()
    assert errors() == []
    tokens = dict(Customer.objects.values_list("pk", "token"))
    expected, of_texts = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
    totals: Counter[tuple[int | None, str, int]] = Counter()
    for text, bin_, units in uses:
        owner = [pk for since, pk in names[text] if since <= bin_][-1]
        zone, anchor = terms.get(owner, ("UTC", ""))
        start, _end = Calendar("month", zone, anchor or None).span(bin_ * SECOND)
        expected[tokens[owner], start] += units
        of_texts[text, start] += units
        totals[owner, text, start // SECOND] += units
    counted: Counter[tuple[int | None, str, int]] = Counter()
    for row in PeriodUsage.objects.all():
        counted[row.customer_id, row.account, row.period] += row.admitted_units
    assert counted == totals
    assert (drafted(), shown()) == (expected, of_texts)
    close("2027-02-01")
    assert billed() == expected
    assert errors() == []
    for period in FrozenPeriod.objects.all():
        zone, anchor = terms.get(period.customer_id, ("UTC", ""))
        assert (period.start, period.end) == Calendar("month", zone, anchor or None).span(period.start)
        assert period.timezone == zone


def frozen(of: Customer) -> set[tuple[int, int, str]]:
    return set(FrozenPeriod.objects.filter(customer=of).values_list("start", "end", "timezone"))


def test_terms_that_go_to_another_row_stay_the_terms_of_their_customer() -> None:
    payer = account("acme", timezone="Asia/Tokyo", billing_anchor="2026-01-10T00:00")
    tokyo = customer("acme")
    spend(payer, "2026-09-15")
    flow()
    move("x", tokyo, at("2026-10-01") // SECOND)
    (before,) = frozen(tokyo)
    move("acme", None, at("2026-10-01") // SECOND)
    assert Account.objects.get(identifier="x").timezone == "Asia/Tokyo"
    assert frozen(tokyo) == {before}
    move("x", None, at("2026-11-01") // SECOND)  # the rows of the customer now wait for its next text
    assert frozen(tokyo) == {before}
    spend("x", "2026-10-15")
    flow()
    assert frozen(tokyo) == {before, (at("2026-10-09T15:00"), at("2026-11-09T15:00"), "Asia/Tokyo")}
    move("y", tokyo, at("2026-11-15") // SECOND)
    spend("y", "2026-11-16")
    flow()
    assert (at("2026-11-09T15:00"), at("2026-12-09T15:00"), "Asia/Tokyo") in frozen(tokyo)
    assert len(frozen(tokyo)) == 3
    assert errors() == []


def write_second(text: str, **fields: Any) -> None:
    """Write a second row for the customer of a text, as raw SQL can. The older row holds."""
    rows: Any = QuerySet(Account)
    rows.bulk_create([Account(identifier=text, **fields)])


def test_an_edit_of_one_row_freezes_the_periods_of_a_customer_with_several_texts() -> None:
    payer = account("acme", timezone="Asia/Tokyo")
    own = customer("acme")
    spend(payer, "2026-09-15")
    flow()
    move("x", own, at("2026-10-01") // SECOND)
    write_second("x", billing_anchor="2026-01-20T00:00")
    assert len(frozen(own)) == 1
    change("2026-11-02", "x", timezone="Europe/Berlin")
    assert len(frozen(own)) == 1
    change("2026-11-02", "acme", timezone="Europe/Berlin")
    assert {zone for _start, _end, zone in frozen(own)} == {"Asia/Tokyo"}
    assert max(end for _start, end, _zone in frozen(own)) == at("2026-11-30T15:00")


def test_terms_stay_with_a_customer_who_loses_the_text_of_its_row_and_keeps_others() -> None:
    row = account("acme", timezone="Asia/Tokyo")
    own = customer("acme")
    move("x", own, at("2026-10-01") // SECOND)
    write_second("x", timezone="Europe/Berlin")
    move("y", own, at("2026-10-05") // SECOND)
    with pytest.raises(NotMovedError, match="delete all but one of acme, x"):
        move("acme", None, at("2026-10-10") // SECOND)
    Account.objects.get(identifier="x").delete()
    move("acme", None, at("2026-10-10") // SECOND)
    assert list(Account.objects.values_list("pk", "identifier", "timezone")) == [(row.pk, "y", "Asia/Tokyo")]
    spend("y", "2026-10-15")
    flow()
    assert frozen(own) == {(at("2026-09-30T15:00"), at("2026-10-31T15:00"), "Asia/Tokyo")}


def test_rows_of_a_customer_that_are_edited_together_freeze_nothing_if_the_oldest_says_the_same_as_before() -> None:
    payer = account("acme", timezone="Asia/Tokyo")
    own = customer("acme")
    spend(payer, "2026-09-15")
    flow()
    move("x", own, at("2026-10-01") // SECOND)
    write_second("x", timezone="Europe/Berlin")
    with edit_at("2026-11-02"):
        Account.objects.filter(identifier__in=["acme", "x"]).update(timezone="Asia/Tokyo")
    assert frozen(own) == {(at("2026-08-31T15:00"), at("2026-09-30T15:00"), "Asia/Tokyo")}


def test_rows_of_a_customer_that_are_deleted_together_freeze_its_periods() -> None:
    payer = account("acme", timezone="Asia/Tokyo")
    own = customer("acme")
    spend(payer, "2026-09-15")
    flow()
    move("x", own, at("2026-10-01") // SECOND)
    write_second("x", timezone="Asia/Tokyo")
    with edit_at("2026-11-02"):
        Account.objects.filter(identifier__in=["acme", "x"]).delete()
    assert {zone for _start, _end, zone in frozen(own)} == {"Asia/Tokyo"}
    assert max(end for _start, end, _zone in frozen(own)) == at("2026-11-30T15:00")


def test_each_process_forgets_the_frozen_periods_of_a_former_customer() -> None:
    old = Loader()

    def terms(text: str = "acme") -> Any:
        of_new_process = Loader().reload().period_terms(f"account:{text}")
        assert old.reload().period_terms(f"account:{text}") == of_new_process
        return of_new_process

    payer = account("acme")
    own = customer("acme")
    spend(payer, "2026-11-02")
    flow()
    Account.objects.filter(identifier="acme").update(billing_anchor="2026-01-20T00:00")
    before = terms()
    assert before.frozen
    move("acme")
    assert terms() == PeriodTerms()
    move("x", own)
    assert terms("x") == before
    Account.objects.filter(identifier="x").update(timezone="Asia/Tokyo")
    assert terms("x") != before
    move("y", own)
    assert terms("y") == terms("x")
    move("y")  # it has no row in the table of accounts
    assert terms("y") == PeriodTerms()
