from __future__ import annotations

from pathlib import Path
from typing import Any

from django.core.management.base import CommandError, CommandParser

from ratelimits import moments
from ratelimits.conf import conf
from ratelimits.management.help import ExplainedCommand
from ratelimits.management.numbers import whole_number
from ratelimits.management.plurals import plural
from ratelimits.management.progress import shown
from ratelimits.progress import Progress
from ratelimits.usage.ledger.retention import archive
from ratelimits.usage.periods import SECOND, month_window


def _months_ago(months: int) -> str:
    """Return the month that was `months` months ago, such as "2026-01". Raise ValueError if `months` is below 1."""
    if months < 1:
        raise ValueError("keep at least one month, such as --keep 1")
    now = moments.now()
    months_since_year_0 = now.year * 12 + now.month - 1 - months
    year, month_index = divmod(months_since_year_0, 12)
    return f"{year:04d}-{month_index + 1:02d}"


class Command(ExplainedCommand):
    help = (
        "Moves old usage from the ledger to archive files, or moves it back. ratelimits_verify can read archive files."
    )
    examples = (
        "archives --keep 24",
        "archives --before 2026-01",
        "archives --restore",
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("directory", type=Path, help="the directory of the archive files")
        modes = parser.add_mutually_exclusive_group(required=True)
        modes.add_argument(
            "--before",
            metavar="MONTH",
            help="move usage from before MONTH, such as 2026-01, of billing periods with a report",
        )
        modes.add_argument(
            "--keep", type=whole_number, metavar="MONTHS", help="keep the current month and this many months before it"
        )
        modes.add_argument(
            "--restore", action="store_true", help="write the usage of all files in the directory back to the ledger"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            with shown(self) as progress:
                if options["restore"]:
                    self._restore(options["directory"], progress)
                else:
                    self._archive(options["before"] or _months_ago(options["keep"]), options["directory"], progress)
        except ValueError as error:
            raise CommandError(str(error)) from error

    def _archive(self, month: str, directory: Path, progress: Progress) -> None:
        # The month begins first in the easternmost time zone. Move only usage from before this moment. So no usage of
        # the month is moved, whatever the time zone of its account is.
        earliest_start, _latest_end = month_window(month)
        before = earliest_start // SECOND
        for pruned in archive.prune(conf.DATABASE, before, directory, progress):
            batches, lines = plural(pruned.batches, "batch", "batches"), plural(pruned.lines, "line")
            self.stdout.write(f"{pruned.path}: {batches}, {lines}")

    def _restore(self, directory: Path, progress: Progress) -> None:
        paths = archive.files(directory)
        if not paths:
            raise CommandError(f"there are no archives in {directory}")
        for path in progress.counted("archives", paths, len(paths)):
            batches = plural(archive.restore(conf.DATABASE, path), "batch", "batches")
            self.stdout.write(f"{path}: {batches}")
