from __future__ import annotations

import pytest

from ratelimits.billing.models import Report
from ratelimits.billing.reports.cross_check import Comparison, compare
from ratelimits.billing.reports.exports import FORMATS
from ratelimits.billing.reports.statements import statement
from ratelimits.billing.reports.verify.report import verify_report
from ratelimits.models.accounts.named import named_now
from ratelimits.quota.counting import Kind
from ratelimits.usage.counting.process_totals import TotalKey
from ratelimits.usage.ledger import process_totals
from tests.support.reports.invoices import account, close, spend
from tests.support.usage.traffic import at, flow

pytestmark = pytest.mark.django_db(transaction=True)


def say(requests: int, moment: str = "2026-10-15", kind: Kind = "admitted", key: str = "") -> None:
    place = TotalKey(kind, "acme", key, "requests", at(moment) // 10**6)
    process_totals.write(f"process {moment} {kind}", {place: (requests, requests)})


def october() -> Comparison:
    (found,) = compare("default", named_now("default", ["acme"])["acme"], at("2026-10-01"), at("2026-11-01"))
    return found


def printed(report: Report) -> str:
    return b"".join(FORMATS["csv"].stream(statement(report).rows)).decode()


def test_a_report_prints_that_processes_were_granted_more_than_the_ledger_has() -> None:
    spend(account(), "2026-10-15")
    say(3)
    (report,) = close("2026-11-02")
    assert report.gaps == "witness requests processes=3 ledger=1"
    assert report.gaps in printed(report)
    assert list(verify_report(report)) == []


def test_a_report_says_nothing_of_a_witness_that_agrees_or_had_less_to_say() -> None:
    acme = account()
    for _ in range(3):
        spend(acme, "2026-10-15")
    say(2)
    (report,) = close("2026-11-02")
    assert report.gaps == ""
    assert october().holds


def test_usage_that_is_recovered_later_takes_the_sentence_off_the_next_version() -> None:
    acme = account()
    spend(acme, "2026-10-15")
    say(2)
    (first,) = close("2026-11-02")
    spend(acme, "2026-10-15")
    (second,) = close("2026-11-03")
    assert ("witness" in first.gaps, "witness" in second.gaps) == (True, False)


@pytest.mark.parametrize("moment", ["2026-10-01T00:00", "2026-10-31T23:45"])
def test_a_clock_that_is_off_at_a_period_s_edge_is_no_alarm(moment: str) -> None:
    spend(account(), "2026-10-15")
    flow()
    say(1)
    say(1, moment)
    found = october()
    assert (found.ledger, found.counted, found.edge, found.holds) == (1, 2, 1, True)


def test_what_is_lost_in_between_is_an_alarm_all_the_same() -> None:
    spend(account(), "2026-10-15")
    flow()
    say(1, "2026-10-01T00:15")
    say(1, "2026-10-31T23:30")
    assert not october().holds


def test_a_time_zone_that_changed_meanwhile_is_no_alarm() -> None:
    acme = account()
    spend(acme, "2026-10-15")
    acme.timezone = "Europe/Berlin"
    spend(acme, "2026-10-31T23:30")
    flow()
    say(1)
    say(1, "2026-10-31T23:30")
    assert october().holds
