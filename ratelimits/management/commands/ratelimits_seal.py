from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError
from redis.exceptions import RedisError

from ratelimits.management.help import ExplainedCommand
from ratelimits.management.plurals import plural
from ratelimits.usage.seal import seal
from ratelimits.usage.task_runs import Task, note_run


class Command(ExplainedCommand):
    help = "Seals the open batches of usage in Redis, so that ratelimits_drain can write them to the ledger."
    examples = ("",)

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            with note_run(Task.SEAL):
                sealed = seal()
        except RedisError as error:
            raise CommandError(f"Redis does not answer: {error}") from error
        batches = plural(sum(bool(shard.batch) for shard in sealed), "batch", "batches")
        self.stdout.write(f"Sealed {batches} of {plural(len(sealed), 'shard')}.")
