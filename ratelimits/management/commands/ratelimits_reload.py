"""Put into force the rows that raw SQL wrote, or the rows of a restored backup of the database."""

from __future__ import annotations

from typing import Any

from django.db import transaction
from redis.exceptions import RedisError

from ratelimits.conf import conf
from ratelimits.engine.server import version_in_force
from ratelimits.engine.transport.refused import cause
from ratelimits.management.help import ExplainedCommand
from ratelimits.management.progress import shown
from ratelimits.models.raw.adoption import adopt
from ratelimits.models.versions import ConfigVersion, Tombstone, editing

#: This command deletes tombstones that are older than this number of µs. It keeps newer tombstones, because the
#: tombstone of a rule says until when the rule was in force.
_TOMBSTONE_AGE = 30 * 86_400_000_000


class Command(ExplainedCommand):
    help = (
        "Gives a version and a history to rows of the configuration that raw SQL wrote, such as rules and plans. Then"
        " makes every process read all rules again before its next decision. Use this command also after a restore of"
        " the database."
    )
    examples = ("",)

    def handle(self, *args: Any, **options: Any) -> None:
        using = conf.DATABASE
        version = self._version_in_redis()
        with transaction.atomic(using=using):
            ConfigVersion.raise_to(using, version)
            with editing(using) as edit:
                with shown(self) as progress:
                    lines = adopt(edit, "ratelimits_reload", progress)
                for line in lines:
                    self.stdout.write(line)
                ConfigVersion.require_full_read(using, edit.version)
                # Every process now reads all rows again, so it no longer needs old tombstones.
                Tombstone.objects.using(using).filter(since__lt=edit.since - _TOMBSTONE_AGE).delete()
        self.stdout.write(self.style.SUCCESS(f"Version {edit.version} is in force."))

    def _version_in_redis(self) -> int:
        """Return the version in Redis; 0 if Redis does not answer.

        If the database was restored from a backup, this version can be newer than the version in the database.
        """
        try:
            return version_in_force()
        except (RedisError, OSError) as error:
            self.stderr.write(f"Processes read all rules again within {conf.RELOAD_INTERVAL} s, since {cause(error)}.")
            return 0
