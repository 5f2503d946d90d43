"""Test that usage is counted, and its jobs run, while the floor of bills has installed nothing."""

from __future__ import annotations

import io
from typing import Any

import pytest
from django.core.management import call_command

from ratelimits import tasks
from ratelimits.models import ChainMark, PeriodUsage
from tests.support.reports.invoices import close, spend
from tests.support.usage.traffic import use

pytestmark = pytest.mark.django_db(transaction=True)


def test_beat_starts_the_tasks_of_bills_only_if_they_are_installed(
    request: pytest.FixtureRequest, settings: Any
) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "PUSH": {"lago": {"KEY": "key", "SINCE": "2026-11"}}}
    of_usage = {f"ratelimits.{name}" for name in ("seal", "drain", "compact", "alerts")}
    assert tasks.beat_schedule().keys() == of_usage | {"ratelimits.finalise", "ratelimits.push"}
    request.getfixturevalue("no_bills")
    assert tasks.beat_schedule().keys() == of_usage


def test_usage_reaches_the_ledger_and_its_totals(no_bills: None) -> None:
    use(cost=3)
    tasks.seal()
    tasks.drain()
    assert PeriodUsage.objects.get().admitted_units == 3


def test_compaction_marks_the_ends_of_no_reports(no_bills: None) -> None:
    spend("acme", "2026-10-15T12:00")
    assert len(close("2026-11-02")) == 1
    ChainMark.objects.all().delete()
    call_command("ratelimits_compact", "--mark", stdout=io.StringIO())
    assert not ChainMark.objects.exists()
