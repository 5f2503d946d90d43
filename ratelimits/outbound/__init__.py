"""Limit the calls that all processes together make to another system.

Write `with permits("mailer-api", max_wait=30): …` around each call.

The caller waits until its permits are granted. `ratelimits.outbound.celery` limits Celery tasks in the same way.
"""

from __future__ import annotations

from ratelimits.outbound.deciding import WaitTooLong
from ratelimits.outbound.waiting import Permit, permits

__all__ = ["Permit", "WaitTooLong", "permits"]
