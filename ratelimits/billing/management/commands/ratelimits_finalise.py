from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser

from ratelimits.billing import jobs
from ratelimits.billing.management.accounts import chosen_account
from ratelimits.billing.reports.closing.open_periods import (
    NotForcedError,
    OpenPeriod,
    force,
    open_periods,
    running_count,
)
from ratelimits.management.help import ExplainedCommand
from ratelimits.management.plurals import plural
from ratelimits.management.progress import shown
from ratelimits.models.keys import canonical_account
from ratelimits.usage.ledger.tally import tally


class Command(ExplainedCommand):
    help = (
        "Finalises the billing periods whose usage is complete. If a finalised report must be corrected, makes a new"
        " version of it. Then lists the periods that have ended but are still open, with the reasons why they are open."
    )
    examples = (
        "",
        "--open",
        "--account acme --open",
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--account", type=canonical_account, help="only the customer of this account; or a token")
        parser.add_argument(
            "--open",
            action="store_true",
            help="finalise nothing, only list the open periods that have ended or end soon, and why they are open",
        )
        parser.add_argument(
            "--force",
            metavar="PERIOD",
            help="close this period of --account, such as 2026-11, with the usage that the ledger has now; the report"
            " states that usage may be missing. Copy the period from the list of --open",
        )
        parser.add_argument("--by", help="with --force: the person who decided to close the period")
        parser.add_argument("--reason", help="with --force: the reason")

    def handle(self, *args: Any, **options: Any) -> None:
        options["account"] = chosen_account(self, options["account"])
        if options["force"]:
            tally(wait=True)
            self._force(options)
            return
        if options["open"]:
            tally(wait=True)  # open periods are found in the totals, so first add the newest batches to the totals
        else:
            self._finalise(options["account"])
        printed = 0
        # Without --open, list only periods whose months are over. `awaited` is faster: it leaves out most accounts
        # without such a period.
        for period in open_periods(account=options["account"], awaited=not options["open"]):
            if period.awaited or options["open"]:
                self.stdout.write(_open_period_text(period))
                printed += 1
        if options["open"] and not printed:
            running = running_count(account=options["account"])
            self.stdout.write(f"No period that has ended is still open. Periods that still run: {running:,}.")

    def _finalise(self, account: str | None) -> None:
        with shown(self) as progress:
            for closed in jobs.finalise(account, progress, wait=True):
                for report in closed.reports:
                    self.stdout.write(f"{report}: {plural(report.line_count, 'line')}, {report.digest}")

    def _force(self, options: dict[str, Any]) -> None:
        if options["account"] is None or not options["by"] or not options["reason"]:
            raise CommandError("--force needs --account, --by and --reason.")
        try:
            report = force(*_chosen(options), options["by"], options["reason"])
        except NotForcedError as error:
            raise CommandError(str(error)) from error
        self.stdout.write(f"{report}: {plural(report.line_count, 'line')}, {report.digest}")


def _chosen(options: dict[str, Any]) -> tuple[str, int]:
    """Return the customer (its token) and the start of the open period that --force names.

    Raise CommandError if there is no such period.
    """
    found = list(open_periods(account=options["account"], running=True))
    # A month alone is enough if the account has only one open period of this month.
    for chosen in ((period for period in found if of(period) == options["force"]) for of in (_name, _month)):
        periods = list(chosen)
        if len(periods) == 1:
            return periods[0].token, periods[0].start
    names = ", ".join(map(_name, found)) or "none"
    raise CommandError(
        f"{options['force']!r} is not one of the open periods of {options['account']} (these are: {names}): copy the"
        " period from the list of --open."
    )


def _name(period: OpenPeriod) -> str:
    return period.name


def _month(period: OpenPeriod) -> str:
    return period.name[:7]


def _open_period_text(period: OpenPeriod) -> str:
    units = ", ".join(f"{count:,} {meter}" for meter, count in period.units.items())
    return f"open: {period.account or 'anonymous'} {period.name} ({units or 'adjustments only'}): {period.why}"
