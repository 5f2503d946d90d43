"""Make a rule for a test in one line."""

from __future__ import annotations

import asyncio
from typing import Any

from django.db import connections

from ratelimits.models import Rule

#: The required fields of each algorithm.
NEEDED: dict[str, dict[str, Any]] = {
    "token_bucket": {"capacity": 10, "rate": 5, "period": 1},
    "gcra": {"capacity": 10, "rate": 5, "period": 1},
    "leaky_bucket": {"capacity": 10, "rate": 5, "period": 1},
    "leaky_bucket_queue": {"capacity": 10, "rate": 5, "period": 1, "max_wait": 2},
    "fixed_window": {"capacity": 100, "period": 60},
    "calendar_window": {"capacity": 10_000, "calendar_unit": "month"},
    "sliding_window": {"capacity": 100, "period": 60},
    "sliding_log": {"capacity": 100, "period": 60},
    "smooth_bursty": {"rate": 5, "period": 1, "max_wait": 1},
    "smooth_warming_up": {"rate": 5, "period": 1, "max_wait": 1},
    "concurrency": {"capacity": 10},
}


def unsaved(name: str = "burst", algorithm: str = "token_bucket", **fields: Any) -> Rule:
    """Return a valid unsaved rule."""
    return Rule(name=name, algorithm=algorithm, **{**NEEDED[algorithm], **fields})


def rule(name: str = "burst", algorithm: str = "token_bucket", **fields: Any) -> Rule:
    """Validate and save a rule, and return it."""
    row = unsaved(name, algorithm, **fields)
    row.full_clean(validate_constraints=False)  # Saving checks the constraints, without a query for each.
    row.save()
    return row


async def arule(name: str = "burst", algorithm: str = "token_bucket", **fields: Any) -> Rule:
    """Make a rule from async code: in another thread, whose database connections are closed afterwards."""

    def make() -> Rule:
        try:
            return rule(name, algorithm, **fields)
        finally:
            connections.close_all()

    return await asyncio.to_thread(make)
