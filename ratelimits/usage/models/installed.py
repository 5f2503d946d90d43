"""Say in one sentence what is missing if somebody imports a part of the app that needs its tables."""

from __future__ import annotations

from django.apps import apps
from django.core.exceptions import ImproperlyConfigured

import ratelimits.models.installed  # noqa: F401  (raises an error if the app below is not installed)

if not apps.is_installed("ratelimits.usage"):
    raise ImproperlyConfigured(
        "Counting usage needs its app: add 'ratelimits.usage' to INSTALLED_APPS, after 'ratelimits'"
        " (docs/installing.md). Without this app, limits hold, but nothing is counted."
    )
