"""Test that every quarter of an hour is in exactly one billing period, whatever is used, adjusted and edited.

The model lists the frozen periods of each customer. Its months are those of a calendar of its own
(tests/reference/periods.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from random import Random
from threading import Thread
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.core.exceptions import ValidationError
from django.db import connection, connections, transaction
from django.db.models import F, QuerySet

from ratelimits.billing.models import Adjustment
from ratelimits.models import Account, Customer, FrozenPeriod
from ratelimits.models.accounts.named import named_now
from ratelimits.models.periods import freeze, timelines_of
from ratelimits.moments import moment
from ratelimits.usage.periods import month_in
from tests.reference.customers import Periods
from tests.reference.periods import DAY
from tests.support.eventually import until
from tests.support.reports.edits import edit_at
from tests.support.usage.traffic import at

ZONES = (
    *("UTC", "Europe/Berlin", "America/New_York", "America/Santiago", "Pacific/Kiritimati", "Pacific/Pago_Pago"),
    *("Asia/Kolkata", "Asia/Kathmandu", "Australia/Lord_Howe", "Africa/Cairo"),
)
ANCHORS = ("", "", "2026-01-31T06:00", "2026-01-02T00:00", "2026-01-15T12:30", "2024-02-29T23:45", "2024-03-31T02:30")
BIN, SECOND = 900, 1_000_000
FIRST = at("2024-01-01")


@dataclass
class Model(Periods):
    """A customer of the model, with its account text."""

    name: str = ""


class History:
    """Carry out random uses, adjustments and edits, for real and in the model, and compare both."""

    def __init__(self, draw: Random, customers: int, months: int) -> None:
        self.draw, self.end = draw, FIRST + months * 30 * DAY
        self.customers = [Model(name=f"{number}") for number in range(customers)]
        self.author = get_user_model().objects.create(username="finance")
        self.acts = 0

    def run(self) -> None:
        now = FIRST
        while now < self.end:
            now += self.draw.randrange(1, 20 * DAY)
            acts = (self.use, self.use, self.use, self.edit, self.edit, self.adjust, self.disturb)
            self.draw.choice(acts)(now)
            self.acts += 1
        self.compare()

    def some(self) -> list[Model]:
        return self.draw.sample(self.customers, max(len(self.customers) // 3, 1))

    def use(self, now: int) -> None:
        """Tally usage of now, of before, and sometimes of a clock that is ahead."""
        uses = [
            (model, max(now - self.draw.choice((0, 0, 0, self.draw.randrange(90 * DAY), -40 * DAY)), 0) // SECOND)
            for model in self.some()
            for _ in range(self.draw.randrange(1, 4))
        ]
        bins = sorted({(model.name, second // BIN * BIN) for model, second in uses})
        with transaction.atomic():
            found = freeze("default", bins)
        models = {model.name: model for model in self.customers}
        for name, bin_ in bins:
            period = found[name, bin_].period
            assert (period.start, period.end) == models[name].freeze(bin_ * SECOND)

    def adjust(self, now: int) -> None:
        for model in self.some():
            start = moment(now - self.draw.randrange(60 * DAY) // SECOND * SECOND)
            Adjustment.objects.create(
                account=model.name, period_start=start, quantity=1, reason="x", author=self.author
            )
            model.freeze(int(start.timestamp()) * SECOND)

    def edit(self, now: int) -> None:
        for model in self.some():
            zone, anchor = self.draw.choice(ZONES), self.draw.choice(ANCHORS)
            rows = Account.objects.filter(identifier=model.name)
            with edit_at(now):
                if self.draw.random() < 0.2:
                    zone, anchor = "UTC", ""
                    rows.delete()
                elif not rows.update(timezone=zone, billing_anchor=anchor):
                    Account(identifier=model.name, timezone=zone, billing_anchor=anchor).save()
            model.edit(zone, anchor, now)

    def disturb(self, now: int) -> None:
        """Change terms with raw SQL, so that nothing is frozen before; or delete a row of a period."""
        for model in self.some():
            if self.draw.random() < 0.3 and model.frozen:
                span = self.draw.choice(sorted(model.frozen))
                rows = FrozenPeriod.objects.filter(customer__names__identifier=model.name, start=span[0])
                FrozenPeriod.objects.filter(pk__in=list(rows.values_list("pk", flat=True)))._raw_delete("default")
                del model.frozen[span]
            elif Account.objects.filter(identifier=model.name).exists():
                model.zone, model.anchor = self.draw.choice(ZONES), self.draw.choice(ANCHORS)
                rows = QuerySet(Account).filter(identifier=model.name)
                rows.update(timezone=model.zone, billing_anchor=model.anchor)

    def compare(self) -> None:
        """Check the rows, and that each quarter of an hour is in one period, and neighbours touch."""
        customers = named_now("default", [model.name for model in self.customers])
        found = timelines_of("default", customers.values())
        for model in self.customers:
            timeline = found[customers[model.name].token]
            rows = {(row.start, row.end): (row.timezone, row.label) for row in timeline.frozen}
            assert rows == model.frozen
            periods = timeline.between(FIRST - 60 * DAY, self.end + 60 * DAY)
            assert all(one.end == other.start for one, other in pairwise(periods))
            for period in periods:
                assert period.start % (BIN * SECOND) == period.end % (BIN * SECOND) == 0
                assert 0 < period.end - period.start <= 36 * DAY or timeline.is_frozen(period)
                for moment_within in (period.start, period.end - BIN * SECOND, (period.start + period.end) // 2):
                    assert timeline.at(moment_within) == period
                    assert model.period(moment_within) == (period.start, period.end)
                # All periods of a month are over twelve hours after the month.
                assert period.end <= month_in(period.label, "UTC")[1] + 12 * 3600 * SECOND


@pytest.mark.django_db(transaction=True)
def test_each_quarter_of_an_hour_is_in_one_period_whatever_is_edited(
    long_run: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Try 2,000 customers over 24 months with `--long`; otherwise a few of them."""
    for seed in range(20 if long_run else 2):
        history = History(Random(seed), 100 if long_run else 6, 24 if long_run else 12)
        history.run()
        get_user_model().objects.all()
        Adjustment.objects.all()._raw_delete("default")
        history.author.delete()
        FrozenPeriod.objects.all()._raw_delete("default")
        with edit_at(0):
            Account.objects.all().delete()
    with capsys.disabled():
        print(f"\n{history.acts} acts of the last history", end="")


@pytest.mark.django_db(transaction=True)
class TestFreezing:
    def test_a_frozen_period_is_never_calculated_again(self) -> None:
        with transaction.atomic():
            ((_customer, period),) = freeze("default", [("acme", at("2026-10-10") // SECOND)]).values()
        FrozenPeriod.objects.update(end=F("end") + 900 * SECOND)  # as another host with other time zone data froze it
        with transaction.atomic():
            ((_customer, again),) = freeze("default", [("acme", at("2026-10-20") // SECOND)]).values()
        assert (again.start, again.end) == (period.start, period.end + 900 * SECOND)
        acme = named_now("default", ["acme"])["acme"]
        assert timelines_of("default", [acme])[acme.token].at(again.end).end == at("2026-12-01")

    def test_two_processes_that_freeze_at_once_agree(self) -> None:
        """An edit waits for the tally that holds the customer's lock, and the next tally has the new terms."""
        Account.objects.create(identifier="acme")
        with transaction.atomic():
            freeze("default", [("acme", at("2026-09-10") // SECOND)])
        found: list[str] = []

        def edit() -> None:
            with edit_at("2026-11-10"):
                Account.objects.filter(identifier="acme").update(timezone="Asia/Tokyo")
            found.append("edited")
            connections.close_all()

        thread = Thread(target=edit)
        with transaction.atomic():
            freeze("default", [("acme", at("2026-10-10") // SECOND)])
            if connection.vendor == "postgresql":  # SQLite has one lock for all writes
                thread.start()
                with connection.cursor() as cursor:
                    until(lambda: _waiting(cursor), "the edit waits")
                assert found == []
        if connection.vendor == "sqlite":
            thread.start()
        thread.join()
        labels = FrozenPeriod.objects.order_by("start").values_list("label", "timezone")
        assert list(labels) == [(f"2026-{month:02d}", "UTC") for month in (9, 10, 11)]

    def test_a_customer_with_periods_is_never_deleted(self) -> None:
        with transaction.atomic():
            freeze("default", [("acme", at("2026-10-10") // SECOND)])
        with pytest.raises(Exception, match="protected"):
            Customer.objects.all().delete()


def _waiting(cursor: Any) -> bool:
    cursor.execute("SELECT count(*) FROM pg_locks WHERE NOT granted")
    return bool(cursor.fetchone()[0])


@pytest.mark.django_db
@pytest.mark.parametrize("anchor", ["2026-01-31T06:07", "2026-01-31T06:00:01"])
def test_an_anchor_within_a_quarter_of_an_hour_is_refused(anchor: str) -> None:
    with pytest.raises(ValidationError, match="not at a quarter of an hour") as refused:
        Account(identifier="acme", billing_anchor=anchor).full_clean()
    assert list(refused.value.message_dict) == ["billing_anchor"]
