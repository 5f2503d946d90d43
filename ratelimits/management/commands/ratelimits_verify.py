from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from ratelimits.conf import conf
from ratelimits.engine.keys import ledger_name
from ratelimits.reports.verify.manifest import ManifestError, parse
from ratelimits.usage.complete import completeness
from ratelimits.usage.retention import archive
from ratelimits.verification import Verification


class Command(BaseCommand):
    help = (
        "Computes finalised reports again from the ledger, checks the digest chains and the sums, and prints the first"
        " error. The exit status is 0 if there is no error, else 1. Standard error says what was checked, and what"
        " could not be checked."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--period", help="only reports of this month, such as 2026-11")
        parser.add_argument("--account", type=ledger_name, help="only reports of this account")
        parser.add_argument("--archive", type=Path, help="the directory of the archive files with older usage")
        parser.add_argument(
            "--manifest",
            type=Path,
            action="append",
            metavar="FILE",
            help="compare the database with this file, which ratelimits_manifest wrote; may be repeated",
        )
        parser.add_argument("--all", action="store_true", help="print all errors, not only the first")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            verification = Verification(
                account=options["account"],
                month=options["period"],
                archives=_archives(options["archive"]),
                manifests=[_manifest(path) for path in options["manifest"] or ()],
            )
        except ValueError as error:
            raise CommandError(str(error)) from error
        try:
            count = self._tell(verification, every=options["all"])
        except archive.ArchiveError as error:
            raise CommandError(_printable(str(error))) from error
        self.stderr.write(f"{verification.summary()}{'' if options['all'] or not count else ' Then it stopped.'}")
        if count:
            raise CommandError("the ledger or a report has errors", returncode=1)
        self.stdout.write(self.style.SUCCESS("No errors were found."))
        self.stderr.write(completeness(conf.DATABASE))
        for sentence in verification.unseen():
            self.stderr.write(_printable(sentence))

    def _tell(self, verification: Verification, *, every: bool) -> int:
        """Write the findings, or the first one, and return how many there were."""
        count = 0
        # Close the database cursor here. If the garbage collector closed it while its connection runs another
        # statement, the connection would wait for ever.
        with closing(verification.findings()) as findings:
            for finding in findings:
                count += 1
                self.stdout.write(self.style.ERROR(_printable(finding)))
                if not every:
                    break
        return count


def _printable(finding: str) -> str:
    """Return a finding on one line, with control characters escaped. In a name they could hide or fake other lines."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in finding)


def _archives(directory: Path | None) -> list[Path]:
    if directory is None:
        return []
    paths = archive.files(directory)
    if not paths:
        raise CommandError(f"{directory} holds no archive")
    return paths


def _manifest(path: Path) -> dict[str, Any]:
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, ManifestError, UnicodeDecodeError) as error:
        raise CommandError(f"{path}: {error}") from error
