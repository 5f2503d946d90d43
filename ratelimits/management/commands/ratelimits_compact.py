from __future__ import annotations

import time
from typing import Any

from django.core.management.base import CommandParser

from ratelimits.conf import conf
from ratelimits.engine import Unavailable
from ratelimits.engine.server import current_server
from ratelimits.management.help import ExplainedCommand
from ratelimits.management.plurals import plural
from ratelimits.management.progress import shown
from ratelimits.models import Report
from ratelimits.recording import trace
from ratelimits.reports.closing.close import mark_ends
from ratelimits.simulate import clean
from ratelimits.usage import process_totals, span_totals
from ratelimits.usage.retention.compact import compact


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
        # Recorded requests can be personal data. So delete them even if the work below fails.
        trace.expire(time.time())
        if options["mark"]:
            reports = Report.objects.using(conf.DATABASE).order_by().values_list("chain", flat=True)
            mark_ends(conf.DATABASE, reports.iterator())
        with shown(self) as progress:
            joined = list(compact(progress))
        process_totals.fold(int(time.time()))
        span_totals.expire(conf.DATABASE, int(time.time()))
        before, after = sum(batch.lines_before for batch in joined), sum(batch.lines for batch in joined)
        batches = sum(batch.batches for batch in joined)
        joined_batches, lines = plural(batches, "batch", "batches"), plural(before, "line")
        self.stdout.write(f"Joined {joined_batches} to {len(joined):,}: {lines} became {after:,}.")
        try:
            dead = clean(current_server().wire)
        except Unavailable as error:
            dead = 0
            self.stderr.write(f"What killed simulations left in Redis is still there: {error}")
        if dead:
            self.stdout.write(f"Deleted what {plural(dead, 'killed simulation')} left in Redis.")
