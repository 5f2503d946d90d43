from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from ratelimits.reports.exports import TEXT_FORMATS
from ratelimits.reports.statements import rows, statements


class Command(BaseCommand):
    help = "Writes the usage of all billing periods that start in a month."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--period", required=True, help="a month, such as 2026-11")
        parser.add_argument("--format", choices=sorted(TEXT_FORMATS), default="csv")
        parser.add_argument("--account", help="of this account alone")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            found = rows(statements(options["period"], account=options["account"]))
        except ValueError as error:
            raise CommandError(str(error)) from error
        TEXT_FORMATS[options["format"]](found, self.stdout)
