"""Bring into force what was written behind the app's back: raw SQL, a restored database."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand
from django.db import models, transaction
from django.utils import timezone
from redis.exceptions import RedisError

from ratelimits.conf import conf
from ratelimits.engine.publish import publish_version
from ratelimits.models import Account, KeyOverride, Plan, PlanInclusion, PlanMembership, Rule
from ratelimits.models.versions import ConfigVersion, Edit, Tombstone, Versioned, editing

#: Tombstones younger than this, in µs, still say since when the limits that replaced theirs hold.
_KEPT = 30 * 86_400_000_000
_MODELS: tuple[type[Versioned], ...] = (Plan, PlanInclusion, Rule, Account, PlanMembership, KeyOverride)


class Command(BaseCommand):
    help = (
        "Give rules, plans and overrides that were written by raw SQL a version and a history, and let every process "
        "read everything again with its next decision. Also after restoring the database from a backup."
    )

    def handle(self, *args: Any, **options: Any) -> None:
        using = conf.DATABASE
        in_force = self._in_force()
        with transaction.atomic(using=using):
            ConfigVersion.lift(using, in_force)
            with editing(using) as edit:
                for model in _MODELS:
                    for line in _adopt(model, edit):
                        self.stdout.write(line)
                ConfigVersion.forget_deltas(using, edit.version)
                # Nobody starts from a delta now, so that nobody needs what old tombstones say.
                Tombstone.objects.using(using).filter(since__lt=edit.since - _KEPT).delete()
        self.stdout.write(self.style.SUCCESS(f"Version {edit.version} is in force."))

    def _in_force(self) -> int:
        """What Redis asks of every process: more than the database has, if that was restored."""
        try:
            return publish_version(0)
        except (RedisError, OSError) as error:
            self.stderr.write(f"Redis cannot be told ({error}): the processes follow within {conf.RELOAD_INTERVAL} s.")
            return 0


def _adopt(model: type[Versioned], edit: Edit) -> list[str]:
    """Stamp and record the rows that differ from the newest record of their history; says which."""
    history: Any = model.history  # type: ignore[attr-defined]
    records: dict[int, Any] = {}
    for record in history.using(edit.using).order_by("version", "history_id"):
        records[record.id] = record
    said = []
    for row in model._base_manager.using(edit.using).order_by("pk"):
        record = records.pop(row.pk, None)
        if record is None or record.history_type == "-" or _differ(row, record):
            if record is not None and any(getattr(row, name) != getattr(record, name) for name in row.about):
                record.instance.tombstone(edit).save(using=edit.using)
            row._change_reason = "ratelimits_reload"  # type: ignore[attr-defined]
            row.save(using=edit.using)
            said.append(f"changed: {model._meta.verbose_name} {row.pk}: {row}")
    for record in records.values():
        if record.history_type != "-":
            said.append(f"deleted: {model._meta.verbose_name} {record.id}")
            _record_deletion(record, edit)
    return said


def _differ(row: Versioned, record: models.Model) -> bool:
    names = [field.attname for field in row._meta.concrete_fields]
    return any(getattr(row, name) != getattr(record, name) for name in names)


def _record_deletion(record: Any, edit: Edit) -> None:
    grave: Tombstone = record.instance.tombstone(edit)
    grave.save(using=edit.using)
    record.pk = None
    record.history_type = "-"
    record.history_date = timezone.now()
    record.history_user_id = None
    record.history_change_reason = "ratelimits_reload"
    record.version, record.since = edit.version, edit.since
    record.save(using=edit.using)
