"""Test attacks by a database administrator who knows the source: stopping a verification, or hiding a change."""

from __future__ import annotations

import io
from collections.abc import Callable
from decimal import Decimal
from itertools import count
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import DatabaseError, connection, transaction
from django.db.models import JSONField, QuerySet, Value

from ratelimits.billing.models import PlanPrice, Report, ReportLine
from ratelimits.billing.reports.closing.close import home_shard
from ratelimits.billing.reports.verify import totals
from ratelimits.billing.verification import Verification
from ratelimits.models import Account, Customer, FrozenPeriod, PlanInclusion
from ratelimits.usage.ledger.gaps import declare
from ratelimits.usage.models import ArchivedRange, Batch, DurabilityGap, GapKind, Line, PeriodUsage, ShardState
from tests.billing.reports.closing.test_close import adjust
from tests.support.reports.edits import spend as spend_by_terms
from tests.support.reports.invoices import account, close, spend
from tests.support.reports.priced import priced
from tests.support.reports.tampering import write
from tests.support.usage.traffic import at, flow

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _october(fsync_at_once: None) -> None:
    """Make two versions of an October, with an adjustment and a gap."""
    declare("default", GapKind.RESTART, "test", since=at("2026-10-15"), until=at("2026-10-16"))
    spend(account(included=5), "2026-10-15", 7)
    close("2026-11-02")
    adjust(-1)
    close("2026-11-03")


def findings() -> list[str]:
    return list(Verification().findings())


def _reports(**values: Any) -> Callable[[], object]:
    return lambda: Report.objects.filter(version=2).update(**values)


NONSENSE: dict[str, Callable[[], object]] = {
    "since is a number": _reports(since=5),
    "since is nothing": _reports(since=Value(None, JSONField())),
    "since is a list": _reports(since=["1"]),
    "a period of 5,000 digits": _reports(since={"9" * 5000: {}}),
    "a position larger than any": _reports(chain={"0": 2**70}),
    "a position below 0": _reports(chain={"0": -1}),
    "a shard larger than any": _reports(chain={"9" * 30: 1}),
    "2,000 shards": _reports(chain={str(shard): 1 for shard in range(2000)}),
    "included is a text": _reports(included={"requests": "x"}),
    "included is a list": _reports(included=[1]),
    "prices are a list": _reports(prices=[1]),
    "amounts are a number": _reports(amounts=7),
    "prices of nothing": _reports(prices={"periods": {"x": None}}, amounts={"periods": 1, "total": 2}),
    "a period of no calendar": _reports(period_start=2**62),
    "a period that ends in no calendar": _reports(period_end=2**62),
    "a usage of no calendar": lambda: PeriodUsage.objects.update(period=-(2**62)),
    "an end of no calendar": lambda: PeriodUsage.objects.update(period_end=2**62),
    "a line of no calendar": lambda: ReportLine.objects.update(charge_period_start=2**62),
    "a gap of no calendar": lambda: DurabilityGap.objects.update(since=2**62, until=2**62 + 1),
    "a billing period of no calendar": lambda: FrozenPeriod.objects.update(start=2**62, end=2**62),
    "a batch of half a part": lambda: Batch.objects.update(parts=b"x" * 33),
    "a shard of no number": lambda: ShardState.objects.update(head="é" * 64, incarnation="x"),
    "an anchor that is none": lambda: QuerySet(Account).update(billing_anchor="never", timezone="Nowhere/At_All"),
}


#: Texts in columns of numbers, which SQLite accepts.
TEXTS = (
    ("usage_line", "admitted_units"),
    ("usage_line", "bin"),
    ("usage_batch", "position"),
    ("usage_batch", "cum"),
    ("usage_shardstate", "tallied"),
    ("usage_periodusage", "covered"),
    ("billing_report", "period_end"),
    ("billing_reportline", "overage_quantity"),
    ("billing_adjustment", "quantity"),
    ("usage_durabilitygap", "until"),
)


def test_no_value_that_the_database_takes_ends_a_verification() -> None:
    assert findings() == []
    for change in NONSENSE.values():
        with transaction.atomic():
            change()
            assert findings() != []
            transaction.set_rollback(True)


def test_no_text_in_a_column_of_numbers_ends_a_verification() -> None:
    for table, column in TEXTS:
        with transaction.atomic(), connection.cursor() as cursor:
            try:
                with transaction.atomic():
                    cursor.execute(f"UPDATE ratelimits_{table} SET {column} = %s", ["many"])
            except DatabaseError:
                assert connection.vendor != "sqlite"
            else:
                assert findings() != [], (table, column)
            transaction.set_rollback(True)


def test_a_table_whose_rows_are_others_each_time_does_not_keep_a_verification_from_its_end() -> None:
    columns = [field.attname for field in Batch._meta.concrete_fields if field.attname != "id"]
    away = "abs(random() % 1000000)" if connection.vendor == "sqlite" else "floor(random() * 1000000)::bigint"
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE ratelimits_usage_batch RENAME TO batches_in_truth")
        cursor.execute(
            f"CREATE VIEW ratelimits_usage_batch AS"
            f" SELECT id + 1000 + {away} AS id, {', '.join(columns)} FROM batches_in_truth"
        )
    assert any("in each of 50 tries batches were deleted" in finding for finding in findings())


def test_totals_that_never_rest_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(totals, "_TRIES", 3)
    ShardState.objects.create(shard=999)
    PeriodUsage.objects.update(admitted_units=1)

    def restless(execute: Any, *query: Any) -> Any:
        if "ratelimits_usage_archivedrange" in query[0]:
            with connection.cursor() as cursor:
                cursor.execute("UPDATE ratelimits_usage_shardstate SET tallied = tallied + 1 WHERE shard = 999")
        return execute(*query)

    with connection.execute_wrapper(restless):
        found = list(totals.verify_totals("default"))
    assert found == ["the totals of acme cannot be compared: in each of 3 tries they changed while they were read"]


def test_a_name_cannot_write_what_a_verification_did_not_find() -> None:
    Line.objects.update(key="x\n\x1b[2J\x1b[HNo errors were found.")
    out = io.StringIO()
    with pytest.raises(CommandError, match="has errors"):
        call_command("ratelimits_verify", "--all", stdout=out, stderr=io.StringIO())
    assert "x\\n\\x1b[2J\\x1b[HNo errors were found." in out.getvalue()
    assert "\nNo errors were found." not in out.getvalue()
    assert "\x1b" not in out.getvalue()


def test_an_allowance_that_was_raised_only_while_a_period_was_closed_is_named() -> None:
    history = PlanInclusion.history.model
    spend("acme", "2026-11-15", 900)
    for quantity in (1000, 5):
        QuerySet(PlanInclusion).update(quantity=quantity)
        QuerySet(history).update(quantity=quantity)
        close("2026-12-02")
    report = Report.objects.get(period_start=at("2026-11-01"))
    assert report.included == {"requests": 1000}
    (finding,) = findings()
    assert "includes {'requests': 1000} of 'plan-acme', but its account's terms give {'requests': 5}" in finding


def test_a_month_that_was_cut_in_two_for_two_allowances_is_named() -> None:
    start, end = at("2026-11-01"), at("2026-11-08")
    customer = Customer.objects.get(names__identifier="acme")
    write(FrozenPeriod(customer=customer, start=start, end=end, timezone="UTC", label="2026-11"))
    for day in ("2026-11-03", "2026-11-20"):
        spend_by_terms("acme", day, 5)
    close("2026-12-02")
    cut = Report.objects.filter(period_start__gte=start)
    assert [report.included for report in cut] == [{"requests": 5}] * 2
    assert any("ends when no billing month of its account starts" in finding for finding in findings())


def test_usage_that_a_version_leaves_out_is_named_without_a_key() -> None:
    spend("acme", "2026-10-20", 3)
    (report,) = close("2026-11-04")
    assert findings() == []
    period = str(report.period_start // 10**6)
    assert report.since[period] != report.chain
    Report.objects.filter(pk=report.pk).update(since={period: {}})
    assert any("some usage is on no report, or on two" in finding for finding in findings())


def test_open_usage_that_is_gone_as_if_it_had_been_archived_is_named() -> None:
    other = next(name for number in count() if home_shard(name := f"other{number}") != home_shard("acme"))
    spend(other, "2026-11-15", 3)
    flow()
    assert findings() == []
    batch = Batch.objects.get(shard=home_shard(other))
    ends = {"first_seq": batch.first_seq, "last_seq": batch.seq, "first_position": 1, "last_position": batch.position}
    about = {"shard": batch.shard, "incarnation": batch.incarnation, "digest": batch.digest}
    ArchivedRange.objects.create(archive="old", file_digest="0" * 64, **about, **ends)
    batch.lines()._raw_delete("default")
    Batch.objects.filter(pk=batch.pk)._raw_delete("default")
    assert any(f"the total of {other} (requests, rule 1)" in finding for finding in findings())


def test_with_prices_of_a_plan_that_was_changed_after_it_was_billed_verify_still_says_what_was_billed() -> None:
    """Verify names a price that was changed by raw SQL; it names neither a normal edit of a price nor the report."""
    spend(priced("globex", unit_price="0.10"), "2026-10-15", 9)
    (report,) = close("2026-11-04")
    assert report.amounts["total"] == {"EUR": "0.40"}
    PlanPrice.objects.update(unit_price=Decimal("0.2"))
    assert findings() == []
    QuerySet(PlanPrice).update(unit_price=Decimal("0.3"))
    assert any(f"price {PlanPrice.objects.get().pk} differs from its history" in finding for finding in findings())
    call_command("ratelimits_reload", stdout=io.StringIO(), stderr=io.StringIO())
    assert findings() == []
    history: Any = PlanPrice.history
    (billed,) = report.prices["periods"].values()
    version = billed["meters"]["requests"]["version"]
    history.filter(version=version).update(unit_price=Decimal("0.3"))
    assert any("its price of requests has" in finding for finding in findings())
