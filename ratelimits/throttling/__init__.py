"""The throttle classes for Django REST framework.

`QuotaThrottle` decides by the rules in the admin. The other classes have the names and the API of Django REST
framework's own classes, and decide by rates in code and settings. They need neither the app in INSTALLED_APPS nor a
database.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ratelimits.throttling.by_rates import AnonRateThrottle, ScopedRateThrottle, SimpleRateThrottle, UserRateThrottle
from ratelimits.throttling.refusing import QuotaBlocked, QuotaRefused, QuotaUnavailable
from ratelimits.throttling.without_app import begin

# Type checkers read __init__.pyi instead of this file: there QuotaThrottle has its type.
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


def __getattr__(name: str) -> Any:
    # Its rules are in the database: only who asks for this class needs the app in INSTALLED_APPS.
    if name == "QuotaThrottle":
        return import_module("ratelimits.throttling.by_rules").QuotaThrottle
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


begin()
