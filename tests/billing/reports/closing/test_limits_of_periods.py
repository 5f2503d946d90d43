"""Test that a limit on the billing period counts in the bill's own periods, whatever becomes of the account's terms.

Customers get rows, time zones and anchors, and lose them, in the middle of their periods. The model knows the months of
a calendar of its own (tests/reference/periods.py), and one rule: an edit keeps the present period of a customer that
has used anything. Texts get other customers too: each customer of a text begins with a limit of its own, and comes back
to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random
from typing import Any

import pytest
from django.db.models import Sum
from django.test import override_settings

from ratelimits import models, rules
from ratelimits.billing.models import Report, ReportLine
from ratelimits.billing.reports.closing.close import finalise
from ratelimits.engine.clock import clock
from ratelimits.identity import Identity
from ratelimits.models import Account
from ratelimits.quota import checking, spending
from ratelimits.usage.customers.move import move
from ratelimits.usage.models import PeriodUsage, ShardState
from tests.reference.periods import DAY, Calendar
from tests.support.entry_points import begin_afresh
from tests.support.plain import PLAIN
from tests.support.reports.edits import edit_at
from tests.support.rows import rule
from tests.support.usage.traffic import at, flow

pytestmark = pytest.mark.django_db(transaction=True)

ZONES = (
    *("UTC", "Asia/Tokyo", "Europe/Berlin", "America/New_York", "America/Santiago", "Asia/Kathmandu"),
    *("Australia/Lord_Howe", "Pacific/Kiritimati", "Pacific/Pago_Pago", "Africa/Cairo"),
)
#: Among them days that many months do not have, and local times that the clocks skip or have twice.
ANCHORS = (
    *("", "", "2024-01-10T00:00", "2024-01-31T06:00", "2024-02-29T23:45", "2024-03-31T02:30", "2024-10-27T02:30"),
    *("2024-01-15T12:30", "2024-04-26T00:15"),
)
CAPACITY = 100
FIRST = at("2024-01-01T00:00")
SECOND = 1_000_000
QUARTER = 900 * SECOND
Span = tuple[int, int]


@lru_cache
def months(zone: str, anchor: str) -> Calendar:
    return Calendar("month", zone, anchor or None)


@dataclass(eq=False)
class Customer:
    """The model of a customer: the present terms, the kept period, and what each text was admitted in each period."""

    zone: str = "UTC"
    anchor: str = ""
    kept: Span | None = None
    admitted: Counter[tuple[str, Span]] = field(default_factory=Counter)

    def period(self, moment: int) -> Span:
        """Return the period that contains a moment, which is not before the kept period."""
        calendar = months(self.zone, self.anchor)
        if self.kept is None:
            return calendar.span(moment)
        if moment < self.kept[1]:
            return self.kept
        _start, first_end = calendar.span(self.kept[1] + 2 * DAY - 1)
        return (self.kept[1], first_end) if moment < first_end else calendar.span(moment)

    def edit(self, zone: str, anchor: str, moment: int) -> None:
        """Give the customer other terms. If it ever used anything, the present period is kept."""
        if (zone, anchor) != (self.zone, self.anchor) and self.admitted:
            self.kept = self.period(moment)
        self.zone, self.anchor = zone, anchor


class World:
    """Make requests, edits and moves at random moments, in their order, and compare each decision with the model."""

    def __init__(self, draw: Random, texts: int, days: int, *, exact: bool, moves: bool) -> None:
        self.draw, self.days, self.exact, self.with_moves = draw, days, exact, moves
        #: The customer of each account text. A group of texts shares its customers.
        self.texts = {f"{number}": Customer() for number in range(texts)}
        self.rows: dict[Customer, models.Customer] = {}
        self.found: list[str] = []
        self.asked = self.edits = self.moves = self.refused = 0

    def run(self) -> None:
        for number in range(self.days):
            day = FIRST + number * DAY
            if self.draw.random() < 0.15:
                self.edit_some(day)
            for moment, text in sorted(self.moments(day)):
                clock.frozen = moment
                self.ask(text, moment)

    def moments(self, day: int) -> Iterator[tuple[int, str]]:
        """Yield the moments of a day at which texts ask: any moments, and the last and first ones of periods."""
        for text, customer in self.texts.items():
            for _ in range(self.draw.choice((0, 0, 0, 1, 2))):
                yield day + self.draw.randrange(HOUR, DAY), text
            end = customer.period(day + HOUR)[1]
            if day + HOUR < end < day + DAY:
                yield from ((moment, text) for moment in (end - 1, end, end + 1))

    def ask(self, text: str, moment: int) -> None:
        customer = self.texts[text]
        period, cost = customer.period(moment), self.draw.randrange(1, 60)
        expected = customer.admitted[text, period] + cost <= CAPACITY
        answer = checking.check(Identity(user=f"user:{text}", account=f"account:{text}"), costs={"requests": cost})
        self.asked += 1
        self.refused += not answer.allowed
        if answer.allowed:
            customer.admitted[text, period] += cost
        if not self.exact:
            return
        left = (period[1] - moment) / SECOND
        says = answer.decision.reset_after if answer.allowed and answer.decision is not None else answer.retry_after
        if (answer.allowed, says) != (expected, left):
            self.found.append(f"{text} at {moment}: {answer.allowed}, {says} s, and not {expected}, {left} s")

    def edit_some(self, day: int) -> None:
        """Edit the terms of some customers in the first hour of a day, after a drain, as a worker would drain.

        Some texts get another customer in this hour.
        """
        clock.frozen = day
        spending.send_and_give_back(everything=True)
        flow()
        for text in self.draw.sample([*self.texts], max(len(self.texts) // 4, 1)):
            moment, customer = day + self.draw.randrange(HOUR), self.texts[text]
            if self.with_moves and self.draw.random() < 0.3:
                self.move(text, moment)
                continue
            zone, anchor = customer.zone, customer.anchor
            kind = self.draw.choice(("zone", "anchor", "anchor", "both", "neither", "delete"))
            if kind in ("zone", "both"):
                zone = self.draw.choice(ZONES)
            if kind in ("anchor", "both"):
                anchor = self.draw.choice(ANCHORS)
            if kind == "delete":
                zone, anchor = "UTC", ""
            own = [each for each, named in self.texts.items() if named is customer]
            rows = Account.objects.filter(identifier__in=own)
            with edit_at(moment):
                if kind == "delete":
                    rows.delete()
                elif not rows.update(timezone=zone, billing_anchor=anchor):
                    Account.objects.create(identifier=text, timezone=zone, billing_anchor=anchor)
            customer.edit(zone, anchor, moment)
            self.edits += 1

    def move(self, text: str, moment: int) -> None:
        """Give a text to a new customer, or to a customer that once had a text of the same group of four."""
        group = int(text) // 4
        known = [each for each in self.rows if any(int(own) // 4 == group for own, _period in each.admitted)]
        to = self.draw.choice([None, *known])
        moved = move(text, None if to is None else self.rows[to], (moment // QUARTER + 1) * QUARTER // SECOND)
        self.rows[self.texts[text]] = moved.former
        self.texts[text] = Customer() if to is None else to
        self.rows[self.texts[text]] = moved.customer
        self.moves += 1

    def bills(self) -> dict[tuple[int, str, int, int], int]:
        """Close everything, and return what is billed: by customer, text, start and end of the period."""
        spending.send_and_give_back(everything=True)
        flow()
        end = FIRST + (self.days + 100) * DAY
        ShardState.objects.update(watermark=end)
        finalise(end)
        sums = PeriodUsage.objects.values_list("customer", "account", "period", "period_end").order_by()
        billed = sums.exclude(covered=None).annotate(Sum("admitted_units"))
        return {(pk, text, start * SECOND, end * SECOND): units for pk, text, start, end, units in billed if units}


HOUR = DAY // 24


@pytest.fixture
def _frozen(monkeypatch: pytest.MonkeyPatch, fsync_at_once: None) -> Iterator[None]:
    """Let the test choose the moment of each decision."""
    begin_afresh(monkeypatch)
    monkeypatch.setattr(clock, "frozen", FIRST)
    rules.use_clock(clock.now)
    yield
    rules.use_clock(None)


@pytest.mark.usefixtures("_frozen")
@pytest.mark.parametrize(
    ("kind", "more"), [("account", {}), ("user", {}), ("account", {"lasting": False}), ("account", {"prefetch": 4})]
)
def test_a_limit_admits_at_most_its_capacity_in_each_period_of_the_bill(
    kind: str, more: dict[str, Any], long_run: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Try 2,000 customers over 24 months with `--long`, 500 for each kind of rule; otherwise a few of them."""
    with override_settings(
        RATELIMITS={**PLAIN, "ACCOUNT": None, "DENY_CACHE_SECONDS": 0, "RELOAD_INTERVAL": 3 * 10**8}
    ):
        rule("per-period", "calendar_window", capacity=CAPACITY, calendar_unit="billing_period", key_kind=kind, **more)
        size = (500, 730) if long_run else (3, 365)
        world = World(Random(f"{kind} {more}"), *size, exact="prefetch" not in more, moves=kind == "account")
        world.run()
        bills = world.bills()
    with capsys.disabled():
        told = f"{world.asked} requests, {world.refused} refused, {world.edits} edits, {world.moves} moves"
        print(f"\n{told}, {len(bills)} bills: ", end="")
    assert world.found[:5] == []
    assert max(bills.values()) <= CAPACITY
    for text, customer in world.texts.items():
        world.rows.setdefault(customer, models.Name.objects.get(identifier=text, until=None).customer)
    admitted = {
        (row.pk, text, *period): units
        for customer, row in world.rows.items()
        for (text, period), units in customer.admitted.items()
        if units
    }
    assert bills == admitted
    reported = ReportLine.objects.filter(report__version=1).aggregate(units=Sum("consumed_quantity"))
    assert reported["units"] == sum(bills.values())
    assert world.refused > world.asked // 20
    assert (world.moves > 0) == world.with_moves
    assert not Report.objects.filter(version__gt=1).exists()
