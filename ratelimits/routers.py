"""Which database has the app's tables: a router for projects with several databases, and the kinds that are refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from django.apps import apps as installed_apps
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError
from django.db import connections, models, router

from ratelimits.conf import conf

#: The names of kinds of databases, by the name that Django's backends use.
_NAMES = {"mysql": "MySQL or MariaDB", "oracle": "Oracle", "microsoft": "Microsoft SQL Server"}
#: The kinds of databases that can have the app's tables.
_ALLOWED = ("postgresql", "sqlite")


def own_apps() -> list[Any]:
    """Return the configs of the installed apps of this package: `ratelimits`, and those above it.

    Each has `pages`: the names of its models with a page in the admin, in the order in which people use them.
    """
    return [config for config in installed_apps.get_app_configs() if is_own(config.label)]


def is_own(label: str) -> bool:
    """Return whether the label is that of an app of this package."""
    config = installed_apps.app_configs.get(label)
    return config is not None and f"{config.name}.".startswith("ratelimits.")


class UnusableDatabase(NamedTuple):
    """Why a database cannot have the app's tables, and what to do instead."""

    reason: str
    advice: str


class RatelimitsRouter:
    """A router that puts all models of the app, with their history, into RATELIMITS["DATABASE"] and nowhere else.

    Rows of the app can refer to users in another database.
    """

    def db_for_read(self, model: type[models.Model], **hints: Any) -> str | None:
        """Return the database from which the app's rows are read; None for other apps."""
        if _belongs_to_app(model):
            return conf.DATABASE
        # `instance` is a row of the app that refers to a row of another app, such as a user. Other routers say in which
        # database the user is. Without this line, Django would look for the user in the database of `instance`.
        return router.db_for_read(model) if _belongs_to_app(hints.get("instance")) else None

    def db_for_write(self, model: type[models.Model], **hints: Any) -> str | None:
        """Return the database to which the app's rows are written; None for other apps."""
        if _belongs_to_app(model):
            return conf.DATABASE
        return router.db_for_write(model) if _belongs_to_app(hints.get("instance")) else None

    def allow_relation(self, obj1: models.Model, obj2: models.Model, **hints: Any) -> bool | None:
        """Return True if exactly one of the rows belongs to the app; the other row can be a user. Else return None."""
        return True if _belongs_to_app(obj1) != _belongs_to_app(obj2) else None

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool | None:
        """Return whether a database is allowed to have the app's tables; None for other apps.

        If DATABASE is not valid, no database is. Do not raise an error: `manage.py check --database` asks the router
        before it can report the setting. `migrate` ends before the first migration, see `read_database`.
        """
        if not is_own(app_label):
            return None
        try:
            return db == conf.DATABASE
        except ImproperlyConfigured:
            return False


def _belongs_to_app(row: Any) -> bool:
    """Return whether a model or row belongs to the app."""
    return row is not None and is_own(row._meta.app_label)


def refused(using: str) -> UnusableDatabase | None:
    """Return why a database cannot have the app's tables; None if it can. This does not connect to the database."""
    connection: Any = connections[using]
    if connection.vendor not in _ALLOWED:
        name = _NAMES.get(connection.vendor, repr(connection.vendor))
        return UnusableDatabase(
            f"The database {using!r} is {name}, but the tables of ratelimits can only be in PostgreSQL or SQLite.",
            "Add such a database to DATABASES, name it in RATELIMITS['DATABASE'], and set DATABASE_ROUTERS ="
            " ['ratelimits.routers.RatelimitsRouter', …]. All other tables can stay where they are.",
        )
    if hasattr(connection, "set_tenant") and not _own_names().isdisjoint(_apps_of_tenants()):
        return UnusableDatabase(
            "The settings give each tenant its own tables of ratelimits, but the rules, Redis and the ledger belong to"
            " all tenants together.",
            "Remove 'ratelimits' and the apps above it from TENANT_APPS or TENANT_TYPES, and add them to SHARED_APPS or"
            " the apps of the public schema.",
        )
    return None


def in_tenant(using: str) -> bool:
    """Return whether a connection of django-tenants is now in the tables of a tenant."""
    public = getattr(settings, "PUBLIC_SCHEMA_NAME", "public")
    return getattr(connections[using], "schema_name", public) != public


def _own_names() -> set[str]:
    """Return the names by which settings can list the apps of this package."""
    configs = own_apps()
    return {name for one in configs for name in (one.name, f"{type(one).__module__}.{type(one).__qualname__}")}


def _apps_of_tenants() -> Iterator[str]:
    """Yield the apps of which each tenant of django-tenants has its own tables."""
    yield from getattr(settings, "TENANT_APPS", None) or ()
    public = getattr(settings, "PUBLIC_SCHEMA_NAME", "public")
    for name, options in (getattr(settings, "TENANT_TYPES", None) or {}).items():
        if name != public:
            yield from options["APPS"]


def read_database(**kwargs: Any) -> None:
    """Raise CommandError if DATABASE is not valid: `migrate --skip-checks` would note migrations that made no table."""
    try:
        _ = conf.DATABASE
    except ImproperlyConfigured as error:
        raise CommandError(str(error)) from error


def refuse_other_databases(apps: Any, schema_editor: Any) -> None:
    """Raise CommandError in a database that cannot have the app's tables: before the first table, not half-way."""
    if (problem := refused(schema_editor.connection.alias)) is not None:
        raise CommandError(" ".join(problem))
