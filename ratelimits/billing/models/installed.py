"""Say in one sentence what is missing if somebody imports a part of the app that needs its tables."""

from __future__ import annotations

from django.apps import apps
from django.core.exceptions import ImproperlyConfigured

import ratelimits.usage.models.installed  # noqa: F401  (raises an error if the app below is not installed)

if not apps.is_installed("ratelimits.billing"):
    raise ImproperlyConfigured(
        "Billing needs its app: add 'ratelimits.billing' to INSTALLED_APPS, after 'ratelimits.usage'"
        " (docs/installing.md). Without this app, usage is counted, but there are no reports."
    )
