"""Kill closers and pushers between any two steps: no report is doubled, no event lost, billed twice or renamed."""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from uuid import UUID

import pytest
from django.conf import settings
from django.contrib.auth.models import User
from django.db import connection
from django.db.models import Sum
from django.test import override_settings

from ratelimits.billing.models import Adjustment, PushDelivery, Report, ReportLine
from ratelimits.billing.push import deliveries as sending
from ratelimits.billing.reports.rows import ADJUSTMENT, USAGE
from ratelimits.moments import moment
from ratelimits.usage.ledger import crash
from ratelimits.usage.ledger.tally import tally
from ratelimits.usage.models import Line, ShardState
from tests.billing.push.fakes import FAKES, Fake, Trouble, options
from tests.support.reports.invoices import account, spend
from tests.support.reports.pusher import clock, work
from tests.support.servers import TestServers
from tests.support.usage.traffic import at, flow
from tests.usage.ledger.test_crashes import process_group

pytestmark = pytest.mark.django_db(transaction=True)

ACCOUNTS = tuple(f"payer{number}" for number in range(8))
OCTOBER = at("2026-10-01")
POINTS = (*crash.CLOSE_STEPS, *crash.PUSH_STEPS)
#: How often a receiver fails in each of these ways.
TROUBLES: tuple[Trouble, ...] = ("lose", "lose", "fail", "drop", (500, {}), (503, {}), (429, {}))


def spread(name: str, rng: random.Random) -> None:
    """Put some usage of October into the ledger, complete."""
    for _ in range(3):
        key = f"api_key:{rng.randrange(5)}"
        spend(name, f"2026-10-{rng.randrange(2, 30):02d}T12:00", rng.randrange(1, 9), key=key, version=rng.randrange(3))
    flow()
    ShardState.objects.update(watermark=at("2026-11-02"))


def adjust(number: int, rng: random.Random, author: User) -> None:
    Adjustment.objects.create(
        reference=UUID(int=number + 1),
        account=rng.choice(ACCOUNTS),
        period_start=moment(OCTOBER),
        quantity=rng.choice((-3, -2, 2, 5)),
        key=f"api_key:{rng.randrange(5)}",
        reason="goodwill",
        author=author,
    )


def troubled(rng: random.Random) -> Callable[[], Trouble | None]:
    return lambda: rng.choice(TROUBLES) if rng.random() < 0.15 else None


def run(servers: TestServers, seed: int, crashes: int) -> None:
    rng = random.Random(seed)
    author = User.objects.create(username="finance")
    for name in ACCOUNTS:
        account(name, included=20)
        spread(name, rng)
    start, fed = time.time(), 0
    with ExitStack() as stack:
        fakes = {name: stack.enter_context(kind()) for name, kind in FAKES.items()}
        for number, fake in enumerate(fakes.values()):
            fake.now = lambda: clock(start).timestamp()
            fake.trouble = troubled(random.Random(f"{seed}:{number}"))
        pushed = {name: options(name, fake, "2026-10") for name, fake in fakes.items()}
        environment = {
            **os.environ,
            "DATABASE_URL": servers.url_of_database(str(connection.settings_dict["NAME"])),
            "DJANGO_SETTINGS_MODULE": "tests.settings",
            "RATELIMITS_TEST_PUSH": json.dumps(pushed),
        }
        with process_group(
            "tests.support.reports.pusher", str(seed), "3", str(start), environment=environment
        ) as pushers:
            while len(pushers()) < crashes:
                if Adjustment.objects.filter(report=None).count() < 6:
                    fed += 1
                    adjust(fed, rng, author)
                if rng.random() < 0.05:
                    spread(rng.choice(ACCOUNTS), rng)
                time.sleep(0.02)
        counted = Counter(pushers())
        stack.enter_context(override_settings(RATELIMITS={**settings.RATELIMITS, "PUSH": pushed}))
        for fake in fakes.values():
            fake.trouble = lambda: None
        tally()  # it skips a shard that a closer had locked
        minutes = 0
        while minutes < 2 or (PushDelivery.objects.filter(state="waiting").exists() and minutes < 100):
            minutes += 1
            work(clock(start) + sending.CLAIM + timedelta(minutes=minutes), rng)
        check(fakes, counted, seed)
        if crashes >= 200:
            assert {line.split()[1] for line in counted} == set(POINTS)


def check(fakes: dict[str, Fake], counted: Counter[str], seed: int) -> None:
    lines = {line.line_id: line for line in ReportLine.objects.select_related("report")}
    reports: dict[tuple[str, int], list[int]] = {}
    for account_, period, version in Report.objects.values_list("account", "period_start", "version"):
        reports.setdefault((account_, period), []).append(version)
    doubled = sum(sorted(versions) != list(range(1, len(versions) + 1)) for versions in reports.values())
    billed, deliveries = Counter[str](), PushDelivery.objects
    twice = lost = renamed = 0
    for name, fake in fakes.items():
        ids = [event["id"] if name == "openmeter" else fake.name(event) for event in fake.taken]
        due = {key for key, line in lines.items() if line.overage_quantity or name != "stripe"}
        twice += len(ids) - len(set(ids))
        lost += len(due - set(ids))
        renamed += len(set(ids) - due) + sum(len(texts) > 1 for texts in fake.arrived.values())
        billed[name] = len(ids)
        assert fake.invalid == []
    print(
        f"\nseed {seed}, {connection.vendor}: {counted.total()} crashes; {Report.objects.count()} reports of"
        f" {len(reports)} periods, {len(lines)} lines; events taken: {dict(billed)}, requests:"
        f" { {name: len(fake.requests) for name, fake in fakes.items()} }\n  reports doubled {doubled}, events taken"
        f" twice {twice}, lost {lost}, under another identity or text {renamed}"
    )
    for point in POINTS:
        print(f"  {point:26} killed {counted[f'kill {point}']:4}, database cut {counted[f'cut {point}']:4}")
    assert (doubled, twice, lost, renamed) == (0, 0, 0, 0)
    assert set(deliveries.values_list("state", flat=True)) == {"accepted"}
    assert len(lines) == ReportLine.objects.count()
    assert not Adjustment.objects.filter(report=None).exists()
    by_person = ReportLine.objects.filter(charge_category=ADJUSTMENT)
    assert by_person.count() == Adjustment.objects.count()
    assert total(by_person, "consumed_quantity") == total(Adjustment.objects.all(), "quantity")
    assert total(ReportLine.objects.filter(charge_category=USAGE), "consumed_quantity") == total(
        Line.objects.all(), "admitted_units"
    )
    assert sum(int(event["payload"]["value"]) for event in fakes["stripe"].taken) == total(
        ReportLine.objects.all(), "overage_quantity"
    )


def total(rows: object, column: str) -> int:
    return int(rows.aggregate(total=Sum(column))["total"] or 0)  # type: ignore[attr-defined]


def test_whoever_closes_and_pushes_dies_and_each_line_is_billed_once(
    servers: TestServers, crashes: Callable[[int, int], int], crash_seed: int
) -> None:
    run(servers, crash_seed, crashes(20, 520))
