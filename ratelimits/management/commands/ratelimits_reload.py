"""Put rows in force that raw SQL wrote, or that are older because the database was restored from a backup."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand
from django.db import transaction
from redis.exceptions import RedisError

from ratelimits.conf import conf
from ratelimits.engine.publish import publish_version
from ratelimits.models.raw.adoption import adopt
from ratelimits.models.versions import ConfigVersion, Tombstone, editing

#: Tombstones (records of deleted rows) that are younger than this (µs) are kept. They say when a rule was deleted, and
#: so since when another limit has been in force.
_KEPT = 30 * 86_400_000_000


class Command(BaseCommand):
    help = (
        "Gives rules, plans and overrides that were written by raw SQL a version and a history, and makes every process"
        " read everything again before its next decision. Run it also after restoring the database from a backup."
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
                # Every process now reads everything again, so old tombstones are not needed any more.
                Tombstone.objects.using(using).filter(since__lt=edit.since - _KEPT).delete()
        self.stdout.write(self.style.SUCCESS(f"Version {edit.version} is in force."))

    def _in_force(self) -> int:
        """Return the version in Redis. It is newer than the database's version if the database was restored."""
        try:
            return publish_version(0)
        except (RedisError, OSError) as error:
            self.stderr.write(
                f"Redis does not answer ({error}): processes read everything again within {conf.RELOAD_INTERVAL} s."
            )
            return 0
