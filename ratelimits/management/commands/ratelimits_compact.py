from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from ratelimits.conf import conf
from ratelimits.models import Report
from ratelimits.reports.closing.close import mark_ends
from ratelimits.usage.retention.compact import compact


class Command(BaseCommand):
    help = "Joins the batches of past hours in the ledger, so that each key has one line for each quarter of an hour."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--mark",
            action="store_true",
            help="first mark where reports end, in a database that is older than these marks: nothing is joined across",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        if options["mark"]:
            reports = Report.objects.using(conf.DATABASE).order_by().values_list("chain", flat=True)
            mark_ends(conf.DATABASE, reports.iterator())
        done = list(compact())
        before, after = sum(each.lines_before for each in done), sum(each.lines for each in done)
        batches = sum(each.batches for each in done)
        self.stdout.write(f"Joined {batches} batches to {len(done)}: {before} lines became {after}.")
