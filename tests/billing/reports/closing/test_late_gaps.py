"""Test what becomes known after a period was closed: gaps, and lost replies."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connections
from django.db.models import QuerySet

from ratelimits.billing.models import Report, ReportLine
from ratelimits.billing.reports.closing.close import home_shard
from ratelimits.billing.reports.closing.late_gaps import LateGaps
from ratelimits.billing.reports.statements import version_rows
from ratelimits.billing.reports.verify.printed import verify_printed
from ratelimits.billing.reports.verify.report import verify_report
from ratelimits.billing.reports.verify.totals import verify_totals
from ratelimits.models import Account
from ratelimits.models.accounts.named import named_now
from ratelimits.usage.counting.process_totals import TotalKey
from ratelimits.usage.ledger import crash, gaps, process_totals
from ratelimits.usage.models import Batch, DurabilityGap, GapChange, GapKind
from tests.support.reports.invoices import account, close, spend
from tests.support.reports.priced import findings, owed, priced
from tests.support.usage.traffic import at

pytestmark = pytest.mark.django_db(transaction=True)


def lost(
    count: int, *, process: str = "p1", name: str = "acme", key: str = "api_key:1", day: str = "2026-10-15"
) -> None:
    """Write how many requests of a process got no answer in a quarter of an hour."""
    place = TotalKey("unanswered", name, key, "requests", at(day) // 10**6)
    process_totals.write(process, {place: (count, count)})


def shown(report: Report) -> list[tuple[Any, ...]]:
    lines = ReportLine.objects.filter(report=report).order_by("number")
    return list(lines.values_list("key", "meter", "charge_class", "consumed_quantity", "unknown_count"))


@pytest.fixture
def first() -> Report:
    """Return October's first report of one account."""
    spend(account(), "2026-10-15", 5)
    (report,) = close("2026-11-02")
    return report


def test_a_gap_that_is_declared_after_closing_is_a_line_of_a_further_version(first: Report) -> None:
    gaps.declare("default", GapKind.WIPE, "1", shard=home_shard("acme"), since=at("2026-10-20"), until=at("2026-10-21"))
    (second,) = close("2026-11-03")
    assert (second.version, second.gaps) == (2, "wipe 2026-10-20T00:00:00Z/2026-10-21T00:00:00Z")
    assert shown(second) == [("", "", "correction", 0, 0)]
    assert [row.durability_gap for row in version_rows(second)] == [second.gaps]
    assert close("2026-11-04") == []
    assert not GapChange.objects.exists()
    assert [*verify_report(second), *verify_totals("default"), *verify_printed("default")] == []


def test_a_gap_at_the_end_of_the_longest_period_is_found(first: Report) -> None:
    start = first.period_end - 36 * 86_400 * 10**6
    QuerySet(Report).update(period_start=start)
    last = first.period_end - 10**6
    gaps.declare("default", GapKind.WIPE, "1", shard=home_shard("acme"), since=last, until=last)
    assert LateGaps("default").starts == {named_now("default", ["acme"])["acme"].pk: {start}}


def test_replies_whose_loss_is_told_after_closing_are_counted_in_a_further_version(first: Report) -> None:
    lost(3)
    (second,) = close("2026-11-03")
    assert shown(second) == [("api_key:1", "requests", "correction", 0, 3)]
    assert "unknown 2026-10-15T00:00:00Z" in second.gaps
    lost(2, process="p2")
    lost(4, process="p2", key="api_key:2")
    (third,) = close("2026-11-04")
    assert shown(third) == [
        ("api_key:1", "requests", "correction", 0, 2),
        ("api_key:2", "requests", "correction", 0, 4),
    ]
    assert close("2026-11-05") == []
    assert [finding for report in Report.objects.all() for finding in verify_report(report)] == []
    names = list(ReportLine.objects.values_list("line_id", flat=True))
    assert len(names) == len(set(names))
    known = ReportLine.objects.get(report=third, key="api_key:1")
    assert known.corrects_line_id == ""


def test_a_line_of_lost_replies_names_the_one_that_it_corrects() -> None:
    spend(account(), "2026-10-15", 5)
    lost(1, key="api_key:2")
    (first,) = close("2026-11-02")
    lost(2, key="api_key:2")
    (second,) = close("2026-11-03")
    old, new = (ReportLine.objects.get(report=report, key="api_key:2") for report in (first, second))
    assert (old.unknown_count, new.unknown_count, new.corrects_line_id) == (1, 1, old.line_id)


def test_late_usage_and_late_losses_are_one_version(first: Report) -> None:
    spend(Account.objects.get(), "2026-10-16", 2)
    lost(3)
    (second,) = close("2026-11-03")
    assert shown(second) == [("api_key:1", "requests", "correction", 2, 3)]


def test_losses_without_an_account_are_told_too() -> None:
    spend("", "2026-10-15", key="anonymous")
    close("2026-11-02")
    lost(3, name="", key="anonymous")
    (second,) = close("2026-11-03")
    assert shown(second) == [("anonymous", "requests", "correction", 0, 3)]


def recovers() -> None:
    gap = DurabilityGap.objects.filter(kind=GapKind.MISSING)
    gaps.change("default", gap, recovered_at="2026-11-02T12:00Z")


def another_shard() -> None:
    gaps.declare(
        "default", GapKind.WIPE, "2", shard=home_shard("acme") + 1, since=at("2026-10-20"), until=at("2026-10-21")
    )


def another_month() -> None:
    gaps.declare("default", GapKind.WIPE, "3", shard=home_shard("acme"), since=at("2026-11-01"), until=at("2026-11-02"))


def another_account() -> None:
    lost(1, name="other")


@pytest.mark.parametrize(
    ("change", "versions"), [(recovers, 1), (another_shard, 0), (another_month, 0), (another_account, 0)]
)
def test_only_the_reports_that_a_gap_concerns_are_corrected(change: Callable[[], None], versions: int) -> None:
    spend(account(), "2026-10-15", 5)
    about: dict[str, Any] = {"shard": home_shard("acme"), "since": at("2026-10-20"), "until": at("2026-10-21")}
    gaps.declare("default", GapKind.MISSING, "1", **about)
    close("2026-11-02")
    change()
    written = close("2026-11-03")
    assert len(written) == versions
    assert all(report.gaps.endswith("recovered") for report in written)
    assert not GapChange.objects.exists()


def test_a_change_stays_known_until_every_account_that_it_concerns_was_looked_at(first: Report) -> None:
    spend(account("broken"), "2026-10-15", 5)
    close("2026-11-02")
    gaps.declare("default", GapKind.WIPE, "1", since=at("2026-10-20"), until=at("2026-10-21"))
    (kept,) = Batch.objects.filter(shard=home_shard("broken"))
    QuerySet(Batch).filter(pk=kept.pk).delete()
    assert [(report.account, report.version) for report in close("2026-11-03")] == [("acme", 2)]
    assert GapChange.objects.count() == 1
    kept.save(force_insert=True)
    assert [(report.account, report.version) for report in close("2026-11-04")] == [("broken", 2)]
    assert not GapChange.objects.exists()


def test_a_line_that_carries_a_gap_costs_nothing() -> None:
    spend(priced(minimum="30"), "2026-10-15", 8)
    (first,) = close("2026-11-02")
    gaps.declare("default", GapKind.WIPE, "1", since=at("2026-10-20"), until=at("2026-10-21"))
    (second,) = close("2026-11-03")
    assert owed(second) == owed(first) == 30
    assert findings() == ""


def test_a_gap_that_is_declared_while_a_period_closes_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    def other_process() -> None:
        try:
            lost(3)
            LateGaps("default").forget(())  # what touches no report
        finally:
            connections["default"].close()

    other = threading.Thread(target=other_process)

    def reached(point: str) -> None:
        if point == "close:marked" and other.ident is None:
            other.start()
            other.join(0.5)  # It may have to wait until the period is closed.

    spend(account(), "2026-10-15", 5)
    with monkeypatch.context() as patched:
        patched.setattr(crash, "reached", reached)
        (report,) = close("2026-11-02")
        other.join()
    assert report.gaps == ""
    (second,) = close("2026-11-03")
    assert "unknown 2026-10-15T00:00:00Z" in second.gaps
    assert close("2026-11-04") == []
