"""The demo project's settings on the servers of the test session (tests/conftest.py names them)."""

from __future__ import annotations

import json
import os
from typing import Any, cast

import django

from project.settings import *  # noqa: F403
from project.settings import CACHES, DATABASES, RATELIMITS
from tests.support.below import SITE

# A file, because other threads and processes cannot see the rows of SQLite in memory.
DATABASES["default"]["TEST"] = {"NAME": os.environ["RATELIMITS_TEST_DATABASE_NAME"]}
# No test cuts the database's power, so no test waits for its disk. PostgreSQL has this setting from its start.
if DATABASES["default"]["ENGINE"] == "django.db.backends.sqlite3":
    DATABASES["default"]["OPTIONS"]["init_command"] += "; PRAGMA synchronous=OFF"
RATELIMITS["NAMESPACE"] = "test"
# Each drain looks at every shard: with the default of 64 shards, tests that drain take half as long again.
RATELIMITS["SHARDS"] = 8
# On a busy machine the server may get no processor time for a while; it must not count as away. Tests of
# TIMEOUT itself set a short one (tests.support.entry_points.short_timeout).
RATELIMITS["TIMEOUT"] = 60
# Nor may a server that waits for a busy disk.
for _cache in CACHES.values():
    cast("dict[str, Any]", _cache)["OPTIONS"] = {"SOCKET_TIMEOUT": 60}
# Tests write explicitly, because a background thread would meet another test's tables.
RATELIMITS["PROCESS_TOTALS_INTERVAL"] = 0
# Tests decide at times that they choose, but give back by the server's clock.
RATELIMITS["RECEIPT_TTL"] = 10 * 365 * 86_400
# A client of a test need not look through all static files before its first request.
WHITENOISE_AUTOREFRESH = True
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
# The receivers of tests are on this machine.
RATELIMITS["ALERT_PUBLIC_ONLY"] = False
# Processes that a test starts push to the test's own receivers.
RATELIMITS["PUSH"] = json.loads(os.environ.get("RATELIMITS_TEST_PUSH", "{}"))

# From Django 6.1 on, a mail backend without this setting is deprecated, and warnings are errors here.
if django.VERSION >= (6, 1):
    MAILERS = {"default": {"BACKEND": "django.core.mail.backends.locmem.EmailBackend"}}

# A project without Django's support of time zones: all tests pass with this zone too.
if os.environ.get("RATELIMITS_TEST_NAIVE"):
    USE_TZ, TIME_ZONE = False, os.environ["RATELIMITS_TEST_NAIVE"]

# A project that its server serves below a path: all fast tests pass there too.
if SITE:
    FORCE_SCRIPT_NAME = SITE
