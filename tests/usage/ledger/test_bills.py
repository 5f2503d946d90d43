"""Test that usage is counted, and its jobs run, while the floor of bills has installed nothing."""

from __future__ import annotations

import io
import json
import os
import sys
from typing import Any

import pytest
from django.core.management import call_command

from ratelimits.status import additions
from ratelimits.usage import tasks
from ratelimits.usage.models import ChainMark, PeriodUsage, TaskRun
from tests.support import forked
from tests.support.reports.invoices import close, spend
from tests.support.usage.traffic import use

pytestmark = pytest.mark.django_db(transaction=True)

OF_USAGE = {f"ratelimits.{name}" for name in ("seal", "drain", "compact", "alerts")}
OF_BILLS = {"ratelimits.finalise", "ratelimits.push"}
PUSH = {"lago": {"KEY": "key", "SINCE": "2026-11"}}
#: Asks for the schedule when the first app is ready, before any floor has installed its functions.
ASKS_EARLY = """
import django
from ratelimits.apps import RatelimitsConfig

def ready(app):
    from ratelimits.usage.tasks import beat_schedule
    print(*beat_schedule())

RatelimitsConfig.ready = ready
django.setup()
"""


def test_beat_starts_the_tasks_of_bills_only_if_they_are_installed(
    request: pytest.FixtureRequest, settings: Any
) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "PUSH": PUSH}
    assert tasks.beat_schedule().keys() == OF_USAGE | OF_BILLS
    request.getfixturevalue("no_bills")
    assert tasks.beat_schedule().keys() == OF_USAGE


def test_an_app_that_is_ready_earlier_gets_the_whole_schedule() -> None:
    environment = {**os.environ, "RATELIMITS_TEST_PUSH": json.dumps(PUSH)}
    command = [sys.executable, "-c", ASKS_EARLY]
    done = forked.run(command, env=environment, check=True, capture_output=True, text=True)
    assert set(done.stdout.split()) == OF_USAGE | OF_BILLS


def test_the_status_page_has_the_task_of_bills_only_if_they_are_installed(request: pytest.FixtureRequest) -> None:
    def tasks_shown() -> set[str]:
        return {task.name for added in additions.registered for task in added.tasks}

    with_bills = tasks_shown()
    request.getfixturevalue("no_bills")
    assert with_bills - tasks_shown() == {TaskRun.Task.FINALISE}


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
