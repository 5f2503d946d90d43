"""Give a version and a history record to rows that `loaddata`, or other code, loads from a fixture.

For other rows, the app's `save` does this. But Django saves the rows of a fixture without a call of this `save`.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from django.db import connections, models, transaction
from django.db.models.signals import post_save, pre_save
from django.dispatch import receiver

from ratelimits.models.history import record
from ratelimits.models.versioned import Versioned, write_tombstones
from ratelimits.models.versions import ConfigVersion, Edit, edited, editing, publish_on_commit

_REASON = "loaddata"
#: By connection: the history records that `_record_edit` added in the open transaction. The inner dict has the version
#: of each record, by the row's model and primary key.
_added_versions: WeakKeyDictionary[Any, dict[tuple[type[models.Model], Any], int]] = WeakKeyDictionary()


@receiver(pre_save, dispatch_uid="ratelimits.fixtures.before")
def _remember_former(sender: type[models.Model], instance: models.Model, using: str, **kwargs: Any) -> None:
    """Remember the stored row, and give its version to the loaded row. A fixture's version is from another database."""
    if not kwargs.get("raw"):
        return
    if isinstance(instance, Versioned):
        former = sender._base_manager.using(using).filter(pk=instance.pk).first() if instance.pk is not None else None
        instance._former = former  # type: ignore[attr-defined]
        version, since = (former.version, former.since) if isinstance(former, Versioned) else (0, 0)
        instance.stamp(Edit(using, version, since))
    elif isinstance(instance, ConfigVersion):
        # A fixture must not lower the stored version.
        version, complete = ConfigVersion.read(using)
        instance.version, instance.complete = max(instance.version, version), max(instance.complete, complete)
        publish_on_commit(using)


@receiver(post_save, dispatch_uid="ratelimits.fixtures.after")
def _record_after_save(sender: type[models.Model], instance: models.Model, using: str, **kwargs: Any) -> None:
    """Record the edit after the row is saved. If the version were published earlier, processes could miss the row."""
    if not kwargs.get("raw"):
        return
    if isinstance(instance, Versioned):
        former = instance.__dict__.pop("_former", None)
        if former is None or _differ(former, instance):
            _record_edit(instance, former, using)
        return
    # A class of history records names the model of its rows in `instance_type`. Other classes have no `instance_type`.
    model_of_history = getattr(sender, "instance_type", object)
    if issubclass(model_of_history, Versioned):
        _keep_loaded_record(instance, using)


def _differ(row: models.Model, other: models.Model, *ignored: str) -> bool:
    names = {field.attname for field in row._meta.concrete_fields}.difference(ignored)
    return any(getattr(row, name) != getattr(other, name) for name in names)


def _record_edit(row: Versioned, former: Versioned | None, using: str) -> None:
    with editing(using) as edit:
        _stamp(row, edit)
        before = [] if former is None else [former]
        write_tombstones(before, [row], edit)
        edited.send(type(row), before=before, after=[row], edit=edit)
        if _is_recorded(row, using):
            return
        record([row], "+" if former is None else "~", using, _REASON)
        connection = connections[using]
        _added_versions.setdefault(connection, {})[type(row), row.pk] = edit.version
        transaction.on_commit(lambda: _added_versions.pop(connection, None), using=using)


def _is_recorded(row: Versioned, using: str) -> bool:
    """Return whether the newest history record already equals the row: in a fixture, records can come before rows."""
    records: Any = type(row).history.using(using)
    newest = records.filter(id=row.pk).order_by("-version", "-history_id").first()
    return newest is not None and newest.history_type != "-" and not _differ(row, newest, "version", "since")


def _stamp(row: Versioned, edit: Edit) -> None:
    row.stamp(edit)
    rows = type(row)._base_manager.using(edit.using).filter(pk=row.pk)
    rows.update(version=edit.version, since=edit.since)


def _keep_loaded_record(loaded: Any, using: str) -> None:
    """Keep a history record that the fixture contains. Delete the record that `_record_edit` added for the same row.

    A row must not be older than its history. So give the row a new version, except if its version is above that of the
    loaded record, or if its version and its `since` are those of the record.
    """
    model, history = loaded.instance_type, type(loaded)._base_manager.using(using)
    version = _added_versions.get(connections[using], {}).get((model, loaded.id))
    if version is not None:
        added_records = history.filter(id=loaded.id, version=version, history_change_reason=_REASON)
        added_records.exclude(pk=loaded.pk).delete()
    if ConfigVersion.read(using)[0] < loaded.version:
        ConfigVersion.raise_to(using, loaded.version)
    row = model._base_manager.using(using).filter(pk=loaded.id, version__lte=loaded.version).first()
    if row is not None and (row.version, row.since) != (loaded.version, loaded.since):
        with editing(using) as edit:
            _stamp(row, edit)
