"""Bring into force what was written behind the app's back: raw SQL, a restored database."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand
from django.db import transaction
from redis.exceptions import RedisError

from ratelimits.conf import conf
from ratelimits.engine.publish import publish_version
from ratelimits.models.raw.adoption import adopt
from ratelimits.models.versions import ConfigVersion, Tombstone, editing

#: Tombstones younger than this, in µs, still say since when the limits that replaced theirs hold.
_KEPT = 30 * 86_400_000_000


class Command(BaseCommand):
    help = (
        "Give rules, plans and overrides that were written by raw SQL a version and a history, and let every process "
        "read everything again with its next decision. Also after restoring the database from a backup."
    )

    def handle(self, *args: Any, **options: Any) -> None:
        using = conf.DATABASE
        in_force = self._in_force()
        with transaction.atomic(using=using):
            ConfigVersion.raise_to(using, in_force)
            with editing(using) as edit:
                for line in adopt(edit, "ratelimits_reload"):
                    self.stdout.write(line)
                ConfigVersion.require_full_read(using, edit.version)
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
