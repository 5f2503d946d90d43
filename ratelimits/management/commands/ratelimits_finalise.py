from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from ratelimits.reports.close import finalise
from ratelimits.usage.tally import tally


class Command(BaseCommand):
    help = "Finalises the billing periods whose usage is complete, and corrects finalised ones by a further version."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--account", help="of this account alone")

    def handle(self, *args: Any, **options: Any) -> None:
        tally()
        for report in finalise(account=options["account"]):
            self.stdout.write(f"{report}: {report.line_count} lines, {report.digest}")
