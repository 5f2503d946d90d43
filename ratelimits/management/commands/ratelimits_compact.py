from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand

from ratelimits.usage.compact import compact


class Command(BaseCommand):
    help = "Joins the batches of past hours in the ledger, so that each key has one line for each quarter of an hour."

    def handle(self, *args: Any, **options: Any) -> None:
        done = list(compact())
        before, after = sum(each.lines_before for each in done), sum(each.lines for each in done)
        batches = sum(each.batches for each in done)
        self.stdout.write(f"Joined {batches} batches to {len(done)}: {before} lines became {after}.")
