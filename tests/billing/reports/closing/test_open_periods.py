from __future__ import annotations

import html
import io
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection
from django.db.models import QuerySet
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from ratelimits.billing.models import Adjustment, Report
from ratelimits.billing.reports.closing.close import finalise, home_shard
from ratelimits.billing.reports.closing.open_periods import NotForcedError, force, open_periods
from ratelimits.billing.reports.verify.report import verify_report
from ratelimits.billing.verification import Verification
from ratelimits.models import Account
from ratelimits.usage.ledger.tally import tally
from ratelimits.usage.models import Batch, DurabilityGap, Line, PeriodUsage, ShardState
from tests.billing.reports.closing.test_close import adjust
from tests.support.reports.invoices import account, close, lines, spend, token
from tests.support.usage.traffic import at, flow, use

pytestmark = pytest.mark.django_db(transaction=True)

OCTOBER = at("2026-10-01")


@pytest.fixture
def used() -> None:
    """Add October's usage of one account; it is not known yet whether it is complete."""
    spend(account(included=3), "2026-10-15", 5)
    flow()
    ShardState.objects.update(watermark=at("2026-10-20"))


def why(now: str = "2026-11-02") -> str:
    (found,) = open_periods(at(now))
    assert (found.account, found.start, found.units) == ("acme", OCTOBER, {"requests": 5})
    return found.why


def shard() -> QuerySet[ShardState]:
    return QuerySet(ShardState).filter(shard=home_shard("acme"))


@pytest.mark.usefixtures("used")
def test_each_open_period_says_what_it_waits_for() -> None:
    name = f"shard {home_shard('acme'):02d}"
    assert why() == (
        f"{name} is complete until 2026-10-20T00:00:00Z, but must be complete until 2026-11-01T01:00:00Z:"
        " is a worker sealing and draining?"
    )
    shard().update(frozen=True)
    assert why() == f"{name} has a quarantined batch: accept or discard it"
    shard().update(frozen=False, watermark=at("2026-11-02"))
    assert why() == "its usage is complete: the next ratelimits_finalise closes it"
    shard().update(tallied=0, position=1)
    assert why() == f"{name} has batches that are not tallied yet: the next drain tallies them"
    shard().update(tallied=1)
    QuerySet(Batch).all().delete()
    assert why() == f"{name} has no batch at position 1: restore it from a backup, or close by force"


@pytest.mark.usefixtures("used")
def test_a_period_is_awaited_when_its_month_is_over() -> None:
    now = at("2026-10-31T23:59:59")
    assert list(open_periods(now)) == list(open_periods(now, awaited=True)) == []
    assert [period.awaited for period in open_periods(now, running=True)] == [False]
    # In its grace time the month is over, so people look for its report.
    (waits,) = open_periods(at("2026-11-01T00:59:59"), awaited=True)
    assert (waits.over, waits.awaited, waits.why) == (
        False,
        True,
        "it can be closed from 2026-11-01T01:00:00Z on, by this machine's clock",
    )
    (found,) = open_periods(at("2026-11-01T01:00:00"), awaited=True)
    assert found.over


def test_an_adjustment_that_was_written_past_the_form_keeps_its_account_open_and_no_other_and_is_named() -> None:
    """On SQLite the sum of two such ended every closing."""
    for name in ("acme", "initech"):
        spend(account(name, included=3), "2026-10-15", 5)
        spend(name, "2026-09-15", 5)
    adjust(9 * 10**18, "2026-09-01")
    adjust(9 * 10**18, "2026-09-01")
    assert {report.account for report in close("2026-11-02")} == {"initech"}
    assert all("units, but at most 1,099,511,627,776 are allowed: correct it" in each.why for each in open_periods())
    assert {each.account for each in open_periods()} == {"acme"}
    with pytest.raises(NotForcedError, match="at most 1,099,511,627,776 are allowed"):
        force(token(), OCTOBER, "ada", "in a hurry")
    assert sum("acme cannot be closed" in finding for finding in Verification().findings()) == 2
    QuerySet(Adjustment).update(quantity=9)
    assert {report.account for report in close("2026-11-02")} == {"acme"}
    assert list(Verification().findings()) == []


def test_usage_whose_sum_no_database_holds_keeps_its_account_open_and_no_other() -> None:
    for name in ("acme", "initech"):
        for key in ("api_key:1", "api_key:2"):
            spend(account(name) if key == "api_key:1" else name, "2026-10-15", 5, key=key)
    flow()
    QuerySet(Line).filter(account="acme").update(admitted_units=6 * 10**18)
    spend("acme", "2026-10-15", 5, key="api_key:1")
    flow()
    QuerySet(Line).filter(account="acme").update(admitted_units=6 * 10**18)
    assert {report.account for report in close("2026-11-02")} == {"initech"}
    assert any("was changed after it was written" in finding for finding in Verification().findings())


@pytest.mark.usefixtures("used")
def test_a_period_that_is_not_over_waits_for_its_end() -> None:
    (found,) = open_periods(at("2026-10-29"), running=True)
    why = "in UTC it ends only at 2026-11-01 00:00, and it can be closed from 2026-11-01T01:00:00Z on"
    assert (found.over, found.why) == (False, f"{why}, by this machine's clock")


def test_a_month_that_is_over_in_utc_but_not_in_new_york_is_named_with_the_reason(
    admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Look for January at 01:30 UTC on 1 February: it lasts until 05:00 UTC in New York, and is in no final file."""
    spend(account(timezone="America/New_York"), "2026-01-15", 5)
    spend(account("anchored", billing_anchor="2026-01-10T00:00"), "2026-01-15", 5)
    flow()
    for module in ("closing.open_periods", "closing.close"):
        monkeypatch.setattr(f"ratelimits.billing.reports.{module}.time_ns", lambda: at("2026-02-01T01:30") * 1000)
    why = (
        "in America/New_York it ends only at 2026-02-01 00:00, and it can be closed from 2026-02-01T06:00:00Z on, by"
        " this machine's clock"
    )
    (found,) = (period for period in open_periods(awaited=True) if period.awaited)
    assert (found.account, found.name, found.why) == ("acme", "2026-01", why)
    out, said = io.StringIO(), io.StringIO()
    call_command("ratelimits_finalise", stdout=out)
    assert out.getvalue() == f"open: acme 2026-01 (5 requests): {why}\n"
    call_command("ratelimits_report", period="2026-01", final_only=True, stdout=io.StringIO(), stderr=said)
    assert f"\nacme 2026-01 is not final: {why}.\n" in said.getvalue()
    reports = reverse("admin:ratelimits_billing_report_changelist")
    for page in (
        admin_client.get(f"{reports}open/"),
        admin_client.get(f"{reports}open/", {"month": "2026-01"}),
        admin_client.get(f"{reports}download/", {"period": "2026-01", "final": "1"}, follow=True),
    ):
        text = html.unescape(page.content.decode())
        assert why in text
        assert "acme" in text
        assert "January 2026" in text
        assert "anchored" not in text
    assert "anchored" in admin_client.get(f"{reports}open/", {"month": "2026-02"}).content.decode()
    wrong = admin_client.get(f"{reports}open/", {"month": "2026-13"}, follow=True).content.decode()
    assert "is not a month" in wrong


@pytest.mark.usefixtures("used")
def test_usage_in_shards_that_are_no_more_says_so(settings: Any) -> None:
    assert home_shard("acme") >= 1
    settings.RATELIMITS = {**settings.RATELIMITS, "SHARDS": 1}
    ShardState.objects.filter(shard__lt=1).update(watermark=at("2026-11-02"))
    assert "the shard is no longer drained, because SHARDS is 1" in why()


def test_a_closed_period_is_not_open(used: None) -> None:
    ShardState.objects.update(watermark=at("2026-11-02"))
    assert len(finalise(at("2026-11-02"))) == 1
    assert list(open_periods(at("2026-11-02"))) == []


@pytest.mark.usefixtures("used")
def test_a_period_that_is_closed_by_force_declares_that_usage_may_be_missing() -> None:
    shard().update(frozen=True)
    report = force(token(), OCTOBER, "ada", "the invoice is due", at("2026-11-02"))
    assert report.gaps == "forced 2026-10-01T00:00:00Z/2026-10-31T23:59:59.999999Z"
    assert [line["overage_quantity"] for line in lines(report)] == [2]
    assert report.included == {"requests": 3}
    gap = DurabilityGap.objects.get(kind="forced")
    assert gap.detail == (
        f"ada: the invoice is due (shard {home_shard('acme'):02d} has a quarantined batch: accept or discard it)"
    )
    assert list(verify_report(report)) == []


@pytest.mark.usefixtures("used")
def test_what_comes_after_a_closing_by_force_is_a_further_version() -> None:
    force(token(), OCTOBER, "ada", "the invoice is due", at("2026-11-02"))
    spend(Account.objects.get(), "2026-10-16", 4)
    flow()
    (second,) = finalise(at("2026-11-03"))
    assert second.version == 2
    assert [line["consumed_quantity"] for line in lines(second)] == [4]


@pytest.mark.usefixtures("used")
def test_a_missing_batch_is_still_named_by_verify_after_a_closing_by_force() -> None:
    QuerySet(Batch).all().delete()
    report = force(token(), OCTOBER, "ada", "no backup has it", at("2026-11-02"))
    assert report.chain_head == ""
    assert any("has no batch at position 1" in finding for finding in verify_report(report))


@pytest.mark.usefixtures("used")
@pytest.mark.parametrize(
    ("start", "reason", "now", "message"),
    [
        (OCTOBER, " ", "2026-11-02", "give a reason"),
        (OCTOBER, "why not", "2026-10-31", "it cannot be billed before"),
        (at("2026-09-01"), "why not", "2026-11-02", "has no open period"),
    ],
)
def test_what_cannot_be_forced_is_refused_with_a_reason(start: int, reason: str, now: str, message: str) -> None:
    with pytest.raises(NotForcedError, match=message):
        force(token(), start, "ada", reason, at(now))
    assert not Report.objects.exists()
    assert not DurabilityGap.objects.filter(kind="forced").exists()


def test_the_command_says_what_is_open_and_closes_by_force() -> None:
    spend(account(), "2025-10-15", 5)
    flow()
    ShardState.objects.update(watermark=at("2025-10-20"))
    out = io.StringIO()
    call_command("ratelimits_finalise", "--open", stdout=out)
    assert out.getvalue().startswith("open: acme 2025-10 (5 requests): shard ")
    about = ["--account", "acme", "--force", "2025-10"]
    with pytest.raises(CommandError, match="needs --account, --by and --reason"):
        call_command("ratelimits_finalise", *about)
    out = io.StringIO()
    call_command("ratelimits_finalise", *about, "--by", "ada", "--reason", "due", stdout=out)
    assert out.getvalue().startswith("acme 2025-10 v1: 1 line, ")
    with pytest.raises(CommandError, match=r"'2025-10' is not one of the open periods of acme \(these are: none\)"):
        call_command("ratelimits_finalise", *about, "--by", "ada", "--reason", "due")


def test_the_command_says_how_many_periods_still_run_if_none_is_over() -> None:
    def said() -> str:
        out = io.StringIO()
        call_command("ratelimits_finalise", "--open", stdout=out)
        return out.getvalue()

    assert said() == "No period that has ended is still open. Periods that still run: 0.\n"
    use("acme", now=None)
    flow()
    assert said() == "No period that has ended is still open. Periods that still run: 1.\n"
    with CaptureQueriesContext(connection) as few:
        said()
    for number in range(20):
        use(f"customer{number}", now=None)
    flow()
    tally()
    with CaptureQueriesContext(connection) as many:
        assert said() == "No period that has ended is still open. Periods that still run: 21.\n"
    assert len(many) == len(few)


def test_an_account_whose_periods_cannot_be_read_hides_no_other_account() -> None:
    for name in ("acme", "other"):
        spend(account(name), "2026-10-15", 5)
    flow()
    PeriodUsage.objects.filter(account="acme").update(period=2**62, period_end=1)
    acme, other = open_periods(at("2026-12-01"))
    assert (acme.account, acme.why[:21]) == ("acme", "its usage belongs to ")
    assert other.units == {"requests": 5}
    assert [report.account for report in close("2026-12-02")] == ["other"]
