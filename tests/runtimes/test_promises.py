"""Test what was once broken in projects under each runtime: threads, gevent, an event loop, and a fork after import.

One process for each runtime keeps all promises, one after the other (tests.support.runtimes.promises).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.forked import popen_for
from tests.support.runtimes.promises import PROMISES, RUNTIMES

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_promises_are_kept(runtime: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DJANGO")}
    with popen_for(runtime == "gevent")(
        [sys.executable, "-W", "error", "-m", "tests.support.runtimes.promises", runtime, str(tmp_path)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        printed, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    kept = json.loads(printed.splitlines()[-1])
    assert {name: wrong for name, wrong in kept.items() if wrong} == {}
    assert kept.keys() == {*PROMISES, *(["the parent goes on"] if runtime == "fork" else [])}
