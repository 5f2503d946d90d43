from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ratelimits.embedded import Server
from ratelimits.models import DurabilityGap, QuarantinedBatch
from ratelimits.usage import crash
from ratelimits.usage.drain import drain
from ratelimits.usage.seal import seal
from tests.usage.load import Load

pytestmark = pytest.mark.django_db(transaction=True)


@contextmanager
def crashing_drainers(environment: dict[str, str], seed: int) -> Iterator[Counter[str]]:
    """Three racing drainers that die again and again; the counter fills with the crashes."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.usage.crasher", str(seed), "3"],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    crashes: Counter[str] = Counter()

    def count() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            crashes[line.strip()] += 1

    reader = threading.Thread(target=count)
    reader.start()
    try:
        yield crashes
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reader.join()
        assert process.stdout is not None
        process.stdout.close()


def drain_all() -> None:
    seal()
    drain()


def run(environment: dict[str, str], server: Server, *, seed: int, crashes: int, kill_server: float) -> None:
    rng = random.Random(seed)
    servers_killed = 0
    with Load(seed) as load, crashing_drainers(environment, seed) as counted:
        while counted.total() + servers_killed < crashes:
            time.sleep(0.02)
            if rng.random() < kill_server:
                server.kill()
                server.start()
                servers_killed += 1
    drain_all()
    print(f"\nseed {seed}: {counted.total()} crashes of drainers, {servers_killed} of the server; {load}")
    for point in crash.POINTS:
        print(f"  {point:26} killed {counted[f'kill {point}']:4}, database cut {counted[f'cut {point}']:4}")
    load.check()
    if not servers_killed:
        assert not DurabilityGap.objects.exists()
    assert not QuarantinedBatch.objects.exists()


def test_drainers_that_race_and_die_between_any_two_steps_lose_and_double_nothing(
    worker_environment: dict[str, str], always_server: Server, long_run: bool
) -> None:
    run(worker_environment, always_server, seed=20261, crashes=300 if long_run else 60, kill_server=0)


def test_a_server_that_is_killed_too_loses_nothing_that_was_acknowledged(
    worker_environment: dict[str, str], always_server: Server, long_run: bool
) -> None:
    run(worker_environment, always_server, seed=20262, crashes=300 if long_run else 40, kill_server=0.01)
    assert set(DurabilityGap.objects.values_list("kind", flat=True)) <= {"restart"}
