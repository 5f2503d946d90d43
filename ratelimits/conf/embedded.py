"""Decide whether a project without a configured server uses the embedded server, and where its data is.

A project has no configured server if its settings do not name a CACHE_ALIAS, and the cache "default" is not a
django-redis cache.
"""

from __future__ import annotations

import sys
from pathlib import Path

from django.conf import settings

from ratelimits.conf import conf

_FOLDER = ".ratelimits"


def is_needed() -> bool:
    """Return whether the project has no configured server."""
    project_settings = getattr(settings, "RATELIMITS", {})
    backend = settings.CACHES.get("default", {}).get("BACKEND", "")
    named = isinstance(project_settings, dict) and "CACHE_ALIAS" in project_settings
    return not named and not backend.startswith("django_redis.")


def is_test() -> bool:
    """Return whether this process runs Django's tests. Django then puts mail into an outbox and does not send it."""
    return hasattr(sys.modules.get("django.core.mail"), "outbox")


def is_allowed() -> bool:
    """Return whether EMBEDDED allows the embedded server. None allows it in development (with DEBUG) and in tests."""
    return bool(conf.EMBEDDED) or (conf.EMBEDDED is None and (settings.DEBUG or is_test()))


def folder() -> Path:
    """Return the folder of the server's data: EMBEDDED, or `.ratelimits` beside the project's code."""
    if isinstance(conf.EMBEDDED, str):
        return Path(conf.EMBEDDED).absolute()
    return Path(getattr(settings, "BASE_DIR", None) or Path.cwd()).absolute() / _FOLDER


#: What to do if there is no server, for messages.
HINT = (
    "Add an alias with BACKEND 'django_redis.cache.RedisCache' to CACHES, and name it in RATELIMITS['CACHE_ALIAS']."
    " With DEBUG on, `pip install \"django-ratelimits[embedded]\"` is enough. RATELIMITS['EMBEDDED'] = True uses the"
    " embedded server with DEBUG off too."
)
