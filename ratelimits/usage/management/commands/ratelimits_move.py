"""A command that gives an account text to another customer."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from math import ceil
from typing import Any

from django.core.exceptions import ValidationError
from django.core.management.base import CommandError, CommandParser

from ratelimits.conf import conf
from ratelimits.management.authors import author
from ratelimits.management.help import ExplainedCommand
from ratelimits.management.table import table
from ratelimits.management.typed_moments import typed_moment
from ratelimits.models import Customer
from ratelimits.usage.customers import wording
from ratelimits.usage.customers.move import move
from ratelimits.usage.customers.planning import NotMovedError, Planned, find_customer, plan

#: The values of two options that are no text and no moment.
NEW, BEGINNING = "new", "beginning"


class Command(ExplainedCommand):
    help = (
        "Gives an account text to another customer, from a quarter of an hour on: to rename, merge, split or swap"
        " customers, or to give a former text to somebody else. Shows what this changes. With --write, does it."
    )
    examples = (
        "acme --to new",
        "acme-inc --to acme --reason 'acme is acme-inc now' --write",
        "acme --to gezdgnbvgy3tqojq --since 2026-11-01T10:15 --by ada --write",
    )
    exit_codes = {
        0: "the text was moved; or, without --write, it can be moved, or is the customer's already",
        1: "nothing was moved; standard error says why",
        2: "wrong options",
    }

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("text", help="the account text, such as acme")
        parser.add_argument(
            "--to",
            required=True,
            metavar="CUSTOMER",
            help="the customer who gets the text: another text of the customer, or its token; or"
            f" “{NEW}” for a new customer",
        )
        parser.add_argument(
            "--since",
            type=_moment,
            help="the usage from this quarter of an hour on belongs to the customer: a moment such as 2026-11-01T10:15"
            f" or 2026-11-01, or “{BEGINNING}” (since its first usage); default: the next quarter",
        )
        parser.add_argument("--reason", default="", help="the reason, which the history shows to your colleagues")
        parser.add_argument(
            "--by",
            help="the user name of the person who decided this, for the history; needed if adjustments must move usage"
            " of closed periods",
        )
        parser.add_argument("--write", action="store_true", help="move the text")
        parser.add_argument("--json", action="store_true", help="print a JSON object for programs")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            self._move(options)
        except NotMovedError as error:
            raise CommandError(f"Nothing was moved: {error}") from error

    def _move(self, options: dict[str, Any]) -> None:
        customer = None if options["to"] == NEW else find_customer(conf.DATABASE, options["to"])
        by = author(options["by"])
        planned = plan(conf.DATABASE, options["text"], customer, options["since"])
        if options["json"]:
            answer = wording.as_json(planned)
            if moved := self._write(planned, customer, by, options):
                answer["customer"] = moved.token
            self.stdout.write(json.dumps(answer | {"moved": moved is not None}, indent=2))
            return
        self._show(planned)
        if moved := self._write(planned, customer, by, options):
            self.stdout.write(f"{planned.text} is a text of customer {moved.token}.")
        elif planned.changes_nothing:
            self.stdout.write(f"The customer has {planned.text} already: there is nothing to move.")
        else:
            self.stdout.write("Nothing was moved. Run the command with --write to move the text.")

    def _write(self, planned: Planned, customer: Customer | None, by: Any, options: dict[str, Any]) -> Customer | None:
        """Move the text if --write is given. Return the customer who has it now; None if nothing was moved."""
        if not options["write"] or planned.changes_nothing:
            return None
        return move(planned.text, customer, planned.asked, by=by, reason=options["reason"]).customer

    def _show(self, planned: Planned) -> None:
        if planned.changes_nothing:
            return
        for warning in wording.warnings(planned):
            self.stderr.write(self.style.WARNING(warning))
        for sentence in wording.sentences(planned):
            self.stdout.write(sentence)
        rows = wording.rows(planned)
        for line in table(wording.heads(), rows) if rows else ():
            self.stdout.write(line)


def _moment(text: str) -> int:
    """Return the moment that a text names, in s since 1970 UTC. argparse shows the error for any other text."""
    if text == BEGINNING:
        return 0
    try:
        moment = typed_moment(text)
    except ValidationError as error:
        raise ArgumentTypeError("\n".join(error.messages)) from error
    if moment is None:
        raise ValueError(text)
    return ceil(moment.timestamp())


_moment.__name__ = "moment"  # The error message of argparse contains this name: "invalid moment value".
