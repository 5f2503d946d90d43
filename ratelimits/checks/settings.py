"""System checks: every mistake in the settings that can be seen before the first request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from django.apps import AppConfig, apps
from django.conf import settings
from django.contrib.auth import get_user_model
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, router
from django.urls import URLPattern, URLResolver, get_resolver
from django.utils.module_loading import import_string
from redis import ConnectionPool
from redis.exceptions import RedisError

from ratelimits.conf import A_DICT, DEFAULTS, conf, shown
from ratelimits.conf.setting_rules import complaint
from ratelimits.engine import Unavailable
from ratelimits.engine.publish import version_in_force
from ratelimits.identity import proxies
from ratelimits.middleware import QuotaMiddleware
from ratelimits.models import ConfigVersion
from ratelimits.throttling import QuotaThrottle

_THROTTLE = "ratelimits.throttling.QuotaThrottle"


@checks.register("ratelimits")
def check_settings(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Unknown names (a typing error would otherwise pass unnoticed) and values that make no sense."""
    given = getattr(settings, "RATELIMITS", {})
    if not isinstance(given, dict):
        return [checks.Error(f"RATELIMITS is {shown(given)}.", hint=A_DICT, id="ratelimits.E002")]
    unknown = [
        checks.Error(
            f"RATELIMITS has no setting {name!r}.",
            hint=f"Known settings: {', '.join(sorted(DEFAULTS))}.",
            id="ratelimits.E001",
        )
        for name in sorted(given.keys() - DEFAULTS.keys(), key=str)
    ]
    wrong = [
        checks.Error(f"RATELIMITS[{name!r}] is {shown(given[name], name)}.", hint=hint, id="ratelimits.E002")
        for name in sorted(given.keys() & DEFAULTS.keys())
        if (hint := complaint(name, given[name]))
    ]
    return [*unknown, *wrong]


def _wrong(name: str) -> bool:
    """Whether a setting has no value that can be looked at further; `check_settings` says so."""
    try:
        getattr(conf, name)
    except ImproperlyConfigured:
        return True
    return False


@checks.register("ratelimits")
def check_cache(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """The alias that decides is a django-redis one, with a Redis database of its own."""
    if _wrong("CACHE_ALIAS"):
        return []
    alias = conf.CACHE_ALIAS
    backend = settings.CACHES.get(alias, {}).get("BACKEND", "")
    if not backend.startswith("django_redis."):
        return [
            checks.Error(
                f"The cache {alias!r}, which RATELIMITS['CACHE_ALIAS'] names, is not a django-redis cache.",
                hint="Give CACHES that alias with BACKEND 'django_redis.cache.RedisCache', or name another one.",
                id="ratelimits.E003",
            )
        ]
    own = set(_databases(alias))
    return [
        checks.Error(
            f"The caches {alias!r} and {other!r} share a Redis database.",
            hint=f"cache.clear() empties a whole database, limits and usage included: give {alias!r} another number.",
            id="ratelimits.E004",
        )
        for other in settings.CACHES
        if other != alias and own & set(_databases(other))
    ]


def _databases(alias: str) -> Iterator[tuple[Any, ...]]:
    """Server and number of each Redis database that a cache alias is kept in."""
    locations: Any = settings.CACHES[alias].get("LOCATION", "")
    for location in locations if isinstance(locations, list | tuple) else str(locations).split(","):
        try:
            place = ConnectionPool.from_url(location).connection_kwargs
        except ValueError:
            continue  # no address of a Redis: a cache of another kind
        yield place.get("host", "localhost"), place.get("port", 6379), place.get("path"), place.get("db", 0)


@checks.register("ratelimits")
def check_throttles(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """No other throttle beside ours: DRF runs each of them even after one has refused."""
    classes = getattr(settings, "REST_FRAMEWORK", {}).get("DEFAULT_THROTTLE_CLASSES", ())
    if _THROTTLE not in classes or len(classes) == 1:
        return []
    return [
        checks.Warning(
            "DEFAULT_THROTTLE_CLASSES has other throttles beside QuotaThrottle.",
            hint="A request that another one refuses is charged and billed all the same: make them rules.",
            id="ratelimits.W001",
        )
    ]


@checks.register("ratelimits")
def check_proxies(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Where other settings tell of a proxy, its number is said: else all clients have the proxy's address, or none."""
    if _wrong("NUM_PROXIES"):
        return []
    told = [name for name in ("SECURE_PROXY_SSL_HEADER", "USE_X_FORWARDED_HOST") if getattr(settings, name)]
    try:
        if proxies() is not None or not told:
            return []
    except ImproperlyConfigured as error:
        what, _stop, hint = str(error).partition(". ")
        return [checks.Error(f"{what}.", hint=hint, id="ratelimits.E007")]
    return [
        checks.Warning(
            f"{' and '.join(told)} tell of a proxy, but nothing says how many there are: every client is counted under"
            " the proxy's address.",
            hint="Set RATELIMITS['NUM_PROXIES'] to the number of proxies in front that you run yourself (0 for none).",
            id="ratelimits.W003",
        )
    ]


@checks.register("ratelimits")
def check_middleware(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Warn of requests that are decided, but that no middleware finishes."""
    if any(_is_a(QuotaMiddleware, import_string(path)) for path in settings.MIDDLEWARE):
        return []
    decided = next(_decided(), "")
    if not decided:
        return []
    return [
        checks.Warning(
            f"MIDDLEWARE has no QuotaMiddleware, and requests are decided: {decided}.",
            hint="Add 'ratelimits.middleware.QuotaMiddleware' after AuthenticationMiddleware: without it PATHS are not"
            " limited, server errors are billed, and the leases of requests that are cut off last until lease_ttl.",
            id="ratelimits.W002",
        )
    ]


def _decided() -> Iterator[str]:
    """Yield what has requests decided: settings first, which are quick to look at, then views."""
    if _THROTTLE in getattr(settings, "REST_FRAMEWORK", {}).get("DEFAULT_THROTTLE_CLASSES", ()):
        yield "REST_FRAMEWORK['DEFAULT_THROTTLE_CLASSES'] names QuotaThrottle"
    if conf.PATHS:
        yield "RATELIMITS['PATHS'] is set"
    for pattern in _patterns(get_resolver()) if getattr(settings, "ROOT_URLCONF", None) else ():
        view: Any = pattern.callback
        # An extra action of a view set has throttles of its own in its arguments.
        throttles: Any = getattr(view, "initkwargs", {}).get("throttle_classes")
        if throttles is None:
            throttles = getattr(getattr(view, "cls", None), "throttle_classes", ())
        if hasattr(view, "ratelimits") or any(_is_a(QuotaThrottle, one) for one in throttles):
            yield f"the view {pattern.lookup_str}"


def _patterns(resolver: URLResolver) -> Iterator[URLPattern]:
    for pattern in resolver.url_patterns:
        if isinstance(pattern, URLResolver):
            yield from _patterns(pattern)
        else:
            yield pattern


def _is_a(base: type, found: object) -> bool:
    return isinstance(found, type) and issubclass(found, base)


@checks.register("ratelimits", checks.Tags.database)
def check_restored(
    app_configs: Sequence[AppConfig] | None, databases: Sequence[str] | None = None, **kwargs: Any
) -> list[checks.CheckMessage]:
    """The database has the configuration version that Redis asks for; with `--database` only."""
    if _wrong("DATABASE") or conf.DATABASE not in (databases or ()):
        return []
    try:
        asked, had = version_in_force(), ConfigVersion.read(conf.DATABASE)[0]
        # An edit may just have been published.
        had = had if asked <= had else ConfigVersion.read(conf.DATABASE)[0]
    except (DatabaseError, RedisError, Unavailable, OSError, ValueError, ImproperlyConfigured):
        return []  # not migrated yet, or a server away
    if asked <= had:
        return []
    return [
        checks.Warning(
            f"Redis asks for configuration version {asked}, and the database {conf.DATABASE!r} has {had}.",
            hint="If the database was restored to an older state, run `manage.py ratelimits_reload`: until then its"
            " rules are in force, but an edit takes up to a second to be. If another project uses this Redis database,"
            " give each its own RATELIMITS['NAMESPACE'].",
            id="ratelimits.W010",
        )
    ]


@checks.register("ratelimits")
def check_routers(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Refuse routers that keep the app's rows out of DATABASE, where rules are read from, or away from their users."""
    if _wrong("DATABASE"):
        return []  # said by the check of the settings
    models = apps.get_app_config("ratelimits").get_models()
    astray = [
        model.__name__
        for model in models
        if router.db_for_write(model) != conf.DATABASE or not router.allow_migrate_model(conf.DATABASE, model)
    ]
    if not astray:
        return _users_out_of_reach()
    return [
        checks.Error(
            f"RATELIMITS['DATABASE'] is {conf.DATABASE!r}, and the routers keep elsewhere: {', '.join(astray)}.",
            hint="Write DATABASE_ROUTERS = ['ratelimits.routers.RatelimitsRouter', …], then run `manage.py migrate"
            f" --database {conf.DATABASE}`: rules in another database are never in force.",
            id="ratelimits.E005",
        )
    ]


def _users_out_of_reach() -> list[checks.CheckMessage]:
    """Refuse routers by which no row could name its user where users are in another database than DATABASE."""
    users, alias = get_user_model(), conf.DATABASE
    elsewhere = router.db_for_write(users)
    if elsewhere == alias:
        return []
    rule, user = apps.get_model("ratelimits", "Rule")(), users()
    rule._state.db, user._state.db = alias, elsewhere
    beside = router.db_for_read(users) != alias and router.db_for_read(users, instance=rule) == alias
    if router.allow_relation(user, rule) and not beside:
        return []
    return [
        checks.Error(
            f"Rules are in the database {alias!r} and users in {elsewhere!r}, and by the routers no row of the one can"
            " name a user of the other.",
            hint="Write DATABASE_ROUTERS = ['ratelimits.routers.RatelimitsRouter', …]: history and adjustments name"
            " who made them.",
            id="ratelimits.E006",
        )
    ]
