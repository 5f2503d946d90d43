"""The base class of the app's commands. It explains a command in `--help`. If a table is missing, it says which."""

from __future__ import annotations

import os
import re
from argparse import RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from django.apps import apps
from django.core.management.base import BaseCommand, CommandError, CommandParser, DjangoHelpFormatter
from django.db import DatabaseError

#: The exit statuses of a command that does not list its own exit statuses.
EXIT_CODES: Mapping[int, str] = {0: "the work is done", 1: "an error; standard error says which", 2: "wrong options"}
#: The SQLSTATE of PostgreSQL if a table does not exist.
_UNDEFINED_TABLE = "42P01"
#: The error text of SQLite if a table does not exist. The group is the name of the table.
_SQLITE_TEXT = re.compile(r"no such table: (?:main\.)?(\S+)$")
#: The error text of PostgreSQL if a table does not exist.
_POSTGRESQL_TEXT = re.compile(r'relation "(\S+)"')


class _HelpFormatter(DjangoHelpFormatter, RawDescriptionHelpFormatter):
    """Keep the lines of the examples, and sort options as Django does."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return RawDescriptionHelpFormatter._fill_text(self, text, width, indent)
        return DjangoHelpFormatter._fill_text(self, text, width, indent)


class ExplainedCommand(BaseCommand):
    """The base class of commands whose `--help` ends with examples and exit statuses.

    Each of the `examples` is a text with the arguments after the command's name; "" if the command needs no arguments.
    """

    examples: ClassVar[Sequence[str]] = ("",)
    exit_codes: ClassVar[Mapping[int, str]] = EXIT_CODES

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        examples = [f"  {prog_name} {subcommand} {arguments}".rstrip() for arguments in self.examples]
        codes = [f"  {code}  {meaning}" for code, meaning in self.exit_codes.items()]
        epilog = "\n".join(["examples:", *examples, "", "exit status:", *codes])
        return super().create_parser(prog_name, subcommand, formatter_class=_HelpFormatter, epilog=epilog, **kwargs)

    def inform(self, sentence: str) -> None:
        """Write a sentence to standard error without the red colour of an error."""
        self.stderr.write(sentence, str)

    def execute(self, *args: Any, **options: Any) -> Any:
        # Django does not know the environment variable NO_COLOR (see no-color.org), only its own option --no-color.
        if os.environ.get("NO_COLOR") and not options.get("force_color"):
            options["no_color"] = True
        try:
            return super().execute(*args, **options)
        except DatabaseError as error:
            if (table := _missing_table(error)) is None:
                raise
            raise CommandError(f"The table {table} is missing: run `manage.py migrate`.") from error


def _missing_table(error: DatabaseError) -> str | None:
    """Return the name of a model's table if the error says that this table does not exist; else None."""
    cause = error.__cause__
    # SQLite has no code of its own for this error, so read the text of the error.
    pattern = _POSTGRESQL_TEXT if getattr(cause, "sqlstate", None) == _UNDEFINED_TABLE else _SQLITE_TEXT
    found = pattern.match(str(cause))
    # `migrate` creates only the tables of models. Any other missing table is an error of another kind.
    tables = {model._meta.db_table for model in apps.get_models(include_auto_created=True) if model._meta.managed}
    return found[1] if found is not None and found[1] in tables else None
