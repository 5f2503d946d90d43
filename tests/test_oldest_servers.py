"""Run a few tests on Redis 6.2 with PostgreSQL, so that a quick run has them too. `.ci/run` runs many more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: Tests of what depends on the server or the database: scripts, the versions of rules, the ledger, a closed month.
FEW = (
    "tests/engine/test_traps.py",
    "tests/models/test_rules_versions.py",
    "tests/usage/ledger/test_drain.py",
    "tests/billing/reports/closing/test_late_gaps.py::test_late_usage_and_late_losses_are_one_version",
)


def test_a_few_tests_pass_on_redis_6_2_and_postgresql() -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DJANGO", "PYTEST"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *FEW],
        cwd=ROOT,
        env={**kept, "RATELIMITS_TEST_SERVER": "redis6", "RATELIMITS_TEST_DATABASE": "postgres"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "server: redis6 6.2." in done.stdout
    assert "database: postgres" in done.stdout
