"""The demo project's settings on the servers of the test session (tests/conftest.py names them)."""

from __future__ import annotations

import json
import os

from project.settings import *  # noqa: F403
from project.settings import DATABASES, RATELIMITS

# A file, since in SQLite's memory no other thread and no other process would see the rows.
DATABASES["default"]["TEST"] = {"NAME": os.environ["RATELIMITS_TEST_DATABASE_NAME"]}
# No test cuts the database's power, so none waits for its disk. PostgreSQL is told when it is started.
if DATABASES["default"]["ENGINE"] == "django.db.backends.sqlite3":
    DATABASES["default"]["OPTIONS"]["init_command"] += "; PRAGMA synchronous=OFF"
RATELIMITS["NAMESPACE"] = "test"
# A server that gets no processor time for a while, on a busy machine, is not taken for one that is away. Tests of
# what TIMEOUT does name a short one (tests.support.faces.short_timeout).
RATELIMITS["TIMEOUT"] = 10
# Tests write when they want to: a thread would meet another test's tables.
RATELIMITS["PROCESS_TOTALS_INTERVAL"] = 0
# Tests decide at moments of their own, and give back by the server's clock.
RATELIMITS["RECEIPT_TTL"] = 10 * 365 * 86_400
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
# Processes that a test starts push to the test's own receivers.
RATELIMITS["PUSH"] = json.loads(os.environ.get("RATELIMITS_TEST_PUSH", "{}"))
