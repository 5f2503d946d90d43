"""Say in one sentence what is missing if somebody imports a part of the app that needs its tables."""

from __future__ import annotations

from django.apps import apps
from django.core.exceptions import ImproperlyConfigured

if not apps.is_installed("ratelimits"):
    raise ImproperlyConfigured(
        "Rules, plans and usage need the app: add 'ratelimits' to INSTALLED_APPS, and a database (docs/quickstart.md)."
        " Without the app, there are only the throttle classes with rates in code, such as"
        " ratelimits.throttling.UserRateThrottle (docs/decide.md)."
    )
