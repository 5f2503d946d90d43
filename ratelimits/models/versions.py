"""The configuration version: which edits a process has seen, and how the next decision learns of a new one.

Every write to a versioned row, bulk writes included, takes the next version within its own transaction by
updating the one ConfigVersion row first (so its lock puts editors in order), stamps it on the rows, keeps a
tombstone for what went away, and publishes the version to Redis once the transaction is committed.
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
from ratelimits.engine.publish import publish_version
from ratelimits.models.history import record
from ratelimits.models.testcase import tests

logger = logging.getLogger(__name__)

#: Shards that overrides, memberships and accounts are read by; part of the data, so not a setting.
KEY_SHARDS = 64
_ROW = 1
#: Sent in the process whose edit lifted the version above that of Redis.
overtaken = Signal()
#: Sent within the transaction of an edit, with the rows `before` and `after` it, where a row's model has an `about`.
edited = Signal()


class ConfigVersion(models.Model):
    """One row: the version of the configuration, 0 (or no row) before the first edit."""

    version = models.BigIntegerField(_("version"), default=0)
    #: Processes that hold an older version read everything again: tombstones could not tell them all.
    complete = models.BigIntegerField(_("complete from version"), default=0)

    class Meta:
        verbose_name = _("configuration version")
        constraints = [
            models.CheckConstraint(
                condition=models.Q(pk=_ROW),
                name="ratelimits_one_config_version",
                violation_error_message=_("There is one version of the configuration: change its one row."),
            )
        ]

    def __str__(self) -> str:
        return str(self.version)

    @classmethod
    def read(cls, using: str) -> tuple[int, int]:
        """The version in force and the oldest version that a delta can start from."""
        row = cls.objects.using(using).filter(pk=_ROW).values_list("version", "complete").first()
        return row or (0, 0)

    @classmethod
    def lift(cls, using: str, version: int) -> None:
        """Raise the version to at least `version`."""
        rows = ConfigVersion.objects.using(using)
        rows.bulk_create([ConfigVersion(pk=_ROW)], ignore_conflicts=True)
        rows.filter(pk=_ROW, version__lt=version).update(version=version)

    @classmethod
    def forget_deltas(cls, using: str, version: int) -> None:
        """Let every process that holds less than `version` read everything again."""
        cls.objects.using(using).filter(pk=_ROW).update(complete=version)


class Tombstone(models.Model):
    """What a row was about before it was deleted, or before an edit made it about something else."""

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
    """One edit: its version, and since when (µs since 1970 UTC) it holds."""

    using: str
    version: int
    since: int


class _Publisher:
    """Publishes, once per transaction, the version that was committed."""

    def __init__(self, using: str) -> None:
        self.using = using
        self.done = False

    def __call__(self) -> None:
        if self.done:
            return
        self.done = True
        version = ConfigVersion.read(self.using)[0]
        try:
            in_force = publish_version(version)
            # Another editor's version may have been published meanwhile: only what the database has not is ahead of it.
            if in_force > version and in_force > ConfigVersion.read(self.using)[0]:
                _overtake(self.using, in_force)
        except (RedisError, OSError) as error:
            logger.error(
                "Configuration version %s is saved, but Redis could not be told of it: other processes follow within"
                " RELOAD_INTERVAL (%s s). %s",
                version,
                conf.RELOAD_INTERVAL,
                error,
            )


def _overtake(using: str, in_force: int) -> None:
    """Lift the version above what Redis has: the database was restored, or emptied, and made anew."""
    logger.warning(
        "Redis asked for configuration version %s, which the database %r has not reached: it is lifted above that, and"
        " every process reads everything again",
        in_force,
        using,
    )
    with transaction.atomic(using=using):
        ConfigVersion.lift(using, in_force)
        with editing(using) as edit:
            ConfigVersion.forget_deltas(using, edit.version)
    overtaken.send(ConfigVersion)


def publish_on_commit(using: str) -> None:
    """Publish the version that the transaction commits."""
    pending = (hook[1] for hook in reversed(connections[using].run_on_commit))
    publisher = next((hook for hook in pending if isinstance(hook, _Publisher)), None) or _Publisher(using)
    # For every edit, since a savepoint that is rolled back takes its hooks along.
    transaction.on_commit(publisher, using=using)


def _advance(using: str) -> Edit:
    rows = ConfigVersion.objects.using(using)
    if not rows.filter(pk=_ROW).update(version=F("version") + 1):
        ConfigVersion.lift(using, 0)
        rows.filter(pk=_ROW).update(version=F("version") + 1)
    publish_on_commit(using)
    tests.note_edit(using)
    return Edit(using, ConfigVersion.read(using)[0], time.time_ns() // 1000)


_under_way: ContextVar[Edit | None] = ContextVar("ratelimits_edit", default=None)


@contextmanager
def editing(using: str) -> Iterator[Edit]:
    """A transaction whose writes to versioned rows are one edit, of one version; nested: of the outer."""
    edit = _under_way.get()
    with transaction.atomic(using=using):
        if edit is not None and edit.using == using:
            yield edit
            return
        edit = _advance(using)
        token = _under_way.set(edit)
        try:
            yield edit
        finally:
            _under_way.reset(token)


M = TypeVar("M", bound="Versioned")


class VersionedQuerySet(models.QuerySet[M]):
    """Bulk writes that are versioned, published and kept in the history like single ones."""

    def _rows(self, pks: Collection[Any]) -> list[M]:
        return list(self.model._base_manager.using(self.db).in_bulk(list(pks)).values())

    def _editing(self) -> AbstractContextManager[Edit]:
        # Said before `self.db` is asked, or a router would name the database to read from.
        self._for_write = True
        return editing(self.db)

    def update(self, **kwargs: Any) -> int:
        with self._editing() as edit:
            before = self._rows(self.values_list("pk", flat=True))
            derived = self.model.derive(kwargs)
            changed = super().update(**{**kwargs, **derived, "version": edit.version, "since": edit.since})
            after = self._rows([row.pk for row in before])
            bury_former(before, after, edit)
            edited.send(self.model, before=before, after=after, edit=edit)
            record(after, "~", self.db)
            return changed

    update.alters_data = True  # type: ignore[attr-defined]

    def bulk_create(self, objs: Iterable[M], *args: Any, **kwargs: Any) -> list[M]:
        # Asked by value: abulk_create() names every option.
        if any(args[1:]) or any(value for name, value in kwargs.items() if name != "batch_size"):
            raise ValueError(
                "bulk_create of configuration takes no conflict options: history could not say what changed"
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
            written = {*fields, "version", "since", *self.model.derived_fields}
            # Not through super(): Django's bulk_update calls update(), which here is an edit of its own.
            plain: models.QuerySet[M] = models.QuerySet(self.model, using=self.db)
            changed = plain.bulk_update(rows, written, batch_size)
            bury_former(before, rows, edit)
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
    """A row of the configuration; `version` and `since` are those of its last edit."""

    version = models.BigIntegerField(_("version"), default=0, editable=False, db_index=True)
    since = models.BigIntegerField(_("since"), default=0, editable=False)

    objects = VersionedManager()

    #: Fields that say what a row is about; when one changes, a tombstone tells what it was about before.
    about: ClassVar[tuple[str, ...]] = ()
    #: Columns that `stamp` computes from others.
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
            if self.about:
                rows = type(self)._base_manager.using(using)
                before = [] if self.pk is None else list(rows.filter(pk=self.pk))
                bury_former(before, [self], edit)
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
        """Take over the version of an edit, and the columns that follow from others."""
        self.version = edit.version
        self.since = edit.since
        for name, value in self.derive({name: getattr(self, name) for name in self.about}).items():
            setattr(self, name, value)

    @classmethod
    def derive(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """The columns that follow from other columns' new values."""
        return {}

    def tombstone(self, edit: Edit) -> Tombstone:
        """What is left when this row goes away."""
        return Tombstone(kind=str(self._meta.model_name), row=self.pk, version=edit.version, since=edit.since)

    @classmethod
    def as_of(cls, pk: int, version: int) -> Self:
        """The row as it was at a configuration version; DoesNotExist before it was made and once deleted."""
        # Not from a replica, which may not have heard of that version yet.
        history: Any = cls.history.using(router.db_for_write(cls))  # type: ignore[attr-defined]
        records = history.filter(id=pk, version__lte=version)
        newest = records.order_by("-version", "-history_id").first()
        if newest is None or newest.history_type == "-":
            raise cls.DoesNotExist(f"{cls._meta.verbose_name} {pk} was not in force at version {version}")
        row: Self = newest.instance
        return row


def bury_former(before: Iterable[M], after: Iterable[M], edit: Edit) -> None:
    """Tombstones for the rows that are about something else after an edit."""
    now = {row.pk: row for row in after}
    graves = [
        row.tombstone(edit)
        for row in before
        if row.pk in now and any(getattr(row, name) != getattr(now[row.pk], name) for name in row.about)
    ]
    if graves:
        Tombstone.objects.using(edit.using).bulk_create(graves)


@receiver(pre_delete, dispatch_uid="ratelimits.bury")
def _bury(sender: type[models.Model], instance: models.Model, using: str, **kwargs: Any) -> None:
    """Every deletion, cascades included, leaves a tombstone."""
    if isinstance(instance, Versioned):
        with editing(using) as edit:
            stored = type(instance)._base_manager.using(using).filter(pk=instance.pk).first() or instance
            stored.tombstone(edit).save(using=using)
            edited.send(type(stored), before=[stored], after=[], edit=edit)
            instance.stamp(edit)
