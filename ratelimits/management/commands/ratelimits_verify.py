from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from ratelimits.conf import conf
from ratelimits.engine.keys import ledger_name
from ratelimits.models import Report
from ratelimits.reports.manifest import ManifestError, compare, parse
from ratelimits.reports.periods import month_window, starts_in
from ratelimits.reports.verify import verify_report
from ratelimits.reports.verify_totals import verify_totals
from ratelimits.usage import archive
from ratelimits.usage.complete import completeness
from ratelimits.usage.verify import verify_ledger

_UNSEEN = (
    "Without a manifest (--manifest FILE) nobody can see here: reports that were deleted with all that points at them,"
    " and changes to totals of processes, gaps, reasons of adjustments and quarantined batches."
)


class Command(BaseCommand):
    help = (
        "Makes finalised reports again from the ledger, checks the digest chains and the sums, and names the first"
        " thing that does not hold. The exit status is 0 if all holds, else 1."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--period", help="only reports of a month, such as 2026-11")
        parser.add_argument("--account", type=ledger_name, help="only reports of this account")
        parser.add_argument("--archive", type=Path, help="the directory of archived usage that reports may be made of")
        parser.add_argument(
            "--manifest", type=Path, metavar="FILE", help="what ratelimits_manifest wrote: compare with it"
        )
        parser.add_argument("--all", action="store_true", help="name everything that does not hold")

    def handle(self, *args: Any, **options: Any) -> None:
        count = 0
        # Closed here: a cursor that is left to the garbage collector may be closed in the midst of another statement of
        # its connection, which would wait for itself.
        with closing(self._findings(options)) as findings:
            for finding in findings:
                count += 1
                self.stdout.write(self.style.ERROR(finding))
                if not options["all"]:
                    break
        if count:
            raise CommandError("the ledger or a report does not hold", returncode=1)
        self.stdout.write(self.style.SUCCESS("All holds."))
        self.stderr.write(completeness(conf.DATABASE))
        if options["manifest"] is None:
            self.stderr.write(_UNSEEN)

    def _findings(self, options: dict[str, Any]) -> Generator[str]:
        using = conf.DATABASE
        with ExitStack() as stack:
            sources = [using]
            if options["archive"] is not None:
                paths = archive.files(options["archive"])
                if not paths:
                    raise CommandError(f"{options['archive']} holds no archive")
                try:
                    alias = stack.enter_context(archive.opened(using, paths))
                except archive.ArchiveError as error:
                    raise CommandError(str(error)) from error
                yield from verify_ledger(alias, archive=True)
                sources.append(alias)
            if options["account"] is None:
                yield from verify_ledger(using)
                yield from verify_totals(using, *sources)
            if options["manifest"] is not None:
                yield from compare(using, _manifest(options["manifest"]), *sources)
            for report in self._reports(using, options):
                yield from verify_report(report, *sources)

    def _reports(self, using: str, options: dict[str, Any]) -> Iterator[Report]:
        reports = Report.objects.using(using).order_by("account", "period_start", "version")
        if options["account"] is not None:
            reports = reports.filter(account=options["account"])
        month = options["period"]
        if month is not None:
            try:
                start, end = month_window(month)
            except ValueError as error:
                raise CommandError(str(error)) from error
            reports = reports.filter(period_start__gte=start, period_start__lt=end)
        for report in reports.iterator():
            if month is None or starts_in(month, report.period_start, report.timezone):
                yield report


def _manifest(path: Path) -> dict[str, Any]:
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, ManifestError, UnicodeDecodeError) as error:
        raise CommandError(f"{path}: {error}") from error
