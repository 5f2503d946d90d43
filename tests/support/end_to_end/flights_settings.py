"""The demo project's settings, for the views of tests.support.end_to_end.flights."""

from __future__ import annotations

from project.settings import *  # noqa: F403

ROOT_URLCONF = "tests.support.end_to_end.flights"
MIDDLEWARE = ["ratelimits.middleware.QuotaMiddleware"]
