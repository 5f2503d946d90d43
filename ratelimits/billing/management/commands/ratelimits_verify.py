from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError, CommandParser

from ratelimits.billing.management.accounts import chosen_account
from ratelimits.billing.reports.verify.manifest import ManifestError, parse
from ratelimits.billing.verification import Verification
from ratelimits.conf import conf
from ratelimits.management.help import ExplainedCommand
from ratelimits.management.progress import shown
from ratelimits.models.keys import canonical_account
from ratelimits.progress import Progress
from ratelimits.usage.ledger.retention import archive
from ratelimits.usage.ledger.watermark import completeness


class Command(ExplainedCommand):
    help = (
        "Computes finalised reports again from the ledger, checks the digest chains and the sums, and prints the first"
        " error. The exit status is 0 if there is no error, else 1. Standard error says what was checked, and what"
        " could not be checked."
    )
    examples = (
        "",
        "--period 2026-11 --all",
        "--archive archives --manifest 2026-10.json",
    )
    exit_codes = {0: "no errors were found", 1: "an error was found, or the command failed", 2: "wrong options"}

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--period", help="only reports of this month, such as 2026-11")
        parser.add_argument(
            "--account", type=canonical_account, help="only reports of the customer of this account; or a token"
        )
        parser.add_argument("--archive", type=Path, help="the directory of the archive files with older usage")
        parser.add_argument(
            "--manifest",
            type=Path,
            action="append",
            metavar="FILE",
            help="a file of ratelimits_manifest, to compare with the database; can be given several times",
        )
        parser.add_argument("--all", action="store_true", help="print all errors, not only the first")

    def handle(self, *args: Any, **options: Any) -> None:
        with shown(self) as progress:
            verification, count = self._verify(progress, options)
        stopped = " Then the command stopped." if count and not options["all"] else ""
        self.inform(f"{verification.summary()}{stopped}")
        if count:
            raise CommandError("the ledger or a report has errors", returncode=1)
        self.stdout.write(self.style.SUCCESS("No errors were found."))
        self.inform(completeness(conf.DATABASE))
        for sentence in verification.unchecked():
            self.stderr.write(_printable(sentence))

    def _verify(self, progress: Progress, options: dict[str, Any]) -> tuple[Verification, int]:
        """Verify, and print the findings. Return the verification, and the number of printed findings."""
        try:
            verification = Verification(
                account=chosen_account(self, options["account"]),
                month=options["period"],
                archives=_archives(options["archive"]),
                manifests=[_manifest(path) for path in options["manifest"] or ()],
                progress=progress,
            )
        except ValueError as error:
            raise CommandError(str(error)) from error
        try:
            return verification, self._print_findings(verification, every=options["all"])
        except archive.ArchiveError as error:
            raise CommandError(_printable(str(error))) from error

    def _print_findings(self, verification: Verification, *, every: bool) -> int:
        """Print all findings, or only the first one. Return the number of printed findings."""
        count = 0
        # Close the database cursor here. Otherwise the garbage collector could close the cursor while the cursor's
        # connection runs another statement. The connection would then wait for ever.
        with closing(verification.findings()) as findings:
            for finding in findings:
                count += 1
                self.stdout.write(self.style.ERROR(_printable(finding)))
                if not every:
                    break
        return count


def _printable(sentence: str) -> str:
    """Return a sentence with all control characters escaped.

    A name in the sentence can contain control characters. They could hide other lines, or add false lines.
    """
    # `ascii` adds quotation marks, and the slice removes them.
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in sentence)


def _archives(directory: Path | None) -> list[Path]:
    if directory is None:
        return []
    paths = archive.files(directory)
    if not paths:
        raise CommandError(f"{directory} contains no archive")
    return paths


def _manifest(path: Path) -> dict[str, Any]:
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, ManifestError, UnicodeDecodeError) as error:
        raise CommandError(f"{path}: {error}") from error
