"""A base class for rows of the configuration. Every write to such rows raises the configuration's version.

Every write, also a bulk write, has these steps in one transaction:

1. Raise the version (see `versions.editing`).
2. Store the new version in the rows that are written. Add a tombstone for each row that is deleted, or whose
   `tombstone_fields` change.
3. Add the written rows to the history.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Self, TypeVar

from django.apps import apps
from django.db import models, router
from django.db.models.signals import pre_delete
from django.dispatch import receiver
from django.utils.translation import gettext_lazy as _

from ratelimits.models.history import record
from ratelimits.models.versions import Edit, Tombstone, edited, editing

#: Maximum number of rows that one query names.
_CHUNK = 500

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
        # Only `batch_size`, the first positional option, is accepted. `abulk_create` passes every option, so test the
        # values and not the names.
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
            derived = {*self.model.derived_fields} if names & {*self.model.tombstone_fields} else set()
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
        with self._editing() as edit:
            if edited.has_listeners(self.model):
                # Tell of all rows together: while one row is deleted, the others are still in the table.
                edited.send(self.model, before=list(self.all()), after=[], edit=edit)
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
    tombstone_fields: ClassVar[tuple[str, ...]] = ()
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
            if self.tombstone_fields:
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
        for name, value in self.derive({name: getattr(self, name) for name in self.tombstone_fields}).items():
            setattr(self, name, value)

    @classmethod
    def derive(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of the derived columns that follow from these new values of other columns."""
        return {}

    def tombstone(self, edit: Edit) -> Tombstone:
        """Return the tombstone that an edit adds when this row is deleted or one of its `tombstone_fields` changes."""
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


def versioned_models() -> list[type[Versioned]]:
    """Return the tables of the configuration that the installed apps have.

    Leave out models that share the history of another one, such as a proxy of a project: each row is in one table.
    """
    models_ = (model for model in apps.get_models() if issubclass(model, Versioned))
    return [model for model in models_ if model.history.model.instance_type is model]


def write_tombstones(before: Iterable[M], after: Iterable[M], edit: Edit) -> None:
    """Write a tombstone for each row whose `tombstone_fields` an edit changes."""
    new = {row.pk: row for row in after}
    tombstones = [
        row.tombstone(edit)
        for row in before
        if row.pk in new and any(getattr(row, name) != getattr(new[row.pk], name) for name in row.tombstone_fields)
    ]
    if tombstones:
        Tombstone.objects.using(edit.using).bulk_create(tombstones)


@receiver(pre_delete, dispatch_uid="ratelimits.write_tombstone")
def _write_tombstone_of_deleted(
    sender: type[models.Model], instance: models.Model, using: str, origin: Any, **kwargs: Any
) -> None:
    """Write a tombstone for every deleted row, also for a row that a cascade deletes."""
    if isinstance(instance, Versioned):
        with editing(using) as edit:
            # `instance` can have changes that were never saved.
            stored = type(instance)._base_manager.using(using).filter(pk=instance.pk).first() or instance
            stored.tombstone(edit).save(using=using)
            if not (isinstance(origin, VersionedQuerySet) and origin.model is type(stored)):
                edited.send(type(stored), before=[stored], after=[], edit=edit)
            instance.stamp(edit)  # `simple_history` records the deletion with this version.
