"""A database router for projects whose `RATELIMITS["DATABASE"]` is not "default"."""

from __future__ import annotations

from typing import Any

from django.db import models, router

from ratelimits.conf import conf


class RatelimitsRouter:
    """A router that keeps all models of the app, with their history, only in RATELIMITS["DATABASE"].

    Rows of the app may refer to users in another database.
    """

    def db_for_read(self, model: type[models.Model], **hints: Any) -> str | None:
        """Return the database that the app's rows are read from; None for other apps."""
        if _ours(model):
            return conf.DATABASE
        # A user whom a row of the app names is in the database that other routers say, not in the row's database, where
        # Django would look.
        return router.db_for_read(model) if _ours(hints.get("instance")) else None

    def db_for_write(self, model: type[models.Model], **hints: Any) -> str | None:
        """Return the database that the app's rows are written to; None for other apps."""
        if _ours(model):
            return conf.DATABASE
        return router.db_for_write(model) if _ours(hints.get("instance")) else None

    def allow_relation(self, obj1: models.Model, obj2: models.Model, **hints: Any) -> bool | None:
        """Return True for a row of the app and one of another app, such as a user; None for others."""
        return True if _ours(obj1) != _ours(obj2) else None

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool | None:
        """Return whether the app's tables belong in a database; None for other apps."""
        return db == conf.DATABASE if app_label == "ratelimits" else None


def _ours(row: Any) -> bool:
    """Return whether a model or row belongs to the app."""
    return row is not None and row._meta.app_label == "ratelimits"
