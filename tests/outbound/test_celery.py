"""Test limited Celery tasks: with real workers, and their steps in this process."""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Ignore
from django.core.exceptions import ImproperlyConfigured

from ratelimits.outbound import WaitTooLong
from ratelimits.outbound.celery import HEADER, QuotaTask
from ratelimits.quota.costs import WrongCost
from tests.support import forked
from tests.support.entry_points import begin_afresh
from tests.support.rows import rule

ROOT = Path(__file__).parents[2]


def measured(options: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.waiting.tasks", *options.split(), "--out", str(folder)]
    environment = {**os.environ, "PYTHONWARNINGS": ""}
    done = forked.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    run: dict[str, Any] = json.loads(next(folder.glob("*.json")).read_text())
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "rate"),
    [
        # A worker looks for the tasks of killed ones when it starts, and then every 100 seconds.
        ("--workers 2 --concurrency 2 --tasks 12 --rate 5 --kills 1 --visibility 1 --away 1.5", 5),
        pytest.param(
            "--workers 2 --concurrency 3 --tasks 30 --rate 20 --kills 1 --visibility 3", 20, marks=pytest.mark.long
        ),
    ],
    ids=["sample", "complete"],
)
def test_workers_keep_one_limit_and_lose_no_task_when_one_is_killed(options: str, rate: int, tmp_path: Path) -> None:
    found = measured(options, tmp_path)["results"]
    assert (found["lost"], found["retries"]) == (0, 0)
    assert found["most_granted"] <= rate
    assert found["messages_per_task"] < 3


@pytest.mark.long
def test_four_workers_run_a_thousand_tasks_within_3_percent_of_the_ideal(tmp_path: Path) -> None:
    run = measured("", tmp_path)
    assert all(claim["holds"] for claim in run["claims"]), run["claims"]


@pytest.mark.long
def test_ten_killed_workers_lose_no_task(tmp_path: Path) -> None:
    run = measured("--kills 10 --tasks 500 --visibility 15", tmp_path)
    assert all(claim["holds"] for claim in run["claims"]), run["claims"]


@pytest.mark.django_db(transaction=True)
class TestSteps:
    """What a worker does with one message. The messages stay in a broker in memory."""

    @pytest.fixture(autouse=True)
    def _afresh(self, monkeypatch: pytest.MonkeyPatch) -> None:
        begin_afresh(monkeypatch)

    @pytest.fixture
    def app(self) -> Celery:
        app = Celery("tasks", broker="memory://", set_as_current=False)
        app.conf.task_default_queue = f"queue{time.monotonic_ns()}"
        return app

    def receive(self, task: Any, **message: Any) -> Any:
        """Let a worker handle a message of the task; return the task's result."""
        task.push_request(**{"called_directly": False, "is_eager": False, "args": (), "kwargs": {}, **message})
        try:
            return task()
        finally:
            task.pop_request()

    def sent(self, app: Celery) -> list[Any]:
        """Return the messages in the queue, and remove them."""
        found: list[Any] = []
        with app.connection_for_read() as connection:
            queue = connection.SimpleQueue(app.conf.task_default_queue)
            while True:
                try:
                    message = queue.get(block=False)
                except queue.Empty:
                    queue.close()
                    return found
                message.ack()
                found.append(message)

    def task(self, app: Celery, **options: Any) -> Any:
        @app.task(base=QuotaTask, shared=False, **{"quota": "crm-sync", **options})
        def sync() -> str:
            return "done"

        return sync

    def test_a_task_that_may_not_run_yet_is_sent_again_for_its_exact_moment(self, app: Celery) -> None:
        rule("crm", "token_bucket", scope="crm-sync", capacity=1, rate=1, period=10)
        task = self.task(app)
        assert self.receive(task, id="1") == "done"
        now = time.time()
        with pytest.raises(Ignore):
            self.receive(task, id="2", retries=2)
        (message,) = self.sent(app)
        assert message.headers["id"] == "2"
        assert message.headers["retries"] == 2
        permit = message.headers[HEADER]
        assert permit["at"] == pytest.approx(now + 10, abs=2)
        # The message keeps its permit when it is delivered again.
        permit["at"] = time.time()
        for _ in range(2):
            assert self.receive(task, id="2", retries=2, headers={HEADER: permit}) == "done"
        # A retry and a permit that is too old need a new permit.
        with pytest.raises(Ignore):
            self.receive(task, id="2", retries=3, headers={HEADER: permit})
        with pytest.raises(Ignore):
            self.receive(task, id="2", retries=2, headers={HEADER: {**permit, "at": time.time() - 60}})
        third, fourth = [message.headers[HEADER]["at"] - now for message in self.sent(app)]
        assert third == pytest.approx(20, abs=2)
        assert fourth == pytest.approx(30, abs=2)

    def test_a_limit_in_code_needs_no_rule(self, app: Celery) -> None:
        task = self.task(app, quota_rate="1/10s")
        assert self.receive(task) == "done"
        with pytest.raises(Ignore):
            self.receive(task)

    def test_a_refused_task_asks_again_when_the_refusal_ends(self, app: Celery) -> None:
        rule("day", "fixed_window", scope="crm-sync", capacity=1, period=3600, window_start="first_hit")
        rule("pace", "token_bucket", scope="crm-sync", capacity=10, rate=10)
        task = self.task(app)
        assert self.receive(task) == "done"
        with pytest.raises(Ignore):
            self.receive(task)
        (message,) = self.sent(app)
        assert HEADER not in message.headers
        assert message.headers["eta"]

    def test_tasks_behind_a_full_queue_do_not_all_ask_again_at_once(self, app: Celery) -> None:
        rule("crm", "leaky_bucket_queue", scope="crm-sync", capacity=1, rate=1, period=600, max_wait=1)
        task = self.task(app)
        assert self.receive(task) == "done"
        for _ in range(4):
            with pytest.raises(Ignore):
                self.receive(task)
        _second, *others = self.sent(app)
        assert len({message.headers["eta"] for message in others}) == 3

    def test_a_task_that_can_never_run_fails(self, app: Celery) -> None:
        rule("crm", "token_bucket", scope="crm-sync", capacity=1, rate=1)
        with pytest.raises(WaitTooLong) as caught:
            self.receive(self.task(app, quota_cost=2))
        again = pickle.loads(pickle.dumps(caught.value))
        assert (again.name, again.limit, again.retry_after) == ("crm-sync", "crm", None)
        assert str(again) == str(caught.value)

    def test_a_limit_that_cannot_say_when_is_an_error(self, app: Celery) -> None:
        rule("crm", "sliding_log", scope="crm-sync", capacity=10, period=1)
        with pytest.raises(ImproperlyConfigured, match="no limit of 'crm-sync' can say when"):
            self.receive(self.task(app))

    def test_a_limit_of_tasks_at_once_is_an_error(self, app: Celery) -> None:
        rule("crm", "concurrency", scope="crm-sync", capacity=1)
        with pytest.raises(ImproperlyConfigured, match="the worker's concurrency"):
            self.receive(self.task(app))

    def test_a_meter_that_is_not_known_is_an_error(self, app: Celery, settings: Any) -> None:
        settings.RATELIMITS = {**settings.RATELIMITS, "METERS": ["tokens"]}
        rule("crm", scope="crm-sync")
        with pytest.raises(WrongCost, match=r"^crm-sync: the meter 'typo' is not known: add it to "):
            self.receive(self.task(app, quota_cost={"tokens": 5, "typo": 1}))

    def test_a_task_without_a_quota_is_an_error(self, app: Celery) -> None:
        with pytest.raises(ImproperlyConfigured, match="name the quota"):
            self.receive(self.task(app, quota=""))

    def test_a_direct_call_and_an_eager_task_are_not_limited(self, app: Celery) -> None:
        rule("crm", "token_bucket", scope="crm-sync", capacity=0, rate=1)
        task = self.task(app)
        assert task() == "done"
        assert task.apply().get() == "done"
