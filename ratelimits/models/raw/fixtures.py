"""Rows that `loaddata`, or whoever else saves what a serializer has read, writes straight into the tables."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from django.db import connections, models, transaction
from django.db.models.signals import post_save, pre_save
from django.dispatch import receiver

from ratelimits.models.history import record
from ratelimits.models.versions import (
    ConfigVersion,
    Edit,
    Versioned,
    bury_former,
    edited,
    editing,
    publish_on_commit,
)

_REASON = "loaddata"
#: Of each connection, the records that rows got in its transaction: (model, row) -> version.
_recorded: WeakKeyDictionary[Any, dict[tuple[type[models.Model], Any], int]] = WeakKeyDictionary()


@receiver(pre_save, dispatch_uid="ratelimits.fixtures.before")
def _before(sender: type[models.Model], instance: models.Model, using: str, **kwargs: Any) -> None:
    """Keep what the row was; what the fixture says of versions is another database's."""
    if not kwargs.get("raw"):
        return
    if isinstance(instance, Versioned):
        former = sender._base_manager.using(using).filter(pk=instance.pk).first() if instance.pk is not None else None
        instance._former = former  # type: ignore[attr-defined]
        version, since = (former.version, former.since) if isinstance(former, Versioned) else (0, 0)
        instance.stamp(Edit(using, version, since))
    elif isinstance(instance, ConfigVersion):
        version, complete = ConfigVersion.read(using)
        instance.version, instance.complete = max(instance.version, version), max(instance.complete, complete)
        publish_on_commit(using)


@receiver(post_save, dispatch_uid="ratelimits.fixtures.after")
def _after(sender: type[models.Model], instance: models.Model, using: str, **kwargs: Any) -> None:
    """Make the row an edit now that it is there: a version that was published earlier would be read without it."""
    if not kwargs.get("raw"):
        return
    if isinstance(instance, Versioned):
        former = instance.__dict__.pop("_former", None)
        if former is None or _differ(former, instance):
            _edit(instance, former, using)
    elif issubclass(getattr(sender, "instance_type", object), Versioned):
        _prefer(instance, using)


def _differ(one: models.Model, other: models.Model, *but: str) -> bool:
    names = {field.attname for field in one._meta.concrete_fields}.difference(but)
    return any(getattr(one, name) != getattr(other, name) for name in names)


def _edit(row: Versioned, former: Versioned | None, using: str) -> None:
    with editing(using) as edit:
        _stamp(row, edit)
        before = [] if former is None else [former]
        bury_former(before, [row], edit)
        edited.send(type(row), before=before, after=[row], edit=edit)
        if _known(row, using):
            return
        record([row], "+" if former is None else "~", using, _REASON)
        connection = connections[using]
        _recorded.setdefault(connection, {})[type(row), row.pk] = edit.version
        transaction.on_commit(lambda: _recorded.pop(connection, None), using=using)


def _known(row: Versioned, using: str) -> bool:
    """Return whether the history says this of the row: the fixture may have brought its records first."""
    records: Any = type(row).history.using(using)  # type: ignore[attr-defined]
    newest = records.filter(id=row.pk).order_by("-version", "-history_id").first()
    return newest is not None and newest.history_type != "-" and not _differ(row, newest, "version", "since")


def _stamp(row: Versioned, edit: Edit) -> None:
    row.stamp(edit)
    rows = type(row)._base_manager.using(edit.using).filter(pk=row.pk)
    rows.update(version=edit.version, since=edit.since)


def _prefer(loaded: Any, using: str) -> None:
    """Prefer a record that the fixture brings over the one that its row just got; the row is newer than it."""
    model, history = loaded.instance_type, type(loaded)._base_manager.using(using)
    version = _recorded.get(connections[using], {}).get((model, loaded.id))
    if version is not None:
        own = history.filter(id=loaded.id, version=version, history_change_reason=_REASON)
        own.exclude(pk=loaded.pk).delete()
    if ConfigVersion.read(using)[0] < loaded.version:
        ConfigVersion.lift(using, loaded.version)
    row = model._base_manager.using(using).filter(pk=loaded.id, version__lte=loaded.version).first()
    if row is not None:
        with editing(using) as edit:
            _stamp(row, edit)
