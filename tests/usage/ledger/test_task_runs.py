from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import redis
from celery.signals import task_failure
from django.core.management import CommandError, call_command
from django.db import DatabaseError
from django.db.models import QuerySet

from ratelimits import moments
from ratelimits.billing import tasks as billing_tasks
from ratelimits.embedded import EmbeddedServer
from ratelimits.usage import tasks
from ratelimits.usage.jobs import Task, note_run
from ratelimits.usage.ledger.fence import NotFencedError
from ratelimits.usage.models import TaskRun
from tests.doctor.restrictions import ALL, USER, connected, user
from tests.support.usage.traffic import use

pytestmark = pytest.mark.django_db(transaction=True)


def command(name: str) -> Callable[[], Any]:
    return lambda: call_command(name, stdout=io.StringIO())


RUNS = [
    *[(task, getattr(billing_tasks if task == Task.FINALISE else tasks, task.value)) for task in Task],
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
    with pytest.raises(redis.exceptions.ConnectionError):
        tasks.seal()
    with pytest.raises(CommandError):
        call_command("ratelimits_seal")
    row = TaskRun.objects.get(task=Task.SEAL)
    assert row.succeeded_at is not None
    assert row.failed_at is not None
    assert row.failed_at > row.succeeded_at
    assert row.error.startswith("ConnectionError: ")


def test_a_refused_fence_fails_the_task_and_the_command_and_nothing_is_retried(everysec_server: EmbeddedServer) -> None:
    client = redis.Redis.from_url(everysec_server.url)
    client.config_set("appendonly", "no")
    failed: list[Any] = []

    def note(sender: Any, exception: Exception, **_more: Any) -> None:
        failed.append((sender.name, str(exception)))

    task_failure.connect(note)
    try:
        use()
        tasks.seal()
        done = tasks.drain.apply()
    finally:
        task_failure.disconnect(note)
        client.close()
    assert done.state == "FAILURE"
    assert isinstance(done.result, NotFencedError)
    assert failed == [("ratelimits.drain", str(done.result))]
    with pytest.raises(CommandError, match="appendonly yes"):
        call_command("ratelimits_drain")
    row = TaskRun.objects.get(task=Task.DRAIN)
    assert (row.succeeded_at, row.error.partition(":")[0]) == (None, "NoFileError")


def test_the_message_of_a_refused_fence_is_whole(redis_client: redis.Redis, redis_url: str) -> None:
    with user(redis_client, *ALL, "-config"), connected(redis_url, USER):
        use(now=None)
        call_command("ratelimits_seal")
        with pytest.raises(CommandError) as refusal:
            call_command("ratelimits_drain")
    assert TaskRun.objects.get(task=Task.DRAIN).error == f"NotFencedError: {refusal.value}"
    with pytest.raises(ValueError, match="sentence"), note_run(Task.DRAIN):
        raise ValueError("sentence. " * 200)
    error = TaskRun.objects.get(task=Task.DRAIN).error
    assert (len(error) <= 1000, error[-11:]) == (True, "sentence. …")


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
