from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from ratelimits.management.help import ExplainedCommand
from ratelimits.management.plurals import plural
from ratelimits.management.progress import shown
from ratelimits.usage import jobs


class Command(ExplainedCommand):
    help = (
        "Joins the batches of past hours in the ledger. In a joined batch, a key has only one line for each meter, rule"
        " and 15 minutes. Also deletes recorded requests and totals that are too old."
    )
    examples = ("",)

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--mark",
            action="store_true",
            help="before joining, set a mark in the ledger where each report ends: a batch before a mark is never"
            " joined with a batch after it. Use this option once if an earlier version of the app, which set no marks,"
            " has made reports",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        with shown(self) as progress:
            result = jobs.compact(progress, mark=options["mark"])
        joined = result.joined
        before, after = sum(batch.lines_before for batch in joined), sum(batch.lines for batch in joined)
        batches = sum(batch.batches for batch in joined)
        joined_batches, lines = plural(batches, "batch", "batches"), plural(before, "line")
        self.stdout.write(f"Joined {joined_batches} to {len(joined):,}: {lines} became {after:,}.")
        if result.error:
            self.stderr.write(f"What killed simulations left in Redis is still there: {result.error}")
        if result.simulations:
            self.stdout.write(f"Deleted what {plural(result.simulations, 'killed simulation')} left in Redis.")
