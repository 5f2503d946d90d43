"""Test reports that an earlier commit finalised: today's code exports the same bytes, and verifies them."""

from __future__ import annotations

import os
import sys
from hashlib import sha256
from pathlib import Path

from tests.billing.reports.kept import SIGNING_KEY, restore
from tests.support import forked

ROOT = Path(__file__).resolve().parents[3]


def test_reports_that_were_finalised_before_an_upgrade_are_the_same_bytes_and_still_verify(tmp_path: Path) -> None:
    file = tmp_path / "kept.sqlite3"
    before = restore(file)
    command = [sys.executable, "-m", "tests.support.reports.upgraded", tmp_path, SIGNING_KEY, *before]
    environment = {**os.environ, "DATABASE_URL": f"sqlite:///{file}", "DJANGO_SETTINGS_MODULE": "tests.settings"}
    done = forked.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout == "No errors were found.\n", done.stderr
    assert "Checked 12 reports" in done.stderr
    assert {name: sha256((tmp_path / name).read_bytes()).hexdigest() for name in before} == before
