"""The demo project's settings, for processes of tests/runtimes: no task writes at intervals.

LIMITS_URL names the server of the limits.
"""

from __future__ import annotations

from tests.support.end_to_end.stopping_settings import *  # noqa: F403

ROOT_URLCONF = "tests.support.runtimes.views"
MIDDLEWARE = []
