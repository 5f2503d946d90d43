"""The throttle classes for Django REST framework.

`QuotaThrottle` decides by the rules in the admin. The other classes have the names and the API of Django REST
framework's own classes, and decide by rates in code and settings.
"""

from __future__ import annotations

from ratelimits.throttling.by_rates import AnonRateThrottle, ScopedRateThrottle, SimpleRateThrottle, UserRateThrottle
from ratelimits.throttling.by_rules import QuotaThrottle
from ratelimits.throttling.refusing import QuotaBlocked, QuotaRefused, QuotaUnavailable

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
