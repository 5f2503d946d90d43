"""System checks of the project's settings."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from django.apps import AppConfig, apps
from django.conf import settings
from django.contrib.auth import get_user_model
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, connections, router
from redis import ConnectionPool
from redis.exceptions import RedisError

from ratelimits.addresses import proxies, proxy_networks
from ratelimits.conf import A_DICT, DEFAULTS, OF_APPS, conf, embedded, shown, wrong
from ratelimits.conf.setting_rules import complaint
from ratelimits.embedded import ServerStartError, valkey_binary
from ratelimits.engine import Unavailable
from ratelimits.engine.cluster.wire import problem_of_redis_py
from ratelimits.engine.server import version_in_force
from ratelimits.models import ConfigVersion
from ratelimits.routers import in_tenant, own_apps, refused

#: What the options of an alias for a cluster name.
_CLUSTER_FACTORY = "ratelimits.django_redis_cluster.ConnectionFactory"


@checks.register("ratelimits")
def check_settings(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Return errors for unknown names in RATELIMITS, such as misspelt ones, and for invalid values."""
    project_settings = getattr(settings, "RATELIMITS", {})
    if not isinstance(project_settings, dict):
        return [checks.Error(f"RATELIMITS is {shown(project_settings)}.", hint=A_DICT, id="ratelimits.E002")]
    unknown = [
        checks.Error(
            f"RATELIMITS has no setting {name!r}.",
            hint=f"Known settings: {', '.join(sorted(DEFAULTS))}.",
            id="ratelimits.E001",
        )
        for name in sorted(project_settings.keys() - DEFAULTS.keys(), key=str)
    ]
    invalid = [
        checks.Error(f"{wrong(name, project_settings[name])}.", hint=hint, id="ratelimits.E002")
        for name in sorted(project_settings.keys() & DEFAULTS.keys())
        if (hint := complaint(name, project_settings[name]))
    ]
    return [*unknown, *invalid, *_of_missing_apps(project_settings.keys())]


def _of_missing_apps(names: Collection[str]) -> Iterator[checks.CheckMessage]:
    """Yield a warning for the settings of each app that is not installed: nothing reads them."""
    for app, of_app in OF_APPS.items():
        idle = sorted(name for name in of_app if name in names)
        if idle and not apps.is_installed(app):
            yield checks.Warning(
                f"These settings of RATELIMITS do nothing in this project: {', '.join(idle)}.",
                hint=f"Add {app!r} to INSTALLED_APPS, or remove them.",
                id="ratelimits.W060",
            )


def _is_invalid(name: str) -> bool:
    """Return whether a setting is invalid. If it is, the other checks do nothing: `check_settings` reports it."""
    try:
        getattr(conf, name)
    except ImproperlyConfigured:
        return True
    return False


@checks.register("ratelimits")
def check_cache(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Return errors if CACHE_ALIAS does not name a django-redis cache, or if other caches use its Redis database."""
    if _is_invalid("CACHE_ALIAS") or _is_invalid("EMBEDDED"):
        return []
    if embedded.is_needed():
        return _check_embedded()
    alias = conf.CACHE_ALIAS
    backend = settings.CACHES.get(alias, {}).get("BACKEND", "")
    if not backend.startswith("django_redis."):
        return [
            checks.Error(
                f"The cache {alias!r}, which RATELIMITS['CACHE_ALIAS'] names, is not a django-redis cache.",
                hint="Add this alias to CACHES with BACKEND 'django_redis.cache.RedisCache', or name another alias. In"
                " development with the extra `embedded`, you may delete CACHE_ALIAS instead.",
                id="ratelimits.E003",
            )
        ]
    options: Any = settings.CACHES[alias].get("OPTIONS") or {}
    if options.get("CONNECTION_FACTORY") == _CLUSTER_FACTORY and (problem := problem_of_redis_py()):
        return [checks.Error(problem, hint="Run `pip install --upgrade redis`.", id="ratelimits.E003")]
    databases = set(_databases(alias))
    return [
        checks.Error(
            f"The caches {alias!r} and {other!r} share a Redis database.",
            hint=f"cache.clear() deletes everything in a Redis database, limits and usage too: give {alias!r} another"
            " database number.",
            id="ratelimits.E004",
        )
        for other in settings.CACHES
        if other != alias and databases & set(_databases(other))
    ]


def _check_embedded() -> list[checks.CheckMessage]:
    """Return an error if a project without a configured server cannot use the embedded server.

    The project cannot use it if `embedded.is_allowed` returns False, or if the server's program is not installed.
    """
    if embedded.is_allowed():
        try:
            valkey_binary()
        except ServerStartError:
            pass
        else:
            return []
    message = "The project has no Redis server: the cache 'default' is not a django-redis cache."
    return [checks.Error(message, hint=embedded.HINT, id="ratelimits.E003")]


def _databases(alias: str) -> Iterator[tuple[Any, ...]]:
    """Yield the server and number of each Redis database that a cache alias uses."""
    locations: Any = settings.CACHES[alias].get("LOCATION", "")
    for location in locations if isinstance(locations, list | tuple) else str(locations).split(","):
        try:
            options = ConnectionPool.from_url(location).connection_kwargs
        except ValueError:
            continue  # This is not the URL of a Redis server: the cache is of another kind.
        yield options.get("host", "localhost"), options.get("port", 6379), options.get("path"), options.get("db", 0)


@checks.register("ratelimits")
def check_enabled(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Warn if ENABLED is False in production, that is, with DEBUG off."""
    if settings.DEBUG or _is_invalid("ENABLED") or conf.ENABLED:
        return []
    return [
        checks.Warning(
            "RATELIMITS['ENABLED'] is False: every request passes, and no usage is counted or billed.",
            hint="Remove ENABLED from the settings of production. In tests, use ratelimits.testing.no_rate_limits.",
            id="ratelimits.W004",
        )
    ]


@checks.register("ratelimits")
def check_proxies(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Warn if Django's settings show that there is a proxy, but no setting says which proxies are trusted.

    All clients are then counted under one key: the proxy's address, or the key for an unknown address. Return an error
    if the settings of proxies are wrong.
    """
    if any(map(_is_invalid, ("NUM_PROXIES", "TRUSTED_PROXIES", "ADDRESS_HEADER"))):
        return []
    if DEFAULTS["ADDRESS_HEADER"] != conf.ADDRESS_HEADER and not conf.TRUSTED_PROXIES:
        return [
            checks.Error(
                f"RATELIMITS['ADDRESS_HEADER'] is {shown(conf.ADDRESS_HEADER)}, but no proxy is trusted: the header is"
                " not read, because a client can write it too.",
                hint="Set RATELIMITS['TRUSTED_PROXIES'] to the networks of your proxies, such as ['10.0.0.0/8'].",
                id="ratelimits.E008",
            )
        ]
    proxy_settings = [name for name in ("SECURE_PROXY_SSL_HEADER", "USE_X_FORWARDED_HOST") if getattr(settings, name)]
    try:
        proxy_networks(tuple(conf.TRUSTED_PROXIES))
        if proxies() is not None or conf.TRUSTED_PROXIES or not proxy_settings:
            return []
    except ImproperlyConfigured as error:
        message, _stop, hint = str(error).partition(". ")
        return [checks.Error(f"{message}.", hint=hint, id="ratelimits.E007")]
    return [
        checks.Warning(
            f"There is a proxy (see {' and '.join(proxy_settings)}), but no setting says how many proxies there are:"
            " every client is counted under the proxy's address.",
            hint="Set RATELIMITS['NUM_PROXIES'] to the number of proxies that you run yourself (0 for none), or"
            " RATELIMITS['TRUSTED_PROXIES'] to their networks.",
            id="ratelimits.W003",
        )
    ]


@checks.register("ratelimits", checks.Tags.database)
def check_restored(
    app_configs: Sequence[AppConfig] | None, databases: Sequence[str] | None = None, **kwargs: Any
) -> list[checks.CheckMessage]:
    """Warn if Redis has a newer version of the rules than the database. Do nothing without `--database`."""
    if _is_invalid("DATABASE") or conf.DATABASE not in (databases or ()):
        return []
    try:
        # Read Redis first. An edit is in the database before it is published to Redis, so an edit between the two reads
        # cannot make the database seem older.
        in_redis = version_in_force()
        in_database = ConfigVersion.read(conf.DATABASE)[0]
    except (DatabaseError, RedisError, Unavailable, ServerStartError, OSError, ValueError, ImproperlyConfigured):
        return []  # The tables do not exist yet, or a server is down or not installed.
    if in_redis <= in_database:
        return []
    return [
        checks.Warning(
            f"Redis has configuration version {in_redis}, but the database {conf.DATABASE!r} has {in_database}.",
            hint="If the database was restored to an older state, run `manage.py ratelimits_reload`. Until you"
            " do this, the database's rules are in force, but an edit takes effect up to a second late. If another"
            " project uses this Redis database, give each project its own RATELIMITS['NAMESPACE']. In a test run, give"
            " the tests their own Redis database (docs/testing.md).",
            id="ratelimits.W010",
        )
    ]


@checks.register("ratelimits")
def check_database(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Return an error if the database of the rules and the ledger cannot have the app's tables.

    Warn if its moments cannot be stored exactly, or if it would refuse to write in requests of the project.
    """
    if _is_invalid("DATABASE"):
        return []
    if (problem := refused(conf.DATABASE)) is not None:
        return [checks.Error(problem.reason, hint=problem.advice, id="ratelimits.E014")]
    return [*_old_psycopg(), *_deferred_requests()]


def _deferred_requests() -> Iterator[checks.CheckMessage]:
    """Yield a warning if each request is a transaction of SQLite that gets its lock only when it first writes.

    SQLite refuses this lock at once if another connection has written since the transaction began to read: no timeout
    helps. The app's threads write during requests, for example the totals of the process.
    """
    connection = connections[conf.DATABASE]
    mode = str((connection.settings_dict.get("OPTIONS") or {}).get("transaction_mode") or "DEFERRED").upper()
    if connection.vendor == "sqlite" and connection.settings_dict.get("ATOMIC_REQUESTS") and mode == "DEFERRED":
        yield checks.Warning(
            f"The database {conf.DATABASE!r} is SQLite with ATOMIC_REQUESTS. A request that reads before it writes"
            " fails with “database is locked” if a thread of the app writes between the two, as it does every few"
            " seconds.",
            hint=f"Write DATABASES[{conf.DATABASE!r}]['OPTIONS'] = {{'transaction_mode': 'IMMEDIATE'}}, or use"
            " PostgreSQL.",
            id="ratelimits.W056",
        )


def _old_psycopg() -> Iterator[checks.CheckMessage]:
    """Yield a warning if Django uses psycopg2 for PostgreSQL, in a project with `USE_TZ=False`."""
    connection: Any = connections[conf.DATABASE]
    if not settings.USE_TZ and connection.vendor == "postgresql" and connection.Database.__name__ == "psycopg2":
        yield checks.Warning(
            "The project has USE_TZ = False, and Django uses psycopg2: when the clocks are put back, moments of the app"
            " can be wrong by an hour.",
            hint="Run `pip install psycopg` (version 3), or set USE_TZ = True.",
            id="ratelimits.W053",
        )


@checks.register("ratelimits")
def check_routers(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Return an error if routers put the app's rows into another database than DATABASE.

    Also return an error if the routers do not let the app's rows refer to users. While django-tenants migrates the
    tables of a tenant, its router answers for them, not for the tables that all tenants share.
    """
    if _is_invalid("DATABASE") or refused(conf.DATABASE) is not None or in_tenant(conf.DATABASE):
        return []
    models = [model for config in own_apps() for model in config.get_models()]
    elsewhere = [
        model.__name__
        for model in models
        if router.db_for_write(model) != conf.DATABASE or not router.allow_migrate_model(conf.DATABASE, model)
    ]
    if not elsewhere:
        return _unreachable_users()
    return [
        checks.Error(
            f"RATELIMITS['DATABASE'] is {conf.DATABASE!r}, but the routers put these models into another database:"
            f" {', '.join(elsewhere)}.",
            hint="Set DATABASE_ROUTERS = ['ratelimits.routers.RatelimitsRouter', …], then run `manage.py migrate"
            f" --database {conf.DATABASE}`: rules in another database are never in force.",
            id="ratelimits.E005",
        )
    ]


def _unreachable_users() -> list[checks.CheckMessage]:
    """Return an error if users are in another database and the routers do not let rows refer to them."""
    try:
        users = get_user_model()
    except ImproperlyConfigured:
        return []  # Another check reports a project without users.
    alias = conf.DATABASE
    users_alias = router.db_for_write(users)
    if users_alias == alias:
        return []
    rule, user = apps.get_model("ratelimits", "Rule")(), users()
    rule._state.db, user._state.db = alias, users_alias
    # Django gives the rule as a hint. A router that follows this hint would search users in the rule's database.
    hint_misleads = router.db_for_read(users) != alias and router.db_for_read(users, instance=rule) == alias
    if router.allow_relation(user, rule) and not hint_misleads:
        return []
    return [
        checks.Error(
            f"Rules are in the database {alias!r} and users in {users_alias!r}, and the routers do not allow rows of"
            f" {alias!r} to name users of {users_alias!r}.",
            hint="Set DATABASE_ROUTERS = ['ratelimits.routers.RatelimitsRouter', …]: history and adjustments name the"
            " users who made them.",
            id="ratelimits.E006",
        )
    ]
