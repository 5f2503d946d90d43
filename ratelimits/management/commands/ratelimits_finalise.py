from __future__ import annotations

from datetime import datetime
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from ratelimits.algorithms.calendar import instant
from ratelimits.engine.keys import ledger_name
from ratelimits.reports.closing.close import finalise_each
from ratelimits.reports.closing.open_periods import NotForcedError, OpenPeriod, force, open_periods
from ratelimits.reports.periods import iso
from ratelimits.usage.tally import tally


class Command(BaseCommand):
    help = (
        "Finalises the billing periods whose usage is complete, and corrects finalised ones by a further version."
        " Says of every period that is over and still open what it waits for."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--account", type=ledger_name, help="of this account alone")
        parser.add_argument("--open", action="store_true", help="finalise nothing, only say what is open, and why")
        parser.add_argument(
            "--force",
            metavar="START",
            help="close --account's period that starts then (as --open shows it) with what there is of it;"
            " its report declares that usage may be missing",
        )
        parser.add_argument("--by", help="with --force: who decided it")
        parser.add_argument("--reason", help="with --force: why")

    def handle(self, *args: Any, **options: Any) -> None:
        tally()
        if options["force"]:
            self._force(options)
            return
        if not options["open"]:
            for closed in finalise_each(account=options["account"]):
                for report in closed.reports:
                    self.stdout.write(f"{report}: {report.line_count} lines, {report.digest}")
        for found in open_periods(account=options["account"]):
            if found.over or options["open"]:
                self.stdout.write(_line(found))

    def _force(self, options: dict[str, Any]) -> None:
        if options["account"] is None or not options["by"] or not options["reason"]:
            raise CommandError("--force needs --account, --by and --reason.")
        try:
            moment = datetime.fromisoformat(options["force"])
        except ValueError as error:
            raise CommandError(f"{options['force']!r} is not a moment: write it as --open shows it.") from error
        if moment.tzinfo is None:
            raise CommandError(f"{options['force']!r} names no offset: write it as --open shows it, with its Z.")
        try:
            report = force(options["account"], instant(moment), options["by"], options["reason"])
        except NotForcedError as error:
            raise CommandError(str(error)) from error
        self.stdout.write(f"{report}: {report.line_count} lines, {report.digest}")


def _line(found: OpenPeriod) -> str:
    units = ", ".join(f"{count:,} {meter}" for meter, count in found.units.items())
    return f"open: {found.account or 'anonymous'} {iso(found.start)} ({units or 'adjustments only'}): {found.why}"
