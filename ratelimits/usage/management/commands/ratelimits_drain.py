from __future__ import annotations

import time
from typing import Any

from django.core.management.base import CommandError, CommandParser
from redis.exceptions import RedisError

from ratelimits.conf import conf
from ratelimits.engine.transport.refused import cause
from ratelimits.management.help import ExplainedCommand
from ratelimits.management.plurals import plural
from ratelimits.management.progress import shown
from ratelimits.usage import jobs
from ratelimits.usage.ledger import span_totals
from ratelimits.usage.ledger.apply import BatchOutcome
from ratelimits.usage.ledger.fence import NotFencedError
from ratelimits.usage.models.gaps import FSYNC_POLICIES


class Command(ExplainedCommand):
    help = "Writes all sealed batches of usage in Redis to the ledger."
    examples = (
        "",
        "--rebuild-totals",
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--rebuild-totals",
            action="store_true",
            help="after the drain, compute the totals of the status page again from the ledger; until this ends, other"
            " drains wait",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            with shown(self) as progress:
                drained = jobs.drain(progress, wait=True)
        except NotFencedError as error:
            raise CommandError(str(error)) from error
        except RedisError as error:
            raise CommandError(cause(error)) from error
        batches, lines = plural(drained.batches, "batch", "batches"), plural(drained.lines, "line")
        promise = "appendfsync" if drained.fsync in FSYNC_POLICIES else "fence"
        self.stdout.write(f"Drained {batches}, {lines} ({promise} {drained.fsync}).")
        # Name only the outcomes that a person may have to look into.
        for outcome, count in drained.outcomes.items():
            if outcome not in (BatchOutcome.APPLIED, BatchOutcome.DONE_BEFORE):
                self.stdout.write(self.style.WARNING(f"{outcome.name.lower()}: {count}"))
        if options["rebuild_totals"]:
            with shown(self) as progress:
                span_totals.rebuild(conf.DATABASE, int(time.time()), progress)
            self.stdout.write("The totals of the status page were computed again.")
