"""Decide whether a project without a configured server uses the embedded server, and where its data is.

A project has no configured server if its settings do not name a CACHE_ALIAS, and the cache "default" is not a
django-redis cache.
"""

from __future__ import annotations

from pathlib import Path

from django.conf import settings

from ratelimits.conf import conf

_FOLDER = ".ratelimits"
#: Whether this process has an embedded server of its own, and shares none with the other processes of the project.
own = False


def is_needed() -> bool:
    """Return whether the project has no configured server."""
    project_settings = getattr(settings, "RATELIMITS", {})
    backend = settings.CACHES.get("default", {}).get("BACKEND", "")
    named = isinstance(project_settings, dict) and "CACHE_ALIAS" in project_settings
    return not named and not backend.startswith("django_redis.")


def use_own() -> None:
    """From now on, let this process have an embedded server of its own. `ratelimits.testing` does this in tests."""
    global own
    own = True


def is_allowed() -> bool:
    """Return whether EMBEDDED allows the embedded server. None allows it in development (with DEBUG) and in tests."""
    return bool(conf.EMBEDDED) or (conf.EMBEDDED is None and (settings.DEBUG or own))


def folder() -> Path:
    """Return the folder of the server's data: EMBEDDED, or `.ratelimits` beside the project's code."""
    if isinstance(conf.EMBEDDED, str):
        return Path(conf.EMBEDDED).absolute()
    return Path(getattr(settings, "BASE_DIR", None) or Path.cwd()).absolute() / _FOLDER


#: What to do if there is no server, for messages.
HINT = (
    "Add an alias with BACKEND 'django_redis.cache.RedisCache' to CACHES, and name it in RATELIMITS['CACHE_ALIAS']."
    " With DEBUG on, `pip install \"django-ratelimits[embedded]\"` is enough. RATELIMITS['EMBEDDED'] = True uses the"
    " embedded server with DEBUG off too. Django's tests turn DEBUG off: docs/testing.md names the TEST_RUNNER."
)
