"""The version of the configuration: the number of the newest edit.

Each process compares this version with the version of the rules in its memory. An edit raises the version in the only
row of `ConfigVersion`; the lock of this row lets only one editor write at a time. After the commit, the version is
published to Redis.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

from django.db import connections, models, transaction
from django.db.models import F
from django.dispatch import Signal
from django.utils.translation import gettext_lazy as _
from redis.exceptions import RedisError

from ratelimits.conf import conf
from ratelimits.embedded import ServerStartError
from ratelimits.engine.keys import LONGEST_KEY
from ratelimits.engine.server import publish_version
from ratelimits.signals import rules_changed

logger = logging.getLogger(__name__)

#: Overrides, memberships and accounts are divided into this many shards of the configuration. (These are not the shards
#: of usage.) A process always reads a whole shard. The constant cannot be a setting, since each row stores its shard.
KEY_SHARDS = 64
#: Primary key of the only row of `ConfigVersion`.
_ROW = 1
#: Sent if Redis had a newer version than the database, and an edit of this process raised the version above it.
raised_above_redis = Signal()
#: Sent within the transaction of each edit, before its rows are written. `using` is the database.
edit_begins = Signal()
#: Sent within the transaction of an edit. `before` and `after` have the rows before and after the edit. The
#: method `save` of a row sends this signal only for models with `tombstone_fields`.
edited = Signal()


class ConfigVersion(models.Model):
    """The version of the configuration, in the only row of this table; 0 or no row before the first edit."""

    version = models.BigIntegerField(_("version"), default=0)
    #: If the rules of a process are older than this version, tombstones do not show all changes. So the process reads
    #: all rows again.
    complete = models.BigIntegerField(_("complete from version"), default=0)

    class Meta:
        verbose_name = _("configuration version")
        default_permissions = ()
        constraints = [
            models.CheckConstraint(
                condition=models.Q(pk=_ROW),
                name="ratelimits_one_config_version",
                violation_error_message=_("The configuration has only one version: change the existing row."),
            )
        ]

    def __str__(self) -> str:
        return str(self.version)

    @classmethod
    def read(cls, using: str) -> tuple[int, int]:
        """Return the version in force, and `complete`, the oldest version from which tombstones show all changes."""
        row = cls.objects.using(using).filter(pk=_ROW).values_list("version", "complete").first()
        return row or (0, 0)

    @classmethod
    def raise_to(cls, using: str, version: int) -> None:
        """Raise the version to at least `version`."""
        rows = ConfigVersion.objects.using(using)
        rows.bulk_create([ConfigVersion(pk=_ROW)], ignore_conflicts=True)
        rows.filter(pk=_ROW, version__lt=version).update(version=version)

    @classmethod
    def require_full_read(cls, using: str, version: int) -> None:
        """Make every process whose rules are older than `version` read all rows again."""
        cls.objects.using(using).filter(pk=_ROW).update(complete=version)


class Change(ConfigVersion):
    """A model without its own table. With it, the page *All changes* has an entry in the admin's index."""

    class Meta:
        proxy = True
        verbose_name = _("change")
        verbose_name_plural = _("all changes")
        default_permissions = ("view",)


class Inspect(ConfigVersion):
    """A model without its own table. It gives the inspector an entry in the admin's index, and a permission."""

    class Meta:
        proxy = True
        verbose_name = _("inspector")
        verbose_name_plural = _("inspector")
        default_permissions = ("view",)


class Status(ConfigVersion):
    """A model without its own table. It gives the status page an entry in the admin's index, and a permission."""

    class Meta:
        proxy = True
        verbose_name = _("status")
        verbose_name_plural = _("status")
        default_permissions = ("view",)


class Tombstone(models.Model):
    """A mark that a row was deleted, or is now about another key, rule or plan.

    The columns `key`, `rule` and `plan` have the former values.

    Processes read tombstones to learn for which key, rule or plan they must read the rules again.
    """

    kind = models.CharField(_("kind"), max_length=20)
    row = models.BigIntegerField(_("row"))
    shard = models.SmallIntegerField(_("shard"), null=True)
    key = models.CharField(_("key"), max_length=LONGEST_KEY, blank=True)
    rule = models.CharField(_("rule"), max_length=40, blank=True)
    plan = models.BigIntegerField(_("plan"), null=True)
    version = models.BigIntegerField(_("version"), db_index=True)
    since = models.BigIntegerField(_("since"))

    class Meta:
        verbose_name = _("tombstone")
        verbose_name_plural = _("tombstones")
        default_permissions = ()
        indexes = [models.Index(fields=["kind", "shard"], name="ratelimits_tombstone_shard")]

    def __str__(self) -> str:
        return f"{self.kind} {self.row} ({self.version})"


@dataclass(frozen=True, slots=True)
class Edit:
    """One edit: its version, and the moment (µs since 1970 UTC) from which it is in force."""

    using: str
    version: int
    since: int


class _Publisher:
    """A callback that publishes the committed version, once per transaction."""

    def __init__(self, using: str) -> None:
        self.using = using
        self.published = False

    def __call__(self) -> None:
        if self.published:
            return
        self.published = True
        version = ConfigVersion.read(self.using)[0]
        self._publish(version)
        rules_changed.send_robust(ConfigVersion, version=version, using=self.using)

    def _publish(self, version: int) -> None:
        try:
            in_redis = publish_version(version)
            # Perhaps another editor has published a newer version meanwhile. So read the database once more.
            if in_redis > version and in_redis > ConfigVersion.read(self.using)[0]:
                _raise_above(self.using, in_redis)
        except (RedisError, ServerStartError, OSError) as error:
            logger.error(
                "Configuration version %s is saved, but could not be published to Redis: other processes read it within"
                " RELOAD_INTERVAL (%s s). %s",
                version,
                conf.RELOAD_INTERVAL,
                error,
            )


def _raise_above(using: str, in_redis: int) -> None:
    """Raise the database's version above the version in Redis. A restored or recreated database has a lower version."""
    logger.warning(
        "Redis has configuration version %s, but the database %r has an older version. So the version is now raised"
        " above the version in Redis, and every process reads all rows again",
        in_redis,
        using,
    )
    with transaction.atomic(using=using):
        ConfigVersion.raise_to(using, in_redis)
        with editing(using) as edit:
            ConfigVersion.require_full_read(using, edit.version)
    raised_above_redis.send(ConfigVersion)


def publish_on_commit(using: str) -> None:
    """Publish the version when the transaction is committed."""
    # A hook is a tuple. Its second item is the callback.
    callbacks = (hook[1] for hook in reversed(connections[using].run_on_commit))
    publisher = next((item for item in callbacks if isinstance(item, _Publisher)), None) or _Publisher(using)
    # Register the callback at every edit: a rollback to a savepoint removes the callbacks that were added after the
    # savepoint.
    transaction.on_commit(publisher, using=using)


def _advance(using: str) -> Edit:
    """Raise the version by one. Return the edit with the new version."""
    rows = ConfigVersion.objects.using(using)
    if not rows.filter(pk=_ROW).update(version=F("version") + 1):
        ConfigVersion.raise_to(using, 0)  # This adds the missing row.
        rows.filter(pk=_ROW).update(version=F("version") + 1)
    publish_on_commit(using)
    edit_begins.send(ConfigVersion, using=using)
    return Edit(using, ConfigVersion.read(using)[0], time.time_ns() // 1000)


_current_edit: ContextVar[Edit | None] = ContextVar("ratelimits_edit", default=None)


@contextmanager
def editing(using: str, since: int | None = None) -> Iterator[Edit]:
    """Open a transaction in which all writes to versioned rows are one edit. A nested call joins the outer edit.

    `since` is the moment from which the edit counts for bills, by default now (µs since 1970 UTC).
    """
    edit = _current_edit.get()
    with transaction.atomic(using=using):
        if edit is not None and edit.using == using:
            yield edit
            return
        edit = _advance(using)
        edit = edit if since is None else replace(edit, since=since)
        token = _current_edit.set(edit)
        try:
            yield edit
        finally:
            _current_edit.reset(token)
