"""A command whose `--help` ends with examples and with the meaning of each exit status."""

from __future__ import annotations

import os
from argparse import RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from django.core.management.base import BaseCommand, CommandParser, DjangoHelpFormatter

#: The exit statuses of a command that does not list its own exit statuses.
EXIT_CODES: Mapping[int, str] = {0: "the work is done", 1: "an error; standard error says which", 2: "wrong options"}


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
        # Django does not know the variable NO_COLOR (see no-color.org), only its own option.
        if os.environ.get("NO_COLOR") and not options.get("force_color"):
            options["no_color"] = True
        return super().execute(*args, **options)
