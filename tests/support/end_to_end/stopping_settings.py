"""The demo project's settings for processes that a test stops: no task writes at intervals.

LIMITS_URL names the server of the limits, if it is not the server of everything else.
"""

from __future__ import annotations

import os

from project.settings import *  # noqa: F403
from project.settings import CACHES, RATELIMITS

RATELIMITS.update(
    PROCESS_TOTALS_INTERVAL=3600, DENY_CACHE_SECONDS=60, PREFETCH_SECONDS=float(os.environ.get("HELD_SECONDS", "1"))
)
CACHES["ratelimits"]["LOCATION"] = os.environ.get("LIMITS_URL", CACHES["ratelimits"]["LOCATION"])
