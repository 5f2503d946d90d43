from __future__ import annotations

import pytest

from tests.support.rows import rule
from tests.support.siblings import siblings

PROCESSES, CAPACITY, PREFETCH = 8, 10_000, 64


def test_eight_processes_never_spend_one_permit_more_than_the_limit(
    environment: dict[str, str], capsys: pytest.CaptureFixture[str], long_run: bool
) -> None:
    trials = 20 if long_run else 2
    # An epoch window of this many seconds began in 2014 and ends in 2036.
    rule("ahead", "fixed_window", key_kind="user", capacity=CAPACITY, period=700_000_000, prefetch=PREFETCH)
    with siblings("tests.support.end_to_end.spender", PROCESSES, environment=environment) as processes:
        for process in processes:
            process.ask(trials)
        answers = [process.answer() for process in processes]
    admitted = [sum(trial) for trial in zip(*answers, strict=True)]
    with capsys.disabled():
        print(f"\n{PROCESSES} processes on {CAPACITY:,} permits, {trials} trials: admitted {sorted(set(admitted))}")
    # A process that was refused has no permits left; one that spent slowly lost the permits of its last prefetch.
    least = CAPACITY - PROCESSES * (PREFETCH - 1)
    assert [least <= one <= CAPACITY for one in admitted] == [True] * trials
    assert any(sum(one > 0 for one in trial) > 1 for trial in zip(*answers, strict=True))
