"""A system check of the options with which the app connects to Redis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.apps import AppConfig
from django.conf import settings
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string
from redis.exceptions import RedisError

from ratelimits.conf import conf, embedded
from ratelimits.django_redis_cluster import ConnectionFactory
from ratelimits.engine.transport.wire import try_options, try_options_of_async_code


@checks.register("ratelimits")
def check_connections(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Report options of the cache alias with which no connection can be made, whatever the server does."""
    try:
        alias, timeout = conf.CACHE_ALIAS, conf.TIMEOUT
        if embedded.is_needed():
            return []
    except ImproperlyConfigured:
        return []  # `check_settings` reports the invalid setting
    cache = settings.CACHES.get(alias, {})
    try:
        if not _can_be_tried(cache):
            return []
        try_options(alias, timeout)
    except (RedisError, ImproperlyConfigured, ImportError, TypeError, ValueError) as error:
        return [
            checks.Error(
                f"With the options of the cache {alias!r}, no connection to Redis can be made: {error}",
                hint=f"Each request would raise this error. {_mend(cache)}",
                id="ratelimits.E043",
            )
        ]
    try:
        try_options_of_async_code(alias, timeout)
    except ImproperlyConfigured:
        pass  # each async request raises it
    except (RedisError, TypeError, ValueError) as error:
        return [
            checks.Warning(
                f"With the options of the cache {alias!r}, async code cannot connect to Redis: {error}",
                hint="The failure policies would answer all async requests. Leave this option out.",
                id="ratelimits.W057",
            )
        ]
    return []


def _mend(cache: dict[str, Any]) -> str:
    if "SENTINELS" in cache.get("OPTIONS", {}) and str(cache.get("LOCATION")).startswith("rediss:"):
        return (
            "With Sentinel, begin LOCATION with redis:// and write 'ssl': True into CONNECTION_POOL_KWARGS and"
            " SENTINEL_KWARGS (docs/scaling.md#sentinel)."
        )
    return "Correct OPTIONS or LOCATION of this alias in CACHES."


def _can_be_tried(cache: dict[str, Any]) -> bool:
    """Return whether this is a cache of django-redis whose client does not connect when it is made.

    The client of a cluster connects. Raise ImportError if the connection factory does not exist.
    """
    if not str(cache.get("BACKEND", "")).startswith("django_redis."):
        return False
    path = cache.get("OPTIONS", {}).get("CONNECTION_FACTORY")
    factory = None if path is None else import_string(path)
    return not (isinstance(factory, type) and issubclass(factory, ConnectionFactory))
