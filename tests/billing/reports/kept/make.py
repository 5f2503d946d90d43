"""Make the kept database anew with today's code.

Run it with `python -m tests.billing.reports.kept.make`. README.md says when.
"""

from __future__ import annotations

import gzip
import json
import os
import sqlite3
from contextlib import closing
from hashlib import sha256
from pathlib import Path

import django

from tests.billing.reports.kept import DATABASE, EXPORTS, SIGNING_KEY
from tests.support.reports import exporter
from tests.support.servers import TestServers

#: The account with an anchor is the second one, and late usage is of the fourth one.
ACCOUNTS = ("acme", "zoë", "a b", "=1+1")
KEYS = ("api_key:b", "api_key:ä", "user:10", "=1+1")


def fill(exports: Path) -> Path:
    """Use, finalise, export and verify both months. Return the SQLite file. Raise CommandError if it has errors."""
    django.setup()
    from django.conf import settings
    from django.core.management import call_command
    from django.db import connection
    from django.test import override_settings

    from ratelimits.engine.server import current_server

    current_server().wire.client.config_set("appendfsync", "always")
    call_command("migrate", verbosity=0)
    with override_settings(RATELIMITS={**settings.RATELIMITS, "SIGNING_KEY": SIGNING_KEY}):
        exporter.use(ACCOUNTS, KEYS)
        exporter.export(exports)
        call_command("ratelimits_verify", all=True)
    connection.close()
    return Path(connection.settings_dict["NAME"])


def keep(file: Path, exports: Path) -> None:
    """Write the contents of a SQLite file, and the digests of its exports, beside this module."""
    with closing(sqlite3.connect(file)) as database:
        dump = "\n".join(database.iterdump())
    DATABASE.write_bytes(gzip.compress(dump.encode(), mtime=0))
    # Another version of XlsxWriter may write the same cells in other bytes.
    kept = (path for path in sorted(exports.iterdir()) if "xlsx" not in path.suffix)
    digests = {path.name: sha256(path.read_bytes()).hexdigest() for path in kept}
    EXPORTS.write_text(json.dumps(digests, indent=2) + "\n")


def main() -> None:
    """Make both files, with servers of their own."""
    servers = TestServers("valkey", "sqlite")
    try:
        os.environ.update(servers.environment)
        exports = servers.directory / "exports"
        keep(fill(exports), exports)
    finally:
        servers.stop()


if __name__ == "__main__":
    main()
