"""Test reports that an earlier commit finalised: today's code exports the same bytes, and verifies them."""

from __future__ import annotations

import gzip
import json
import os
import sqlite3
import sys
from contextlib import closing
from hashlib import sha256
from pathlib import Path

import pytest

from tests.support import forked

KEPT = Path(__file__).parent / "kept_6fc9309"
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.xfail(
    strict=True, reason="the digests of batches changed; the kept database is made anew once, at the end"
)
def test_reports_that_were_finalised_before_an_upgrade_are_the_same_bytes_and_still_verify(tmp_path: Path) -> None:
    file, before = tmp_path / "kept.sqlite3", json.loads((KEPT / "exports.json").read_text())
    with closing(sqlite3.connect(file)) as database:
        database.executescript(gzip.decompress((KEPT / "database.sql.gz").read_bytes()).decode())
    command = [sys.executable, "-m", "tests.support.reports.upgraded", tmp_path, "kept by finance", *before]
    environment = {**os.environ, "DATABASE_URL": f"sqlite:///{file}", "DJANGO_SETTINGS_MODULE": "tests.settings"}
    done = forked.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout == "No errors were found.\n", done.stderr
    assert "Checked 12 reports" in done.stderr
    assert {name: sha256((tmp_path / name).read_bytes()).hexdigest() for name in before} == before
