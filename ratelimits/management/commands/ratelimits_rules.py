"""A command for rules as code: it dumps the rules of the database, compares them with a file, or loads a file."""

from __future__ import annotations

import sys
from difflib import unified_diff
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db import transaction

from ratelimits import as_code, unknown_names
from ratelimits.conf import conf
from ratelimits.management.help import ExplainedCommand
from ratelimits.management.progress import shown


class Command(ExplainedCommand):
    help = "Keeps plans and rules as code: dumps them as JSON, compares a file with the database, or loads a file."
    examples = (
        "dump",
        "diff rules.json",
        "load rules.json",
        "load --strict rules.json",
    )
    exit_codes = {
        0: "done; with diff: there is no change",
        1: "an error; with diff: there is a change; with --strict: there is a warning",
        2: "wrong arguments",
    }

    def add_arguments(self, parser: CommandParser) -> None:
        commands = parser.add_subparsers(dest="command", required=True)
        commands.add_parser("dump", help="write all plans and rules to standard output")
        for name, text, delete_text in (
            (
                "diff",
                "show what loading a file would change; the exit status is 1 if there is a change",
                "show also that load --delete would delete plans and rules that are not in the file",
            ),
            (
                "load",
                "make plans and rules like those in a file; if the file has an error, change nothing",
                "delete plans and rules that are not in the file",
            ),
        ):
            command = commands.add_parser(name, help=text)
            command.add_argument("file", help="a file in the format of dump, or - for standard input")
            command.add_argument("--delete", action="store_true", help=delete_text)
            command.add_argument(
                "--strict",
                action="store_true",
                help="end with status 1 if there is a warning; load then changes nothing",
            )

    def handle(self, *args: Any, **options: Any) -> None:
        if options["command"] == "dump":
            self.stdout.write(as_code.to_text(as_code.dump(conf.DATABASE)), ending="")
            return
        try:
            raw = sys.stdin.buffer.read() if options["file"] == "-" else Path(options["file"]).read_bytes()
            document = self._parse(raw)
            # Look for unknown names first: --strict must change nothing if there is a warning.
            warnings = [f"Warning: {entry}: {sentence}" for entry, sentence in unknown_names.in_document(document)]
            fails_by_strict = bool(options["strict"] and warnings)
            if fails_by_strict and options["command"] == "load":
                raise CommandError("\n".join(["Nothing was changed, because of --strict:", *warnings]))
            if options["command"] == "diff":
                is_same = self._diff(document, delete=options["delete"])
            else:
                is_same = True
                with shown(self) as progress:
                    changes = as_code.load(document, conf.DATABASE, delete=options["delete"], progress=progress)
                self.stdout.write("\n".join(changes) or "Nothing to change.")
            for warning in warnings:
                self.stderr.write(warning)
            if not is_same or fails_by_strict:
                sys.exit(1)
        except OSError as error:
            raise CommandError(f"{options['file']}: {error.strerror}") from error
        except as_code.RefusedError as error:
            raise CommandError("\n".join(["Nothing was changed:", *error.problems])) from error

    def _parse(self, raw: bytes) -> as_code.Document:
        """Return the document in the bytes of a file. Raise RefusedError with all problems at once.

        If the file has errors, the entries that could be read (`error.rest`) are checked too.
        """
        try:
            return as_code.parse(raw)
        except as_code.RefusedError as error:
            if error.rest is None:
                raise
            raise as_code.RefusedError([*error.problems, *as_code.problems_of(error.rest, conf.DATABASE)]) from error

    def _diff(self, document: as_code.Document, *, delete: bool) -> bool:
        """Show what loading the document would change. Return whether it would change nothing.

        Load the document in a transaction, which is then rolled back.
        """
        with transaction.atomic(using=conf.DATABASE):
            before = as_code.to_text(as_code.dump(conf.DATABASE))
            with shown(self) as progress:
                as_code.load(document, conf.DATABASE, delete=delete, progress=progress)
            after = as_code.to_text(as_code.dump(conf.DATABASE))
            transaction.set_rollback(True, using=conf.DATABASE)
        lines = list(unified_diff(before.splitlines(), after.splitlines(), "database", "file", lineterm="", n=0))
        if lines:
            self.stdout.write("\n".join(lines))
        return not lines
