"""A database of reports that earlier code finalised, and the SHA-256 of each of their exports. README.md says more."""

from __future__ import annotations

import gzip
import json
import sqlite3
from contextlib import closing
from pathlib import Path

DATABASE, EXPORTS = (Path(__file__).parent / name for name in ("database.sql.gz", "exports.json"))
#: The key with which the reports are signed.
SIGNING_KEY = "kept by finance"


def restore(file: Path) -> dict[str, str]:
    """Write the database to a new SQLite file. Return the SHA-256 of each export by its name, as in "2026-09.csv"."""
    with closing(sqlite3.connect(file)) as database:
        database.executescript(gzip.decompress(DATABASE.read_bytes()).decode())
    digests: dict[str, str] = json.loads(EXPORTS.read_text())
    return digests
