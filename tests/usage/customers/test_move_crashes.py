"""Kill whoever tallies, closes and moves names between any two steps: no unit is doubled or lost, no move half made."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable

import pytest
from django.contrib.auth.models import User
from django.db import connection

from ratelimits.billing.models import Adjustment, Report
from ratelimits.billing.reports.verify.report import verify_report
from ratelimits.billing.reports.verify.totals import verify_totals
from ratelimits.engine import Stale
from ratelimits.models import Move, Name
from ratelimits.models.customers import DatedName, customer_at, make_missing, names_of
from ratelimits.moments import moment
from ratelimits.usage.ledger import crash
from ratelimits.usage.ledger.tally import tally
from ratelimits.usage.models import Line, PeriodUsage, ShardState
from tests.support.reports.invoices import account, close, spend
from tests.support.servers import TestServers
from tests.support.usage.mover import CLOSED_AT, TEXTS, quarter
from tests.support.usage.traffic import at, flow, opened_late
from tests.usage.ledger.test_crashes import process_group

pytestmark = pytest.mark.django_db(transaction=True)

SECOND = 10**6
#: The reason of adjustments that no move has made.
GOODWILL = "goodwill"
POINTS = (*crash.MOVE_STEPS, *crash.TALLY_STEPS, *crash.CLOSE_STEPS)


def spend_once(text: str, moment: str, units: int, key: str) -> None:
    """Make one request. Where a mover publishes newer rules just before, it is not counted, and made again."""
    while True:
        try:
            spend(text, moment, units, key=key)
        except Stale:
            continue
        return


def feed(rng: random.Random, uses: Counter[tuple[str, int]], author: User) -> None:
    """Put some usage into the ledger, complete until periods are closed, and add an adjustment."""
    Adjustment.objects.create(
        account=rng.choice(TEXTS), period_start=moment(at("2026-10-01")), quantity=2, reason=GOODWILL, author=author
    )
    for _number in range(4):
        text, bin_, units, key = rng.choice(TEXTS), quarter(rng), rng.randrange(1, 9), f"api_key:{rng.randrange(5)}"
        spend_once(text, time.strftime("%Y-%m-%dT%H:%M", time.gmtime(bin_)), units, key)
        uses[text, bin_] += units
    opened_late()
    flow()
    for shard in ShardState.objects.values_list("shard", flat=True):
        # One after another: a closer locks several of them.
        ShardState.objects.filter(shard=shard).update(watermark=CLOSED_AT * SECOND)


def test_whoever_moves_names_dies_and_each_unit_has_one_customer(
    servers: TestServers, crashes: Callable[[int, int], int], crash_seed: int
) -> None:
    wanted, rng, uses = crashes(20, 520), random.Random(crash_seed), Counter[tuple[str, int]]()
    author = User.objects.create(username="finance")
    account("acme", included=20)
    account("bolt", timezone="Asia/Tokyo", billing_anchor="2026-01-10T00:00")
    make_missing("default", TEXTS)
    first = dict(Name.objects.values_list("identifier", "customer"))
    feed(rng, uses, author)
    environment = {
        **os.environ,
        "DATABASE_URL": servers.url_of_database(str(connection.settings_dict["NAME"])),
        "DJANGO_SETTINGS_MODULE": "tests.settings",
    }
    with process_group("tests.support.usage.mover", str(crash_seed), "3", environment=environment) as movers:
        while len(movers()) < wanted:
            if rng.random() < 0.02:
                feed(rng, uses, author)
            time.sleep(0.02)
    counted = Counter(movers())
    flow()
    tally()  # it skips a shard that a killed process had locked
    close("2026-11-03")
    print(
        f"\nseed {crash_seed}, {connection.vendor}: {counted.total()} crashes; {Move.objects.count()} moves,"
        f" {Adjustment.objects.count()} adjustments, {Report.objects.count()} reports, {Line.objects.count()} lines"
    )
    for point in POINTS:
        print(f"  {point:26} killed {counted[f'kill {point}']:4}, database cut {counted[f'cut {point}']:4}")
    check_names(first)
    check_totals(uses)
    check_adjustments()
    if wanted >= 200:
        assert {line.split()[1] for line in counted} == set(POINTS)


def check_names(first: dict[str, int]) -> None:
    """Compare the names with the moves, made one after another."""
    for text in TEXTS:
        names = [DatedName(0, first[text])]
        for made in Move.objects.filter(text=text).order_by("pk"):
            earlier = [name for name in names if name.since < made.since]
            names = earlier
            if not earlier or earlier[-1].customer != made.customer_id:
                names = [*earlier, DatedName(made.since, made.customer_id)]
        assert names_of("default", [text])[text] == names


def check_totals(uses: Counter[tuple[str, int]]) -> None:
    """Compare the totals with what was used, and with the reports."""
    names, expected = names_of("default", TEXTS), Counter[tuple[int | None, str]]()
    for (text, bin_), units in uses.items():
        expected[customer_at(names[text], bin_), text] += units
    totals = Counter[tuple[int | None, str]]()
    for row in PeriodUsage.objects.all():
        totals[row.customer_id, row.account] += row.admitted_units
    assert totals == expected
    assert list(verify_totals("default")) == []
    assert [error for report in Report.objects.all() for error in verify_report(report)] == []


def check_adjustments() -> None:
    """Find the adjustments of each move by its reason: they take as much as they give, or there are none."""
    sums, counts = Counter[str](), Counter[str]()
    for quantity, reason in Adjustment.objects.exclude(reason=GOODWILL).values_list("quantity", "reason"):
        sums[reason.partition(": ")[2]] += quantity
        counts[reason.partition(": ")[2]] += 1
    assert set(sums.values()) <= {0}
    moves = dict(Move.objects.values_list("reason", "adjusted_since"))
    assert {reason for reason, since in moves.items() if since is not None} == counts.keys()
