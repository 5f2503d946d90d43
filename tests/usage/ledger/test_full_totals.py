"""Test totals above 2^63 - 1: they stop the period of their customer alone, and say so everywhere."""

from __future__ import annotations

import io
import random
from collections import Counter
from datetime import UTC, datetime
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import DataError, connection
from django.db.models import F

from ratelimits import telemetry
from ratelimits.billing.models import Report
from ratelimits.billing.reports.closing.close import finalise, home_shard
from ratelimits.billing.reports.closing.open_periods import NotForcedError, force, open_periods
from ratelimits.billing.reports.statements import rows, statements
from ratelimits.status.fact import Level
from ratelimits.status.facts import facts
from ratelimits.usage.alerts.evaluate import evaluate
from ratelimits.usage.ledger import apply as applying
from ratelimits.usage.ledger import tally as tallying
from ratelimits.usage.ledger.apply import BatchOutcome, apply
from ratelimits.usage.ledger.packet import CUM_MODULUS, packet
from ratelimits.usage.ledger.retention.compact import compact
from ratelimits.usage.ledger.tally import tally
from ratelimits.usage.models import Batch, KeyTotal, Line, PeriodUsage, RuleTotal, ShardState
from ratelimits.usage.models.sums import MAX_TOTAL, ExactSum
from tests.support.reports.invoices import token
from tests.support.usage.traffic import at, flow, use

pytestmark = pytest.mark.django_db(transaction=True)

OCTOBER, NOVEMBER = (at(f"2026-{month}-01") // 1_000_000 for month in (10, 11))


def neighbours(count: int) -> list[str]:
    """Return names of accounts in one shard."""
    names = (f"account-{number}" for number in range(1000))
    return [name for name in names if home_shard(name) == home_shard("account-0")][:count]


def arrive(account: str, counters: dict[str, int], period: int = OCTOBER) -> None:
    """Write a batch with these counters of an account ("au": admitted units, and so on) to the ledger."""
    shard = home_shard(account)
    state_before, _new = ShardState.objects.get_or_create(shard=shard)
    fields = {f"{kind[0]}|{period}|requests|0|0|{account}|api_key:1|{kind[1]}": n for kind, n in counters.items()}
    cum = (state_before.cum + sum(counters.values())) % CUM_MODULUS
    requests = 0  # No gap is declared here, so nobody asks for the running sum of requests.
    sealed = (period + 3600) * 1_000_000
    identity = {"#i": "i", "#s": state_before.seq + 1, "#o": sealed - 1, "#r": "r", "#p": state_before.cum, "#f": ""}
    identity |= {"#t": sealed, "#x": "r", "#c": cum, "#q": requests}
    raw = [(name.encode(), str(value).encode()) for name, value in {**identity, **fields}.items()]
    assert apply("default", packet(shard, raw), "always") is BatchOutcome.APPLIED


def overflow(*accounts: str) -> None:
    """Let accounts use more than 2^63 units in October, and some in November."""
    for account in accounts:
        for _batch in range(3):
            arrive(account, {"an": 1, "au": MAX_TOTAL - 5, "rn": 1, "ru": 3})
        arrive(account, {"an": 1, "au": 7}, NOVEMBER)


def closed(moment: str) -> set[tuple[str, int]]:
    """Close what can be closed. Return the account and the start of each period that got a report."""
    ShardState.objects.update(watermark=at(moment))
    return {(report.account, report.period_start // 1_000_000) for report in finalise(at(moment))}


def findings() -> list[str]:
    out = io.StringIO()
    try:
        call_command("ratelimits_verify", "--all", stdout=out, stderr=io.StringIO())
    except CommandError:
        return out.getvalue().splitlines()
    return []


def test_totals_are_the_sums_of_the_lines_and_stay_at_the_largest_number() -> None:
    """Try sequences of batches of any size against sums in Python, which have no limit."""
    dice, names = random.Random(3), neighbours(4)
    model: dict[str, Counter[str]] = {name: Counter() for name in names}
    for _step in range(60):
        name = dice.choice(names)
        small = {
            kind: dice.randrange(1, 2 ** dice.choice([3, 40])) for kind in ("an", "au", "dn", "du", "rn", "ru", "sn")
        }
        if name == names[0]:
            small["au"] = dice.randrange(2**62, 2**63)
        if name == names[1]:
            small["ru"] = dice.choice([1, 2**61])
        arrive(name, small)
        model[name].update(small)
        if dice.random() < 0.3:
            tally()
    tally()
    stored = {row.account: row for row in PeriodUsage.objects.all()}
    columns = {"an": "admitted_requests", "au": "admitted_units", "dn": "denied_requests", "ru": "refunded_units"}
    for name, counts in model.items():
        for kind, column in {**columns, "sn": "shadow_requests"}.items():
            value = getattr(stored[name], column)
            assert type(value) is int
            assert value == min(counts[kind], MAX_TOTAL), (name, kind)
    full = sorted(row.account for row in PeriodUsage.full("default"))
    assert sorted(name for name in names if stored[name].is_full) == full
    sums = dict(Line.objects.values_list("account").order_by().annotate(ExactSum("admitted_units")))
    assert sums == {name: counts["au"] for name, counts in model.items()}
    if connection.vendor == "sqlite":
        with connection.cursor() as cursor:
            cursor.execute("SELECT DISTINCT typeof(admitted_units) FROM ratelimits_usage_periodusage")
            assert cursor.fetchall() == [("integer",)]


def test_a_full_total_stops_its_period_alone_and_is_said_everywhere(settings: Any) -> None:
    full, other = neighbours(2)
    elsewhere = next(name for name in map("far-{}".format, range(99)) if home_shard(name) != home_shard(full))
    overflow(full)
    for account in (other, elsewhere):
        arrive(account, {"an": 1, "au": 5})
    tally()
    assert not ShardState.objects.exclude(tallied=F("position")).exists()
    # The period is not closed, but the customer's next period and all other customers are.
    assert closed("2026-12-02") == {(full, NOVEMBER), (other, OCTOBER), (elsewhere, OCTOBER)}
    assert closed("2026-12-03") == set()
    (waits,) = open_periods(at("2026-12-03"))
    assert (waits.account, waits.complete) == (full, False)
    assert waits.why.startswith(
        "its usage is above 9,223,372,036,854,775,807, the largest number that a report can state"
    )
    with pytest.raises(NotForcedError, match="bill it by hand"):
        force(token(full), OCTOBER * 1_000_000, "ada", "due", at("2026-12-03"))
    fact = {each.name: each for each in facts()}["full"]
    assert (fact.level, fact.word) == (Level.RED, "1")
    assert full in fact.detail
    telemetry.forget()
    assert {each.name: each.value for each in telemetry.readings()}["full_totals"] == 1
    (finding,) = [line for line in findings() if "is full" in line]
    assert full in finding
    assert f"the ledger's lines say {3 * (MAX_TOTAL - 5)} admitted_units" in finding
    # A file of the month has the true number, and all other customers.
    quantities = {row.account: row.consumed_quantity for row in rows(statements("2026-10"))}
    assert quantities == {full: 3 * (MAX_TOTAL - 5), other: 5, elsewhere: 5}
    settings.RATELIMITS = {**settings.RATELIMITS, "ALERT_THRESHOLDS": [80]}
    evaluate(at("2026-12-03"))


def test_late_usage_that_fills_a_total_leaves_its_report_as_it_is() -> None:
    full, other = neighbours(2)
    for account in (full, other):
        arrive(account, {"an": 1, "au": 5})
    tally()
    closed("2026-11-02")
    arrive(full, {"an": 1, "au": MAX_TOTAL - 5})  # a line could state this, but the total is full now
    arrive(other, {"an": 1, "au": 1})
    tally()
    closed("2026-11-03")
    assert sorted(Report.objects.values_list("account", "version")) == sorted([(full, 1), (other, 1), (other, 2)])


def test_late_usage_waits_for_no_report_of_a_full_period(settings: Any) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "LATE_USAGE": "period"}
    (full,) = neighbours(1)
    arrive(full, {"an": 1, "au": 5})
    tally()
    closed("2026-11-02")
    for _batch in range(3):
        arrive(full, {"an": 1, "au": MAX_TOTAL - 5}, NOVEMBER)
    arrive(full, {"an": 1, "au": 2})
    tally()
    assert closed("2026-12-02") == set()  # perhaps December gets a report
    assert closed("2027-01-02") == {(full, OCTOBER)}
    assert Report.objects.count() == 2


def test_batches_whose_sums_fit_in_no_line_stay_apart() -> None:
    full, other = neighbours(2)
    overflow(full)
    tally()
    arrive(other, {"an": 1, "au": 5}, NOVEMBER)
    arrive(other, {"an": 1, "au": 5}, NOVEMBER)
    tally()
    ShardState.objects.update(watermark=at("2027-01-01"))
    list(compact())
    sizes = sorted(Batch.objects.values_list("first_seq", "seq"))
    assert sizes == [(1, 1), (2, 2), (3, 3), (4, 6)]


def test_totals_of_short_spans_do_not_fail_either() -> None:
    """No request counts so much; but one batch of a person's hand must not stop a shard."""
    full, other = neighbours(2)
    hour = int(datetime.now(UTC).timestamp()) // 3600 * 3600
    for _batch in range(2):
        arrive(full, {"an": MAX_TOTAL - 1, "au": 1}, hour)
        arrive(other, {"an": 2, "au": 2}, hour)
    tally()
    arrive(full, {"an": MAX_TOTAL - 1, "au": 1}, hour)
    tally()
    totals = dict(KeyTotal.objects.filter(span=3600).values_list("account", "admitted_requests"))
    assert totals == {full: MAX_TOTAL, other: 4}
    assert set(RuleTotal.objects.values_list("admitted_requests", flat=True)) == {MAX_TOTAL}


def test_a_shard_that_cannot_be_tallied_stops_no_other_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name for name in map("account-{}".format, range(20)) if home_shard(name) % 2]
    for name in names:
        arrive(name, {"an": 1, "au": 5})
    broken, add = home_shard(names[0]), tallying._add

    def refuse(using: str, shard: int, batches: Any) -> None:
        if shard == broken:
            raise DataError("bigint out of range")
        add(using, shard, batches)

    monkeypatch.setattr(tallying, "_add", refuse)
    with pytest.raises(DataError, match="out of range"):
        tally()
    assert list(ShardState.objects.filter(tallied=0, position__gt=0).values_list("shard", flat=True)) == [broken]


def test_a_shard_whose_batch_the_database_refuses_stops_no_other_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        use(f"account-{number}")
    broken, insert = home_shard("account-0"), applying.insert

    def refuse(using: str, shard_state: ShardState, *rest: Any) -> None:
        if shard_state.shard == broken:
            raise DataError("bigint out of range")
        insert(using, shard_state, *rest)

    monkeypatch.setattr(applying, "insert", refuse)
    with pytest.raises(DataError, match="out of range"):
        flow()
    monkeypatch.undo()
    expected = {home_shard(f"account-{number}") for number in range(20)} - {broken}
    assert set(Batch.objects.values_list("shard", flat=True)) == expected
    flow()
    assert Batch.objects.filter(shard=broken).exists()
