"""A database router for projects whose `RATELIMITS["DATABASE"]` is not "default"."""

from __future__ import annotations

from typing import Any

from django.db import models

from ratelimits.conf import conf


class RatelimitsRouter:
    """Keep every model of the app, its history included, in RATELIMITS["DATABASE"], and out of other databases."""

    def db_for_read(self, model: type[models.Model], **hints: Any) -> str | None:
        """Return the database that the app's rows are read from; None for other apps."""
        return conf.DATABASE if model._meta.app_label == "ratelimits" else None

    db_for_write = db_for_read

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool | None:
        """Return whether the app's tables belong in a database; None for other apps."""
        return db == conf.DATABASE if app_label == "ratelimits" else None
