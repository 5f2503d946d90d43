from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError
from redis.exceptions import RedisError

from ratelimits.usage.drain import drain
from ratelimits.usage.fence import NotFencedError


class Command(BaseCommand):
    help = "Writes all sealed batches of usage in Redis to the ledger."

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            drained = drain()
        except NotFencedError as error:
            raise CommandError(str(error)) from error
        except RedisError as error:
            raise CommandError(f"Redis does not answer: {error}") from error
        self.stdout.write(f"Drained {drained.batches} batches, {drained.lines} lines (appendfsync {drained.fsync}).")
        for outcome, count in drained.outcomes.items():
            if outcome.name not in ("APPLIED", "KNOWN"):
                self.stdout.write(self.style.WARNING(f"{outcome.name.lower()}: {count}"))
