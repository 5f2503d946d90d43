"""Test that the lists of usage and reports fit a screen of 1,280 pixels, beside Django's navigation and filters."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import User
from django.urls import reverse

from ratelimits.billing.models import Adjustment, Report, ReportLine
from ratelimits.billing.reports.closing.close import home_shard
from ratelimits.moments import moment
from ratelimits.usage.models import DurabilityGap, Line, PeriodUsage, ShardState
from tests.browser.conftest import OpenPage, staff
from tests.support.reports.invoices import account, close, spend
from tests.support.rows import rule
from tests.support.usage.traffic import at, flow

pytestmark = [
    pytest.mark.system,
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("fsync_at_once"),
]
#: The pixels by which the page, or a part of it that would scroll by itself, is wider than what is seen of it.
_BEYOND = """() => {
    const parts = [document.documentElement, ...document.querySelectorAll('.results, .ratelimits-table')];
    return Math.max(...parts.map((part) => part.scrollWidth - part.clientWidth));
}"""
_LISTS = (Report, ReportLine, Adjustment, PeriodUsage, Line, DurabilityGap)


@pytest.fixture
def month() -> None:
    """Let an account with common names have two versions of a report, an open period, an adjustment and a gap."""
    monthly = rule("monthly-requests", bills=True)
    payer = account("acme-industries", included=1_000, timezone="America/Argentina/Buenos_Aires")
    about: dict[str, Any] = {"rule": monthly.pk, "version": monthly.version, "key": "api_key:9f3c1a27"}
    spend(payer, "2025-10-10T12:00", 1_234_567, **about)
    spend(payer, "2025-10-10T12:00", 98_765, meter="tokens", **{**about, "rule": 0})
    (report,) = close("2025-11-03")
    spend(payer, "2025-10-30", 1_000, **about)
    close("2025-11-04")
    author = User.objects.create(username="finance")
    Adjustment.objects.create(
        account=payer.identifier,
        period_start=moment(report.period_start),
        meter="requests",
        quantity=-1_000,
        reason="goodwill after the outage of 4 October",
        author=author,
    )
    spend(payer, "2025-11-10", 76_543, **about)
    spend("other", "2025-11-10", 2)
    flow()
    ShardState.objects.filter(shard=home_shard("other")).update(watermark=at("2025-12-03"))
    span = {"since": at("2025-10-10"), "until": at("2025-10-11")}
    DurabilityGap.objects.create(event="x", kind="restart", shard=1, **span)
    DurabilityGap.objects.create(event="y", kind="missing", shard=1, units=1_234_567, requests=123_456, **span)


@pytest.mark.usefixtures("month")
def test_lists_fit_1280_pixels(open_page: OpenPage) -> None:
    page = open_page(staff(), viewport={"width": 1280, "height": 900})
    wide = {}
    urls = [reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_changelist") for model in _LISTS]
    for url in [*urls, reverse("admin:ratelimits_billing_report_open")]:
        page.goto(url)
        assert page.locator("table tbody tr").count(), url
        beyond = page.evaluate(_BEYOND)
        if beyond:
            wide[url] = beyond
    assert wide == {}
