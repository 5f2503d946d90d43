from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from time import time_ns
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db.models import QuerySet, Sum

from ratelimits.algorithms.billing_periods import month_of, period_name
from ratelimits.billing.management.accounts import chosen_account
from ratelimits.billing.management.gains import gain_sentences
from ratelimits.billing.models import Report
from ratelimits.billing.reports import signing
from ratelimits.billing.reports.amounts import UnreadableError
from ratelimits.billing.reports.closing.labelled import with_open_periods, with_untallied
from ratelimits.billing.reports.closing.open_periods import open_periods
from ratelimits.billing.reports.exports import FORMATS, Format, format_of_file
from ratelimits.billing.reports.exports.billing import NotAccepted
from ratelimits.billing.reports.rows import FINAL, PROVISIONAL, Row
from ratelimits.billing.reports.statements import Statement, columns_of, statements
from ratelimits.billing.reports.statements.charges import lines_for
from ratelimits.billing.reports.statements.unstated import unstated
from ratelimits.conf import conf
from ratelimits.management.help import ExplainedCommand
from ratelimits.management.plurals import is_or_are, plural
from ratelimits.management.progress import shown
from ratelimits.management.table import table
from ratelimits.models.accounts.named import NamedCustomer, named_now
from ratelimits.models.keys import canonical_account
from ratelimits.usage.ledger.watermark import completeness
from ratelimits.usage.periods import span_of

#: The format for people. It is only printed: a file cannot have this format.
TABLE = "table"
#: The names of two counts: provisional statements whose period has ended, and those whose period still runs.
_ENDED, _RUNNING = "ended", "running"
#: Maximum number of periods that are named because they are not final.
_MAX_NAMED = 5
_HEADERS = ("account", "key", "meter", "used", "included", "over", "refused", "month", "status")


class Command(ExplainedCommand):
    help = "Writes the usage of all billing periods of a month: those whose last moment is in the month."
    examples = (
        "--period 2026-11",
        "--period 2026-11 --account acme --format json",
        "--period 2026-11 --output november.xlsx",
        "--period 2026-11 --final-only --output november.amounts.json --salts november.salts.json",
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--period", required=True, help="a month, such as 2026-11")
        parser.add_argument(
            "--format",
            choices=[TABLE, *sorted(FORMATS)],
            help="default: the format to which the suffix of the --output file belongs; without --output, a table on a"
            " terminal, and csv elsewhere",
        )
        parser.add_argument(
            "--output",
            metavar="FILE",
            help="write to this file, not to standard output; the file appears when it is complete",
        )
        parser.add_argument(
            "--account", type=canonical_account, help="only the customer of this account; or the token of a customer"
        )
        parser.add_argument(
            "--all-accounts",
            action="store_true",
            help="add a provisional line of zeros for each account without usage",
        )
        parser.add_argument(
            "--final-only",
            action="store_true",
            help="leave out periods that are not finalised yet (their numbers may change)",
        )
        parser.add_argument(
            "--salts",
            metavar="FILE",
            help="also write to this file what whoever gets a file with the format json-amounts needs to check it"
            " against a manifest, without the database",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        month, account, output = options["period"], options["account"], options["output"]
        account = chosen_account(self, account)
        printed = output in (None, "-")
        as_table = options["format"] == TABLE or (output is None and options["format"] is None and self.stdout.isatty())
        # A table shows lines of the csv format.
        export_format = FORMATS["csv"] if as_table and printed else _format(options["format"], output)
        if export_format.missing:
            raise CommandError(export_format.missing)
        if options["final_only"] and options["all_accounts"]:
            raise CommandError(
                "--all-accounts adds provisional lines, and --final-only leaves out provisional lines: use only one of"
                " these options."
            )
        counts: Counter[str] = Counter()
        try:
            line_count = _line_count(month, account)
            columns_version = columns_of(month, account=account)
            reports = statements(
                month, account=account, all_accounts=options["all_accounts"], columns_version=columns_version
            )
            lines = lines_for(export_format, _statements_to_write(reports, counts, final_only=options["final_only"]))
        except ValueError as error:
            raise CommandError(str(error)) from error
        try:
            with shown(self, alone=printed) as progress:
                lines = progress.counted("lines", lines, line_count)
                if export_format.accepted is not None:
                    # Raise NotAccepted at the first line that the billing system would refuse now.
                    lines = export_format.accepted(lines, time_ns() // 1000)
                if as_table:
                    self._print_table(lines)
                elif printed:
                    self._print(export_format, export_format.stream(lines, columns_version))
                else:
                    _save(export_format.stream(lines, columns_version), Path(output))
        except (NotAccepted, UnreadableError) as error:
            raise CommandError(str(error)) from error
        except OSError as error:
            if printed:
                raise
            raise CommandError(f"{output} could not be written: {error.strerror or error}") from error
        if options["salts"] is not None:
            _save_salts(month, account, options["salts"])
        if counts[PROVISIONAL]:
            self.stderr.write(_notice(counts, final_only=options["final_only"]))
        self._print_what_lacks(month, account, provisional=bool(counts[PROVISIONAL]))
        self.inform(completeness(conf.DATABASE))

    def _print_what_lacks(self, month: str, account: str | None, *, provisional: bool) -> None:
        """Print which periods are not final, if the file has `provisional` reports, and which requests it lacks.

        Also print which files of earlier months lack reports that were made later.
        """
        for sentence in _not_final(month, account) if provisional else ():
            self.stderr.write(sentence)
        for found in unstated(conf.DATABASE, month, account):
            self.stderr.write(found.sentence)
        for sentence in gain_sentences(month, "file", account):
            self.stderr.write(sentence)

    def _print_table(self, lines: Iterable[Row]) -> None:
        for line in table(_HEADERS, map(_cells, lines), self.style.MIGRATE_HEADING):
            self.stdout.write(line)

    def _print(self, export_format: Format, chunks: Iterator[bytes]) -> None:
        byte_stream = getattr(self.stdout, "buffer", None)
        if export_format.module == "xlsxwriter" and (byte_stream is None or self.stdout.isatty()):
            raise CommandError("A workbook cannot be shown in a terminal: name a file with --output.")
        for chunk in chunks:
            if byte_stream is None:
                self.stdout.write(chunk.decode(), ending="")
            else:
                byte_stream.write(chunk)
        self.stdout.flush()


def _cells(row: Row) -> tuple[object, ...]:
    """Return the cells of a report line in the table."""
    label = month_of(row.billing_period_end - 1, row.timezone)
    month = period_name(label, row.billing_period_start, row.timezone)
    quantities = row.consumed_quantity, row.included_quantity, row.overage_quantity, row.denied_count
    return row.account, row.key, row.meter, *map(int, quantities), month, row.status


def _statements_to_write(
    reports: Iterable[Statement], counts: Counter[str], *, final_only: bool
) -> Iterator[Statement]:
    """Yield the statements to write. Count all statements in `counts`, by status.

    Count provisional statements also under _ENDED or _RUNNING. A period that ended without usage is in neither count:
    it gets no final report, so `_notice` must not say that it waits for one.
    """
    now = time_ns() // 1000
    for statement in reports:
        counts[statement.status] += 1
        if statement.status == PROVISIONAL and statement.report.period_end > now:
            counts[_RUNNING] += 1
        elif statement.status == PROVISIONAL and not statement.unused:
            counts[_ENDED] += 1
        if statement.status == FINAL or not final_only:
            yield statement


def _notice(counts: Counter[str], *, final_only: bool) -> str:
    """Return the notice for a month that has provisional reports."""
    provisional, total = counts[PROVISIONAL], counts[PROVISIONAL] + counts[FINAL]
    if final_only:
        text = f"{provisional} of {total} reports {is_or_are(provisional)} left out: not all periods are finalised"
    else:
        text = (
            f"{provisional} of {total} reports {is_or_are(provisional)} provisional and may change: leave out"
            " provisional reports with --final-only"
        )
    sentences = [f"{text}."]
    if running := counts[_RUNNING]:
        sentences.append(f"{plural(running, 'period')} still {'runs' if running == 1 else 'run'}.")
    if counts[_ENDED]:
        sentences.append("ratelimits_finalise --open lists the reasons why periods that have ended are still open.")
    return " ".join(sentences)


def _not_final(month: str, account: str | None) -> Iterator[str]:
    """Yield a sentence for each of the first awaited periods of the month that have no final report: it says why."""
    awaited = (period for period in open_periods(account=account, month=month) if period.awaited)
    for number, period in enumerate(awaited):
        if number == _MAX_NAMED:
            yield "There are more: ratelimits_finalise --open lists all of them."
            return
        yield f"{period.account or 'anonymous'} {period.name} is not final: {period.why}."


def _format(name: str | None, output: str | None) -> Format:
    if name == TABLE:
        raise CommandError("A table is only printed: choose another format for a file.")
    if name is None:
        return format_of_file(Path(output or "").name) or FORMATS["csv"]
    return FORMATS[name]


def _save(chunks: Iterable[bytes], path: Path) -> None:
    temporary = path.with_name(f"{path.name}.part")
    try:
        with temporary.open("wb") as file:
            for chunk in chunks:
                file.write(chunk)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def _save_salts(month: str, account: str | None, output: str) -> None:
    """Write the salts and the other own columns of a month's reports, for people who check a file of the month."""
    reports = _reports(month, _customer(account)).order_by("account", "customer_id", "period_start", "version")
    text = json.dumps(signing.beginnings(reports.iterator()))
    try:
        _save([f"{text}\n".encode()], Path(output))
    except OSError as error:
        raise CommandError(f"{output} could not be written: {error.strerror or error}") from error


def _customer(account: str | None) -> NamedCustomer | None:
    return None if account is None else named_now(conf.DATABASE, [account])[account]


def _reports(month: str, customer: NamedCustomer | None) -> QuerySet[Report]:
    """Return the finalised reports of a month, in all versions; those of one customer if it is given."""
    filters = {} if customer is None else {"customer": customer.token}
    return Report.objects.using(conf.DATABASE).filter(**filters, label=month)


def _line_count(month: str, account: str | None) -> int | None:
    """Return the number of lines, for the progress. Return None if some usage is on no report yet."""
    customer = _customer(account)
    if with_open_periods(conf.DATABASE, month, customer) or with_untallied(conf.DATABASE, *span_of(month), customer):
        return None
    lines: int | None = _reports(month, customer).aggregate(lines=Sum("line_count"))["lines"]
    return lines
