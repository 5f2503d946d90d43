from __future__ import annotations

from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.utils.timezone import now

from ratelimits.conf import conf
from ratelimits.reports.periods import SECOND, month_window
from ratelimits.usage.retention import archive


def _months_ago(months: int) -> str:
    """The month that lies so many months before this one."""
    if months < 1:
        raise ValueError("keep at least one month: --keep 1")
    number = now().year * 12 + now().month - 1 - months
    return f"{number // 12:04d}-{number % 12 + 1:02d}"


class Command(BaseCommand):
    help = "Moves old usage out of the ledger into files that ratelimits_verify accepts, or brings it back."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("directory", type=Path, help="where the files are")
        what = parser.add_mutually_exclusive_group(required=True)
        what.add_argument("--before", help="move what was used before a month, such as 2026-01")
        what.add_argument(
            "--keep", type=int, metavar="MONTHS", help="keep this month and so many before it, move the rest"
        )
        what.add_argument("--restore", action="store_true", help="bring back all files of the directory")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            if options["restore"]:
                self._restore(options["directory"])
            else:
                month = options["before"] or _months_ago(options["keep"])
                # The earliest moment at which that month begins anywhere.
                before = month_window(month)[0] // SECOND
                for pruned in archive.prune(conf.DATABASE, before, options["directory"]):
                    self.stdout.write(f"{pruned.path}: {pruned.batches} batches, {pruned.lines} lines")
        except ValueError as error:
            raise CommandError(str(error)) from error

    def _restore(self, directory: Path) -> None:
        paths = archive.files(directory)
        if not paths:
            raise CommandError(f"{directory} holds no archive")
        for path in paths:
            self.stdout.write(f"{path}: {archive.restore(conf.DATABASE, path)} batches")
