"""The throttle classes for Django REST framework.

`QuotaThrottle` decides by the rules in the admin. The other classes have the names and the API of Django REST
framework's own classes, and decide by rates in code and settings. They need neither the app in INSTALLED_APPS nor a
database.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from django.apps import apps
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from ratelimits import telemetry
from ratelimits.conf import DECIDING, DEFAULTS, conf
from ratelimits.throttling.by_rates import AnonRateThrottle, ScopedRateThrottle, SimpleRateThrottle, UserRateThrottle
from ratelimits.throttling.view_responses import QuotaBlocked, QuotaRefused, QuotaUnavailable

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


def begin_without_app() -> None:
    """Observe decisions as TELEMETRY says, in a project that has only the throttle classes with rates in code.

    Such a project does not have the app in INSTALLED_APPS, so the app begins nothing, and `manage.py check` does not
    know the app's settings. Do nothing if the app is in INSTALLED_APPS.

    Raise ImproperlyConfigured for a setting that is unknown, or that does nothing without the app.
    """
    if apps.is_installed("ratelimits") if apps.apps_ready else "ratelimits" in settings.INSTALLED_APPS:
        return
    assert conf.TELEMETRY is not None  # reading it raises an error if it is not valid, or if RATELIMITS is not a dict
    for name in getattr(settings, "RATELIMITS", {}):
        if name not in DEFAULTS:
            known = ", ".join(sorted(DECIDING))
            raise ImproperlyConfigured(f"RATELIMITS has no setting {name!r}. Known settings: {known}.")
        if name not in DECIDING:
            raise ImproperlyConfigured(
                f"RATELIMITS[{name!r}] does nothing in this project, because 'ratelimits' is not in INSTALLED_APPS: add"
                " the app, or remove the setting."
            )
    telemetry.start()


begin_without_app()
