"""Test that a management command and a Celery task of one name do one thing."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from celery import current_app
from django.conf import settings
from django.core.management import CommandError, call_command, get_commands
from django.test import override_settings

from ratelimits import moments
from ratelimits.billing import tasks as billing_tasks
from ratelimits.billing.models import PushDelivery, Report
from ratelimits.usage import tasks
from ratelimits.usage.ledger import drain as draining
from ratelimits.usage.ledger.drain import drain
from ratelimits.usage.ledger.fence import NotFencedError
from ratelimits.usage.ledger.seal import seal
from ratelimits.usage.ledger.tally import tally
from ratelimits.usage.models import Batch, PeriodUsage, ProcessTotal, RecordedRequest, ShardState
from ratelimits.usage.models.task_runs import TaskRun
from tests.billing.push.fakes import FAKES, options
from tests.support.own_apps import OWN, own_models
from tests.support.raw import RawRedis
from tests.support.reports.invoices import account, close, spend
from tests.support.usage.traffic import at

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fsync_at_once")]

#: How each task is run, if not by its name.
TASKS: dict[str, Callable[[], Any]] = {
    "push": lambda: billing_tasks.push_to("lago"),
    "finalise": billing_tasks.finalise,
}


def names() -> set[str]:
    """Return the names that both a command and a task have."""
    commands = {name.removeprefix("ratelimits_") for name, app in get_commands().items() if app in OWN}
    return commands & {name.removeprefix("ratelimits.") for name in current_app.tasks if name.startswith("ratelimits.")}


def by_command(name: str) -> None:
    call_command(f"ratelimits_{name}", stdout=StringIO(), stderr=StringIO())


def by_task(name: str) -> None:
    (TASKS.get(name) or getattr(tasks, name))()


def work_for_all() -> None:
    """Leave work for each job: closed and open periods, batches in each state, old records, and a line to push."""
    spend(account(), "2025-09-10T12:00", 7)
    close("2025-10-02")
    spend("acme", "2025-10-10T12:00", 7)
    for _batch in range(2):
        spend("acme", "2025-10-10T12:00", 1)
        seal()
        drain(at("2100-01-01"))
    tally()
    Batch.objects.update(sealed_at=at("2025-10-11"))
    spend("acme", "2025-10-11T12:00", 7)
    seal()
    drain(at("2100-01-01"))
    ShardState.objects.update(watermark=at("2025-11-02"))
    spend("other", "2025-10-12T12:00", 7)
    seal()
    spend("third", "2025-10-13T12:00", 7)
    old = moments.now() - timedelta(days=4000)
    RecordedRequest.objects.create(at=int(old.timestamp() * 10**6), scope="*", costs={"requests": 1})
    for process in ("one", "two"):
        ProcessTotal.objects.create(
            process=process, kind="admitted", bin=int(time.time()) // 900 * 900 - 40 * 86_400, requests=1, units=1
        )


def facts(client: RawRedis) -> dict[str, Any]:
    """Return what the database and Redis have, without what is different each time: names, moments and digests."""
    rows = {model.__name__: model._base_manager.count() for model in own_models()}
    kinds = Counter(key.decode().partition("}:")[2].partition(":")[0] for key in client.keys("*"))
    return {
        **rows,
        "redis": kinds,
        "tallied": {row.shard: (row.position, row.tallied) for row in ShardState.objects.all()},
        "usage": sorted(PeriodUsage.objects.values_list("account", "period", "admitted_units", "covered")),
        "reports": sorted(Report.objects.values_list("account", "label", "version", "line_count")),
        "pushed": sorted(PushDelivery.objects.values_list("meter", "overage", "state", "attempts")),
        "totals": sorted(ProcessTotal.objects.values_list("process", "kind", "requests")),
        "runs": sorted((run.task, bool(run.succeeded_at), bool(run.failed_at)) for run in TaskRun.objects.all()),
    }


def test_each_pair_is_tested() -> None:
    assert names() == {"compact", "drain", "finalise", "push", "seal"}


@pytest.mark.parametrize("name", ["compact", "drain", "finalise", "push", "seal"])
def test_a_command_and_a_task_leave_the_same(name: str, redis_client: RawRedis) -> None:
    with FAKES["lago"]() as fake:
        given = {**settings.RATELIMITS, "PUSH": {"lago": {**options("lago", fake), "SINCE": "2025-09"}}}
        with override_settings(RATELIMITS={**given, "SHARDS": 2}):
            left = []
            for run in (by_command, by_task):
                work_for_all()
                before = facts(redis_client)
                run(name)
                left.append(facts(redis_client))
                assert left[-1] != before, f"{name} had nothing to do"
                call_command("flush", interactive=False, verbosity=0)
                redis_client.flushall()
            assert left[0] == left[1]


def test_a_drain_that_fails_adds_what_is_drained_to_the_totals(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_options: object) -> None:
        raise NotFencedError("the server has no append-only file")

    for run in (by_command, by_task):
        spend(account() if run is by_command else "acme", "2025-10-10T12:00", 7)
        seal()
        drain(at("2100-01-01"))
        with monkeypatch.context() as patched:
            patched.setattr(draining, "drain", fail)
            with pytest.raises(CommandError if run is by_command else NotFencedError):
                run("drain")
        assert not any(state.tallied < state.position for state in ShardState.objects.all())
        assert TaskRun.objects.get(task="drain").failed_at is not None
