from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError
from redis.exceptions import RedisError

from ratelimits.engine.transport.refused import cause
from ratelimits.management.help import ExplainedCommand
from ratelimits.management.plurals import plural
from ratelimits.usage import jobs


class Command(ExplainedCommand):
    help = "Seals the open batches of usage in Redis, so that ratelimits_drain can write them to the ledger."
    examples = ("",)

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            sealed = jobs.seal()
        except RedisError as error:
            raise CommandError(cause(error)) from error
        batches = plural(sum(bool(shard.batch) for shard in sealed), "batch", "batches")
        self.stdout.write(f"Sealed {batches} of {plural(len(sealed), 'shard')}.")
