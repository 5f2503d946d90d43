"""The version of the configuration: the number of the newest edit.

Each process compares this version with the version of the rules in its memory.

Every write to a versioned row, also a bulk write, has these steps in one transaction:

1. Raise the version in the only row of `ConfigVersion`. The lock of this row lets only one editor write at a time.
2. Store the new version in the rows that are written. For each deleted row, add a tombstone.

After the commit, the version is published to Redis.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

from django.db import connections, models, router, transaction
from django.db.models import F
from django.db.models.signals import pre_delete
from django.dispatch import Signal, receiver
from django.utils.translation import gettext_lazy as _
from redis.exceptions import RedisError

from ratelimits.conf import conf
from ratelimits.embedded import ServerStartError
from ratelimits.engine.publish import publish_version
from ratelimits.models.history import record
from ratelimits.models.testcase import tests
from ratelimits.signals import rules_changed

logger = logging.getLogger(__name__)

#: Overrides, memberships and accounts are divided into this many shards of the configuration. (These are not the shards
#: of usage.) A process always reads a whole shard. The constant cannot be a setting, since each row stores its shard.
KEY_SHARDS = 64
#: Primary key of the only row of `ConfigVersion`.
_ROW = 1
#: Maximum number of rows that one query names.
_CHUNK = 500
#: Sent in the process whose edit raised the version above the version in Redis.
raised_above_redis = Signal()
#: Sent within the transaction of an edit, if the model has `subject_fields`. `before` and `after` have the rows before
#: and after the edit.
edited = Signal()


class ConfigVersion(models.Model):
    """The version of the configuration, in the only row of this table; 0 or no row before the first edit."""

    version = models.BigIntegerField(_("version"), default=0)
    #: If the rules of a process are older than this version, tombstones do not show all changes. So the process reads
    #: all rows again.
    complete = models.BigIntegerField(_("complete from version"), default=0)

    class Meta:
        verbose_name = _("configuration version")
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
        """Return the version in force, and `complete`: a process with an older version must read all rows again."""
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
        """Make every process with an older version than `version` read all rows again."""
        cls.objects.using(using).filter(pk=_ROW).update(complete=version)


class Change(ConfigVersion):
    """A model without its own table. It gives the page of all changes an entry in the admin's index."""

    class Meta:
        proxy = True
        verbose_name = _("change")
        verbose_name_plural = _("all changes")


class Tombstone(models.Model):
    """A mark that a row was deleted, or is now about another key, rule or plan.

    The columns `key`, `rule` and `plan` have the former values.

    Processes read tombstones to learn for which key, rule or plan they must read the rules again.
    """

    kind = models.CharField(_("kind"), max_length=20)
    row = models.BigIntegerField(_("row"))
    shard = models.SmallIntegerField(_("shard"), null=True)
    key = models.CharField(_("key"), max_length=200, blank=True)
    rule = models.CharField(_("rule"), max_length=40, blank=True)
    plan = models.BigIntegerField(_("plan"), null=True)
    version = models.BigIntegerField(_("version"), db_index=True)
    since = models.BigIntegerField(_("since"))

    class Meta:
        verbose_name = _("tombstone")
        verbose_name_plural = _("tombstones")
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
            in_force = publish_version(version)
            # Perhaps another editor has published a newer version meanwhile. So read the database once more.
            if in_force > version and in_force > ConfigVersion.read(self.using)[0]:
                _raise_above(self.using, in_force)
        except (RedisError, ServerStartError, OSError) as error:
            logger.error(
                "Configuration version %s is saved, but could not be published to Redis: other processes read it within"
                " RELOAD_INTERVAL (%s s). %s",
                version,
                conf.RELOAD_INTERVAL,
                error,
            )


def _raise_above(using: str, in_force: int) -> None:
    """Raise the version above the version in Redis, which is higher if the database was restored or created again."""
    logger.warning(
        "Redis has configuration version %s, but the database %r has an older version. So the version is now raised"
        " above the version in Redis, and every process reads all rows again",
        in_force,
        using,
    )
    with transaction.atomic(using=using):
        ConfigVersion.raise_to(using, in_force)
        with editing(using) as edit:
            ConfigVersion.require_full_read(using, edit.version)
    raised_above_redis.send(ConfigVersion)


def publish_on_commit(using: str) -> None:
    """Publish the version once the transaction is committed."""
    # A hook is a tuple. Its second item is the callback.
    callbacks = (hook[1] for hook in reversed(connections[using].run_on_commit))
    publisher = next((item for item in callbacks if isinstance(item, _Publisher)), None) or _Publisher(using)
    # Register the callback at every edit: a rollback to a savepoint removes the callbacks registered after it.
    transaction.on_commit(publisher, using=using)


def _advance(using: str) -> Edit:
    rows = ConfigVersion.objects.using(using)
    if not rows.filter(pk=_ROW).update(version=F("version") + 1):
        ConfigVersion.raise_to(using, 0)
        rows.filter(pk=_ROW).update(version=F("version") + 1)
    publish_on_commit(using)
    tests.note_edit(using)
    return Edit(using, ConfigVersion.read(using)[0], time.time_ns() // 1000)


_current_edit: ContextVar[Edit | None] = ContextVar("ratelimits_edit", default=None)


@contextmanager
def editing(using: str) -> Iterator[Edit]:
    """Open a transaction in which all writes to versioned rows are one edit. A nested call joins the outer edit."""
    edit = _current_edit.get()
    with transaction.atomic(using=using):
        if edit is not None and edit.using == using:
            yield edit
            return
        edit = _advance(using)
        token = _current_edit.set(edit)
        try:
            yield edit
        finally:
            _current_edit.reset(token)


M = TypeVar("M", bound="Versioned")


class VersionedQuerySet(models.QuerySet[M]):
    """A queryset whose bulk writes also raise and publish the version, and write tombstones and history."""

    def _rows(self, pks: Collection[Any]) -> list[M]:
        return list(self.model._base_manager.using(self.db).in_bulk(list(pks)).values())

    def _editing(self) -> AbstractContextManager[Edit]:
        # Without this flag, `self.db` could be a replica that a router names for reading.
        self._for_write = True
        return editing(self.db)

    def update(self, **kwargs: Any) -> int:
        with self._editing() as edit:
            before = self._rows(self.values_list("pk", flat=True))
            derived = self.model.derive(kwargs)
            changed = super().update(**{**kwargs, **derived, "version": edit.version, "since": edit.since})
            after = self._rows([row.pk for row in before])
            write_tombstones(before, after, edit)
            edited.send(self.model, before=before, after=after, edit=edit)
            record(after, "~", self.db)
            return changed

    update.alters_data = True  # type: ignore[attr-defined]

    def bulk_create(self, objs: Iterable[M], *args: Any, **kwargs: Any) -> list[M]:
        # Test the values, not the names, because `abulk_create` passes every option.
        if any(args[1:]) or any(value for name, value in kwargs.items() if name != "batch_size"):
            raise ValueError(
                "bulk_create of configuration takes no conflict options: the history could not record what changed"
            )
        with self._editing() as edit:
            rows = list(objs)
            for row in rows:
                row.stamp(edit)
            created = super().bulk_create(rows, *args, **kwargs)
            edited.send(self.model, before=[], after=created, edit=edit)
            record(created, "+", self.db)
            return created

    def bulk_update(self, objs: Iterable[M], fields: Iterable[str], batch_size: int | None = None) -> int:
        with self._editing() as edit:
            rows = list(objs)
            before = self._rows([row.pk for row in rows])
            for row in rows:
                row.stamp(edit)
            names = {*fields}
            derived = {*self.model.derived_fields} if names & {*self.model.subject_fields} else set()
            # Django's `bulk_update` calls `update`. The `update` of this class would record the changes a second time.
            django_rows: models.QuerySet[M] = models.QuerySet(self.model, using=self.db)
            changed = django_rows.bulk_update(rows, names | derived, batch_size)
            # All rows get the same version. `bulk_update` would need several times as long as `update` to write it.
            pks = [row.pk for row in rows]
            for first in range(0, len(pks), _CHUNK):
                chunk = django_rows.filter(pk__in=pks[first : first + _CHUNK])
                chunk.update(version=edit.version, since=edit.since)
            write_tombstones(before, rows, edit)
            after = self._rows([row.pk for row in rows])
            edited.send(self.model, before=before, after=after, edit=edit)
            record(after, "~", self.db)
            return changed

    def delete(self) -> tuple[int, dict[str, int]]:
        with self._editing():
            return super().delete()

    delete.alters_data = True  # type: ignore[attr-defined]
    delete.queryset_only = True  # type: ignore[attr-defined]


VersionedManager = models.Manager.from_queryset(VersionedQuerySet)


class Versioned(models.Model):
    """A row of the configuration. `version` and `since` (µs since 1970 UTC) are from the last edit of the row."""

    version = models.BigIntegerField(_("version"), default=0, editable=False, db_index=True)
    since = models.BigIntegerField(_("since"), default=0, editable=False)

    objects = VersionedManager()
    #: The former states of rows. Each subclass has a `History`, which simple_history replaces by a manager.
    history: ClassVar[Any]
    #: The reason that simple_history records with the next change.
    _change_reason: str | None

    #: Fields that say which key, rule or plan a row is about. After a change, a tombstone has their former values.
    subject_fields: ClassVar[tuple[str, ...]] = ()
    #: Columns that `stamp` calculates from other columns.
    derived_fields: ClassVar[tuple[str, ...]] = ()

    class Meta:
        abstract = True

    def save(
        self,
        *,
        force_insert: Any = False,
        force_update: bool = False,
        using: str | None = None,
        update_fields: Iterable[str] | None = None,
    ) -> None:
        using = using or router.db_for_write(type(self), instance=self)
        with editing(using) as edit:
            if self.subject_fields:
                rows = type(self)._base_manager.using(using)
                before = [] if self.pk is None else list(rows.filter(pk=self.pk))
                write_tombstones(before, [self], edit)
                edited.send(type(self), before=before, after=[self], edit=edit)
            self.stamp(edit)
            if update_fields is not None:
                update_fields = {*update_fields, "version", "since", *self.derived_fields}
            super().save(force_insert=force_insert, force_update=force_update, using=using, update_fields=update_fields)

    def delete(self, using: str | None = None, keep_parents: bool = False) -> tuple[int, dict[str, int]]:
        using = using or router.db_for_write(type(self), instance=self)
        with editing(using):
            return super().delete(using=using, keep_parents=keep_parents)

    def stamp(self, edit: Edit) -> None:
        """Set the row's version to the version of an edit, and calculate the derived columns."""
        self.version = edit.version
        self.since = edit.since
        for name, value in self.derive({name: getattr(self, name) for name in self.subject_fields}).items():
            setattr(self, name, value)

    @classmethod
    def derive(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of the derived columns that follow from these new values of other columns."""
        return {}

    def tombstone(self, edit: Edit) -> Tombstone:
        """Return the tombstone that an edit adds when this row is deleted or its subject changes."""
        return Tombstone(kind=str(self._meta.model_name), row=self.pk, version=edit.version, since=edit.since)

    @classmethod
    def as_of(cls, pk: int, version: int) -> Self:
        """Return the row as it was at a configuration version. Raise DoesNotExist if there was no such row then."""
        # Do not read from a replica: perhaps it does not have this version yet.
        history: Any = cls.history.using(router.db_for_write(cls))
        records = history.filter(id=pk, version__lte=version)
        newest = records.order_by("-version", "-history_id").first()
        if newest is None or newest.history_type == "-":
            raise cls.DoesNotExist(f"{cls._meta.verbose_name} {pk} was not in force at version {version}")
        row: Self = newest.instance
        return row


def write_tombstones(before: Iterable[M], after: Iterable[M], edit: Edit) -> None:
    """Write a tombstone for each row whose subject an edit changes."""
    new = {row.pk: row for row in after}
    tombstones = [
        row.tombstone(edit)
        for row in before
        if row.pk in new and any(getattr(row, name) != getattr(new[row.pk], name) for name in row.subject_fields)
    ]
    if tombstones:
        Tombstone.objects.using(edit.using).bulk_create(tombstones)


@receiver(pre_delete, dispatch_uid="ratelimits.write_tombstone")
def _write_tombstone_of_deleted(sender: type[models.Model], instance: models.Model, using: str, **kwargs: Any) -> None:
    """Write a tombstone for every deleted row, cascades included."""
    if isinstance(instance, Versioned):
        with editing(using) as edit:
            stored = type(instance)._base_manager.using(using).filter(pk=instance.pk).first() or instance
            stored.tombstone(edit).save(using=using)
            edited.send(type(stored), before=[stored], after=[], edit=edit)
            instance.stamp(edit)
