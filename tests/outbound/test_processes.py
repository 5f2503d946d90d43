"""Test that several processes which wait for one limit take turns, by the benchmark that measures them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import forked

ROOT = Path(__file__).parents[2]


def measured(options: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.waiting.outbound", *options.split(), "--out", str(folder)]
    done = forked.run(command, cwd=ROOT, env={**os.environ, "PYTHONWARNINGS": ""}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    run: dict[str, Any] = json.loads((folder / "waiting.outbound.json").read_text())
    return run


def test_processes_that_wait_for_one_limit_keep_it_with_one_command_a_permit(tmp_path: Path) -> None:
    one = measured("--processes 3 --permits 60 --rate 50 --algorithm gcra", tmp_path)["results"]["gcra"]
    assert one["commands_per_permit"] <= 1.1
    assert 1 <= one["times_ideal"] < 3


@pytest.mark.long
def test_eight_processes_finish_within_3_percent_of_the_ideal(tmp_path: Path) -> None:
    run = measured("", tmp_path)
    assert all(claim["holds"] for claim in run["claims"]), run["claims"]
