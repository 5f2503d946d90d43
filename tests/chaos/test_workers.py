"""Test faults of a worker and of its broker under load: usage waits for the next worker, and the status says so."""

from __future__ import annotations

import os
import resource
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from configparser import ConfigParser
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from django.utils import timezone

from ratelimits.conf import conf
from ratelimits.embedded import EmbeddedServer
from ratelimits.status.fact import Level
from ratelimits.status.facts import facts
from ratelimits.usage.counting import process_totals
from ratelimits.usage.models import TaskRun
from tests.chaos.compared import row_of
from tests.chaos.load import Load
from tests.chaos.row import Row
from tests.support.entry_points import away
from tests.support.eventually import until
from tests.support.forked import Forked
from tests.support.servers import TestServers, server_binary
from tests.support.snippets import snippet

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.long]

ROOT = Path(__file__).resolve().parents[2]
#: Seconds without a broker.
NO_BROKER = 5.0
#: A worker drains again at most this long after its broker is back (s): kombu waits up to 30 s between two attempts.
DRAINS = 40.0
#: How often a worker runs out of memory. A drain that does not end for `STUCK` seconds is stuck.
OUT_OF_MEMORY, STUCK = 5, 2.0


@pytest.fixture
def server(
    servers: TestServers, tmp_path: Path, settings: Any, load_rules: None, quick_settings: None
) -> Iterator[EmbeddedServer]:
    """Start the server with the limits."""
    options = {"appendfsync": "always"}
    server = EmbeddedServer(tmp_path / "redis", aof=True, binary=server_binary(servers.redis_kind), options=options)
    try:
        away(settings, server.port)
        process_totals._forget_all()
        yield server
    finally:
        server.stop()


@pytest.fixture
def environment(server: EmbeddedServer, process_environment: Callable[[], dict[str, str]]) -> dict[str, str]:
    return {**process_environment(), "REDIS_URL": server.url}


@contextmanager
def celery(broker: EmbeddedServer, folder: Path, environment: dict[str, str]) -> Iterator[Callable[[], int]]:
    """Let the worker of docs/processes.md run, and stop it at the end.

    Yield a function that starts the worker again if it has ended, as `Restart=always` of the page asks for. It returns
    how often the worker was started.
    """
    unit = ConfigParser()
    unit.read_string(snippet("Restart=always").text)
    _program, *options = shlex.split(unit["Service"]["ExecStart"].replace("/run/shop", str(folder)))
    options[options.index("shop")] = "project"
    command = [sys.executable, "-m", "celery", "-b", broker.url, *options]
    starts = 0
    with (folder / "celery.log").open("ab") as log:

        def start() -> subprocess.Popen[bytes]:
            nonlocal starts
            starts += 1
            return Forked(
                command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

        worker = start()

        def supervise() -> int:
            nonlocal worker
            if worker.poll() is not None:
                worker = start()
            return starts

        try:
            yield supervise
        finally:
            if worker.poll() is None:
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()


def drained_since(moment: datetime) -> bool:
    """Return whether a drain has succeeded after a moment."""
    return TaskRun.objects.filter(task=TaskRun.Task.DRAIN, succeeded_at__gt=moment).exists()


def level_of_drains(monkeypatch: pytest.MonkeyPatch, later: float) -> Level:
    """Return the level of the drains on the status page if no worker drains for this number of seconds."""
    now = timezone.now() + timedelta(seconds=later)
    with monkeypatch.context() as patch:
        patch.setattr(timezone, "now", lambda: now)
        return {fact.name: fact.level for fact in facts()}[TaskRun.Task.DRAIN]


def test_a_broker_is_killed(
    server: EmbeddedServer,
    environment: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reliability: Callable[[Row], None],
) -> None:
    broker = EmbeddedServer(tmp_path / "broker", binary=server.binary)
    try:
        with celery(broker, tmp_path, environment) as supervise:
            until(lambda: drained_since(datetime.min.replace(tzinfo=UTC)), "the worker drains")
            with Load(20261, environment=environment).running() as load:
                load.wait(1)
                broker.kill()
                load.wait(NO_BROKER)
                stopped = [level_of_drains(monkeypatch, later) for later in (0, 60, 10 * conf.DRAIN_INTERVAL + 200)]
                broker.start()
                ended, back = time.monotonic(), timezone.now()
                until(lambda: supervise() and drained_since(back), "a worker drains", DRAINS)
                drains = time.monotonic() - ended
            starts = supervise()
    finally:
        broker.stop()
    row = row_of("Celery's broker killed, and started after 5 s", load, ended)._replace(drained=drains)
    reliability(row)
    print(f"the worker was started {starts} times")
    assert stopped == [Level.GREEN, Level.AMBER, Level.RED]
    assert (row.errors, row.denied, row.over, row.under, row.lost, row.doubled) == (0, 0, 0, 0, 0, 0)
    assert load.counted("passed").total() == 0


@contextmanager
def drainer(environment: dict[str, str]) -> Iterator[tuple[int, list[str]]]:
    """Let a worker without Celery drain during the block. Yield its process id, and what it says."""
    command = [sys.executable, "-m", "tests.chaos.drainer"]
    said: list[str] = []
    with Forked(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        reader = threading.Thread(target=said.extend, args=(map(str.strip, process.stdout),))
        reader.start()
        try:
            until(lambda: "drained" in said, "the worker drains")
            yield process.pid, said
        finally:
            process.kill()
            reader.join()


def fails(said: list[str], load: Load) -> bool:
    """Return whether a drain has failed, or has not ended for some time."""
    before = list(said)
    load.wait(STUCK)
    return not {*said} <= {"begins", "drained"} or (said == before and said[-1] == "begins")


def test_a_worker_runs_out_of_memory(
    server: EmbeddedServer, environment: dict[str, str], reliability: Callable[[Row], None]
) -> None:
    """Let a worker get no more memory, so that a drain fails or gets stuck. Then kill it, and start the next one."""
    heard: set[str] = set()
    with Load(20261, environment=environment).running() as load:
        for _ in range(OUT_OF_MEMORY):
            with drainer(environment) as (pid, said):
                size = psutil.Process(pid).memory_info().vms
                resource.prlimit(pid, resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))
                until(lambda: fails(said, load), "a drain fails")
            heard |= {*said}
        ended = time.monotonic()
        with drainer(environment):
            drains = time.monotonic() - ended
    row = row_of(f"{OUT_OF_MEMORY} workers out of memory, then killed", load, ended)._replace(drained=drains)
    reliability(row)
    print(f"the workers said: {sorted(heard)}")
    assert (row.errors, row.denied, row.over, row.under, row.lost, row.doubled) == (0, 0, 0, 0, 0, 0)
    assert load.counted("passed").total() == 0
