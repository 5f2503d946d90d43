"""Begin in a project that has only the throttle classes with rates in code.

Such a project does not have the app in INSTALLED_APPS, so the app begins nothing, and `manage.py check` does not know
the app's settings.
"""

from __future__ import annotations

from django.apps import apps
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from ratelimits import telemetry
from ratelimits.conf import DECIDING, DEFAULTS, conf


def begin() -> None:
    """Observe decisions as TELEMETRY says. Do nothing if the app is in INSTALLED_APPS.

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
