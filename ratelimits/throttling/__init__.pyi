# The types of what __init__.py exports. It imports QuotaThrottle only for a project that asks for it.
from __future__ import annotations

from ratelimits.throttling.by_rates import AnonRateThrottle, ScopedRateThrottle, SimpleRateThrottle, UserRateThrottle
from ratelimits.throttling.by_rules import QuotaThrottle
from ratelimits.throttling.view_responses import QuotaBlocked, QuotaRefused, QuotaUnavailable

__all__ = [
    "AnonRateThrottle",
    "QuotaBlocked",
    "QuotaRefused",
    "QuotaThrottle",
    "QuotaUnavailable",
    "ScopedRateThrottle",
    "SimpleRateThrottle",
    "UserRateThrottle",
]
