from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest
from django.db import connection
from redis.exceptions import ResponseError

from ratelimits.conf import conf
from ratelimits.engine.server import current_server
from ratelimits.usage import tasks
from ratelimits.usage.ledger import crash
from ratelimits.usage.ledger.seal import seal
from ratelimits.usage.models import DurabilityGap, PeriodUsage
from ratelimits.usage.tasks import beat_schedule
from tests.support.forked import Forked
from tests.support.raw import RawRedis
from tests.support.usage.load import Load
from tests.support.usage.traffic import flow_after_kills, use
from tests.usage.ledger.test_crashes import check_ledger

pytestmark = pytest.mark.django_db(transaction=True)

SECONDS_PER_CRASH = 30


def start_worker(environment: dict[str, str], plan: Path) -> subprocess.Popen[bytes]:
    with (plan.parent / "celery.log").open("ab") as log:
        return Forked(
            [
                *(
                    sys.executable,
                    "-m",
                    "celery",
                    "-A",
                    "tests.support.usage.celery_app",
                    "worker",
                    "--beat",
                    "-l",
                    "info",
                ),
                *("--concurrency", "2", "--schedule", str(plan.parent / "beat")),
            ],
            env={**environment, "CRASH_PLAN": str(plan)},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def test_a_celery_worker_killed_at_every_point_loses_and_doubles_nothing(
    worker_environment: dict[str, str], tmp_path: Path, crashes: Callable[[int, int], int], crash_seed: int
) -> None:
    # A sample has half of the points, on PostgreSQL the other half. More crashes go through all points in turn.
    drawn, count = random.Random(crash_seed), crashes(len(crash.STEPS) // 2, 80)
    turns = [drawn.sample(crash.STEPS, len(crash.STEPS)) for _ in range(-(-count // len(crash.STEPS)))]
    points = list(chain.from_iterable(turns))
    points = points[-count:] if connection.vendor == "postgresql" else points[:count]
    planned = [f"{'worker' if number % 2 else 'child'} {point}" for number, point in enumerate(points)]
    plan = tmp_path / "plan"
    plan.write_text("\n".join(planned))
    deadline = time.monotonic() + SECONDS_PER_CRASH * len(planned)
    worker = start_worker(worker_environment, plan)
    try:
        with Load(crash_seed, threads=2) as load:
            while plan.read_text() and time.monotonic() < deadline:
                if worker.poll() is not None:
                    worker = start_worker(worker_environment, plan)
                time.sleep(0.05)
    finally:
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
    assert plan.read_text() == "", (tmp_path / "celery.log").read_text()[-30000:]
    flow_after_kills()
    again = Counter(plan.with_suffix(".again").read_text().split())
    print(f"\nseed {crash_seed}, {connection.vendor}: {len(planned)} crashes of a Celery worker or its child; {load}")
    print(f"  delivered again: drain {again['ratelimits.drain']}, seal {again['ratelimits.seal']}, all {again.total()}")
    for point, times in sorted(Counter(planned).items()):
        print(f"  {point}: {times}")
    check_ledger(load)
    assert again["ratelimits.seal"] + again["ratelimits.drain"]
    if len(planned) >= 80:
        assert again["ratelimits.drain"]
        assert again["ratelimits.seal"]
    assert not DurabilityGap.objects.exists()


def test_the_beat_schedule_runs_every_task_at_its_interval_and_drops_what_was_not_begun() -> None:
    schedule = beat_schedule()
    assert schedule["ratelimits.seal"]["schedule"] == conf.SEAL_INTERVAL
    assert schedule["ratelimits.drain"]["options"] == {"expires": conf.DRAIN_INTERVAL}


def test_sealing_that_waited_behind_long_drains_is_not_dropped() -> None:
    schedule = beat_schedule()
    assert schedule["ratelimits.seal"]["options"]["expires"] > 100 * schedule["ratelimits.drain"]["options"]["expires"]


def test_a_shard_that_cannot_be_drained_does_not_stop_the_totals_of_others(redis_client: RawRedis) -> None:
    use()
    seal()
    keyspace = current_server().keyspace
    idle = next(shard for shard in range(keyspace.shards) if not redis_client.exists(keyspace.sealed(shard)))
    redis_client.delete(keyspace.meta(idle))
    redis_client.set(keyspace.meta(idle), "no hash")
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        tasks.drain()
    assert PeriodUsage.objects.get().admitted_units == 1
