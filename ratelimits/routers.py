"""A database router for projects whose `RATELIMITS["DATABASE"]` is not "default"."""

from __future__ import annotations

from typing import Any

from django.db import models, router

from ratelimits.conf import conf


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
        """Return whether a database is allowed to have the app's tables; None for other apps."""
        return db == conf.DATABASE if app_label == "ratelimits" else None


def _belongs_to_app(row: Any) -> bool:
    """Return whether a model or row belongs to the app."""
    return row is not None and row._meta.app_label == "ratelimits"
