from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import DatabaseError
from django.db.models import QuerySet

from ratelimits import moments, tasks
from ratelimits.models import TaskRun
from ratelimits.usage.task_runs import Task, note_run

pytestmark = pytest.mark.django_db(transaction=True)


def command(name: str) -> Callable[[], Any]:
    return lambda: call_command(name, stdout=io.StringIO())


RUNS = [
    *[(task, getattr(tasks, task.value)) for task in Task],
    *[(task, command(f"ratelimits_{task.value}")) for task in Task],
]


@pytest.mark.parametrize(("task", "run"), RUNS)
def test_a_task_or_command_notes_that_it_ran(task: TaskRun.Task, run: Callable[[], Any]) -> None:
    begun = moments.now()
    run()
    (row,) = TaskRun.objects.all()
    assert (row.task, row.failed_at, row.error) == (task, None, "")
    assert row.succeeded_at is not None
    assert begun <= row.succeeded_at <= moments.now()


def test_a_failure_is_noted_beside_the_last_success(settings: Any) -> None:
    tasks.seal()
    settings.CACHES = {
        **settings.CACHES,
        "ratelimits": {**settings.CACHES["ratelimits"], "LOCATION": "redis://127.0.0.1:1/0"},
    }
    tasks.seal()
    with pytest.raises(CommandError):
        call_command("ratelimits_seal")
    row = TaskRun.objects.get(task=Task.SEAL)
    assert row.succeeded_at is not None
    assert row.failed_at is not None
    assert row.failed_at > row.succeeded_at
    assert row.error.startswith("ConnectionError: ")


def test_finalising_one_account_is_no_run_of_the_task() -> None:
    call_command("ratelimits_finalise", account="acme", stdout=io.StringIO())
    assert not TaskRun.objects.exists()


def test_a_task_succeeds_though_its_run_cannot_be_noted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise DatabaseError("the disk is full")

    monkeypatch.setattr(QuerySet, "bulk_create", refuse)
    with note_run(Task.SEAL):
        pass
    assert "The run of the task seal could not be noted in the database: the disk is full" in caplog.text
