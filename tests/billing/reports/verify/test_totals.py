from __future__ import annotations

import pytest
from django.db.models import F
from django.test import override_settings

from ratelimits.billing.reports.verify.totals import verify_totals
from ratelimits.usage.models import PeriodUsage, ShardState
from tests.support.plain import PLAIN
from tests.support.reports.invoices import account, close, spend
from tests.support.usage.traffic import at, flow

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("fsync_at_once")]


@pytest.fixture
def october() -> PeriodUsage:
    """Return the total of a closed October. The shard also has usage of November, which is newer."""
    acme = account(included=5)
    spend(acme, "2026-10-15", 7)
    close("2026-11-02")
    spend(acme, "2026-11-10", 3)
    flow()
    assert list(verify_totals("default")) == []
    return PeriodUsage.objects.get(period=at("2026-10-01") // 1_000_000)


def finding_with_end(total: PeriodUsage, position: int) -> str:
    PeriodUsage.objects.filter(pk=total.pk).update(position=position)
    (finding,) = verify_totals("default")
    return finding


def test_a_total_that_ends_before_its_usage_is_an_error(october: PeriodUsage) -> None:
    finding = finding_with_end(october, october.position - 1)
    assert finding.endswith(f"but has usage of position {october.position}")


def test_a_total_that_ends_after_the_tallied_batches_is_an_error(october: PeriodUsage) -> None:
    tallied = ShardState.objects.get(shard=october.shard).tallied
    finding = finding_with_end(october, tallied + 1)
    assert finding.endswith(f"but the shard is tallied only up to {tallied}")


def test_a_total_that_ends_after_its_reports_without_usage_there_is_an_error(october: PeriodUsage) -> None:
    finding = finding_with_end(october, october.position + 1)
    assert finding.endswith(f"no usage of it after position {october.covered}, where its reports end")


@override_settings(RATELIMITS={**PLAIN, "LATE_USAGE": "period"})
def test_an_error_in_the_end_of_a_total_names_the_period_of_this_total() -> None:
    acme = account(included=5)
    spend(acme, "2026-10-15", 7)
    close("2026-11-02")
    spend(acme, "2026-10-31T23:59", 2)  # late usage, so it is on the report of November
    spend(acme, "2026-11-10", 3)
    close("2026-12-02")
    assert list(verify_totals("default")) == []
    PeriodUsage.objects.update(period_end=F("period_end") - 86_400)
    findings = list(verify_totals("default"))
    assert findings == [
        f"the total of acme (requests) is about the billing period from 2026-{month}-01T00:00:00Z to"
        f" {end}T00:00:00Z, which is not in the table of billing periods"
        for month, end in (("10", "2026-10-31"), ("11", "2026-11-30"))
    ]
