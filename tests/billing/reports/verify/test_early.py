"""Test that verify names a period that was closed too early: by usage that waits in Redis or came later."""

from __future__ import annotations

import pytest
from django.conf import settings
from django.test import override_settings

from ratelimits.billing.models import Report
from ratelimits.billing.reports.closing.close import finalise
from ratelimits.billing.reports.closing.open_periods import force
from ratelimits.billing.verification import Verification
from ratelimits.models import Account
from ratelimits.usage.ledger.gaps import declare
from ratelimits.usage.models import GapKind, ShardState
from tests.support.reports.invoices import account, close, spend, token
from tests.support.usage.traffic import at, flow

pytestmark = pytest.mark.django_db

END = at("2026-11-01")


@pytest.fixture
def acme() -> Account:
    """Put forty requests of October into the ledger, and leave seven more in Redis."""
    acme = account()
    spend(acme, "2026-10-15", 40)
    flow()
    ShardState.objects.update(watermark=at("2026-10-16"))
    spend(acme, "2026-10-31", 7)
    return acme


def findings() -> list[str]:
    return list(Verification().findings())


@pytest.mark.usefixtures("acme")
def test_a_watermark_that_was_moved_by_hand_is_named_before_and_after_the_usage_comes() -> None:
    assert findings() == []
    ShardState.objects.update(watermark=at("2026-11-02"))
    (finding,) = findings()
    assert "is complete until 2026-11-02" in finding
    assert "opened at 2026-10-31 00:00:00 UTC, still waits in Redis" in finding
    (report,) = finalise(at("2026-11-02"))
    assert report.lines.get().consumed_quantity == 40
    flow()
    ShardState.objects.update(watermark=at("2026-11-02"))
    finalise(at("2026-11-02"))
    (finding,) = findings()
    assert "opened at 2026-10-31 00:00:00 UTC, arrived after report acme 2026-10 v1 was finalised" in finding


@pytest.mark.usefixtures("acme")
def test_what_a_declared_gap_explains_is_no_finding() -> None:
    ShardState.objects.update(watermark=at("2026-11-02"))
    (report,) = finalise(at("2026-11-02"))
    flow()
    (shard,) = map(int, report.chain)
    declare("default", GapKind.RESTART, "it came back", shard=shard, since=at("2026-10-30"), until=END)
    close("2026-11-02")
    assert findings() == []


@pytest.mark.usefixtures("acme")
def test_a_period_that_was_closed_by_force_says_so_itself() -> None:
    force(token(), at("2026-10-01"), "ada", "no backup has the batch", at("2026-11-02"))
    flow()
    close("2026-11-02")
    assert Report.objects.count() == 2
    assert findings() == []


@pytest.mark.usefixtures("acme")
def test_a_watermark_that_was_moved_back_is_named() -> None:
    (report,) = close("2026-11-02")
    assert findings() == []
    ShardState.objects.filter(pk=int(*report.chain)).update(watermark=at("2026-10-20"))
    (finding,) = findings()
    assert "is complete until 2026-10-20" in finding
    assert "report acme 2026-10 v1 is final, and its period ends later, at 2026-11-01" in finding


@pytest.mark.usefixtures("acme")
def test_it_says_that_redis_could_not_be_asked() -> None:
    away = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "redis://127.0.0.1:1/0"}
    with override_settings(CACHES={**settings.CACHES, "ratelimits": away}):
        verification = Verification()
        assert list(verification.findings()) == []
        assert any("Redis does not answer" in sentence for sentence in verification.unchecked())
    assert "watermarks" not in verification.checked
