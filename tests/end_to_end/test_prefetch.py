from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.end_to_end.conftest import ROOT
from tests.support.rows import rule

PROCESSES, CAPACITY, PREFETCH = 8, 10_000, 64


def test_eight_processes_never_spend_one_permit_more_than_the_limit(
    environment: dict[str, str], capsys: pytest.CaptureFixture[str], long_run: bool
) -> None:
    trials = 20 if long_run else 5
    # An epoch window of this many seconds began in 2014 and ends in 2036.
    rule("ahead", "fixed_window", key_kind="user", capacity=CAPACITY, period=700_000_000, prefetch=PREFETCH)
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.end_to_end.spender", str(trials)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        for _ in range(PROCESSES)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        print("go", file=process.stdin, flush=True)
    answers = [json.loads(process.communicate()[0]) for process in processes]
    admitted = [sum(trial) for trial in zip(*answers, strict=True)]
    with capsys.disabled():
        print(f"\n{PROCESSES} processes on {CAPACITY:,} permits, {trials} trials: admitted {sorted(set(admitted))}")
    # A process that was refused has no permits left; one that spent slowly lost the permits of its last prefetch.
    least = CAPACITY - PROCESSES * (PREFETCH - 1)
    assert [least <= one <= CAPACITY for one in admitted] == [True] * trials
    assert any(sum(one > 0 for one in trial) > 1 for trial in zip(*answers, strict=True))
