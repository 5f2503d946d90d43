from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from django.db import connection
from django.db.models import Sum

from ratelimits.embedded import EmbeddedServer
from ratelimits.usage.ledger import crash
from ratelimits.usage.ledger.verify.ledger import verify_ledger
from ratelimits.usage.models import DurabilityGap, Line, PeriodUsage, QuarantinedBatch
from tests.support.forked import Forked
from tests.support.usage.load import Load
from tests.support.usage.span_totals import check_span_totals
from tests.support.usage.traffic import flow_after_kills

pytestmark = pytest.mark.django_db(transaction=True)

#: Crashes of each kind per second, on average, in addition to those of drainers.
SERVER_KILLS, CONNECTIONS_CUT = 0.5, 0.5


@contextmanager
def process_group(module: str, *arguments: str, environment: dict[str, str]) -> Iterator[Callable[[], list[str]]]:
    """Run a process whose children die; yield its output so far, line by line. Kill all of them at the end."""
    process = Forked(
        [sys.executable, "-m", module, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    lines: list[str] = []

    reader = threading.Thread(target=_each_line, args=(process, lines))
    reader.start()
    try:
        yield lambda: lines
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reader.join()
        assert process.stdout is not None
        process.stdout.close()


def _each_line(process: subprocess.Popen[str], lines: list[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line.rstrip("\n"))  # noqa: PERF401  (one by one, as they come)


def count_requests(lines: list[str], load: Load) -> None:
    """Add to the load's counts what workers asked for, and whether it was answered."""
    asked: dict[str, tuple[str, int]] = {}
    for line in lines:
        what, child, *rest = line.split()
        if what == "?":
            asked[child] = rest[0], int(rest[1])
            continue
        if child in asked:
            key, cost = asked.pop(child)
            counts = {"+": load.acknowledged, "-": load.denied, "lost": load.unanswered, "killed": load.unanswered}
            if what in counts:
                counts[what][key] += cost
    for key, cost in asked.values():
        load.unanswered[key] += cost


def cut_a_connection() -> int:
    """Let the database end a connection of another process, whatever it is doing; return 0 if there is none."""
    if connection.vendor != "postgresql":
        return 0
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(pg_terminate_backend(pid)) FROM (SELECT pid FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
            " ORDER BY random() LIMIT 1) AS other"
        )
        return int(cursor.fetchone()[0])


def check_ledger(load: Load) -> None:
    """Check the invariant for every key, the chain, the sums, and the totals against the lines."""
    load.check()
    assert list(verify_ledger("default")) == []
    place = ("account", "meter", "rule")
    sums = {"requests": Sum("admitted_requests"), "units": Sum("admitted_units"), "denials": Sum("denied_requests")}
    lines, totals = (
        set(model.objects.values_list(*place).order_by().annotate(**sums)) for model in (Line, PeriodUsage)
    )
    assert lines == totals
    check_span_totals()
    assert not QuarantinedBatch.objects.exists()


def run(environment: dict[str, str], server: EmbeddedServer, *, seed: int, crashes: int, kill_server: bool) -> None:
    rng = random.Random(seed)
    others: Counter[str] = Counter()
    with (
        Load(seed) as load,
        process_group("tests.support.usage.worker", str(seed), "3", environment=environment) as workers,
        process_group("tests.support.usage.crasher", str(seed), "3", environment=environment) as drainers,
    ):
        counted: Counter[str] = Counter()
        while counted.total() - counted["met"] + others.total() < crashes:
            time.sleep(0.02)
            if kill_server and rng.random() < SERVER_KILLS * 0.02:
                server.kill()
                server.start()
                others["server"] += 1
            if rng.random() < CONNECTIONS_CUT * 0.02:
                others["connection"] += cut_a_connection()
            others["worker"] = sum(line.startswith("killed") for line in list(workers()))
            counted = Counter(drainers())
    counted, asked = Counter(drainers()), workers()
    others["worker"] = sum(line.startswith("killed") for line in asked)
    count_requests(asked, load)
    flow_after_kills()
    met = counted.pop("met", 0)
    print(
        f"\nseed {seed}, {connection.vendor}: {counted.total() + others.total()} crashes: {counted.total()} of drainers"
        f"\n  {others['worker']} of workers, {others['server']} of the server, {others['connection']} connections cut"
        f" from outside; drainers met in {met} batches;\n  {load}"
    )
    for point in crash.STEPS:
        print(f"  {point:26} killed {counted[f'kill {point}']:4}, database cut {counted[f'cut {point}']:4}")
    check_ledger(load)
    if crashes >= 200:
        assert {line.split()[1] for line in counted} == set(crash.STEPS)
        assert met
        assert others["worker"]
    if not kill_server:
        assert not DurabilityGap.objects.exists()


def test_workers_and_drainers_that_race_and_die_between_any_two_steps_lose_and_double_nothing(
    worker_environment: dict[str, str],
    always_server: EmbeddedServer,
    crashes: Callable[[int, int], int],
    crash_seed: int,
) -> None:
    run(worker_environment, always_server, seed=crash_seed, crashes=crashes(30, 300), kill_server=False)


def test_a_server_that_is_killed_too_loses_nothing_that_was_acknowledged(
    worker_environment: dict[str, str],
    always_server: EmbeddedServer,
    crashes: Callable[[int, int], int],
    crash_seed: int,
) -> None:
    run(worker_environment, always_server, seed=crash_seed + 1, crashes=crashes(20, 300), kill_server=True)
    assert set(DurabilityGap.objects.values_list("kind", flat=True)) <= {"restart"}
