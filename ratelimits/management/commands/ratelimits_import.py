"""A command that makes rules from the rates that a project has given to other libraries."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser

from ratelimits import as_code
from ratelimits.addresses import proxies
from ratelimits.conf import conf
from ratelimits.management.help import ExplainedCommand
from ratelimits.management.progress import shown
from ratelimits.moving.rates import PlannedImport, plan, write

_HEADINGS = ("FOUND", "WHERE", "BECOMES")


class Command(ExplainedCommand):
    help = (
        "Finds the throttles of Django REST framework and the decorators of django-ratelimit in the project's views,"
        " and shows the rules that they become. With --write, adds these rules. The command does not"
        " change a rule whose name already exists, so you can run it again."
    )
    examples = (
        "",
        "--write",
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--write", action="store_true", help="add the rules to the database")

    def handle(self, *args: Any, **options: Any) -> None:
        planned = plan(conf.DATABASE)
        if not planned:
            self.stdout.write("No rates were found in the views of ROOT_URLCONF.")
            return
        self._show(planned)
        if not options["write"]:
            self.stdout.write("\nNothing was written. Run the command with --write to add the rules.")
            return
        try:
            with shown(self) as progress:
                changes = write(planned, conf.DATABASE, progress)
        except as_code.RefusedError as error:
            raise CommandError("\n".join(["Nothing was written:", *error.problems])) from error
        self.stdout.write("\n" + ("\n".join(changes) or "Nothing to add: all these rules exist."))

    def _show(self, planned: list[PlannedImport]) -> None:
        """Write a table of everything that was found, and the numbered notes below it."""
        notes: dict[str, int] = {}
        rows = [_HEADINGS]
        for one in planned:
            numbers = [notes.setdefault(note, len(notes) + 1) for note in one.finding.notes]
            marks = "".join(f" [{number}]" for number in numbers)
            first, *others = one.finding.where
            rows.append((one.finding.found, first, _becomes(one) + marks))
            rows += [("", view, "") for view in others]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        for row in rows:
            self.stdout.write(f"{row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {row[2]}".rstrip())
        self.stdout.write("")
        for note, number in notes.items():
            self.stdout.write(f"[{number}] {note}")
        if any(one.finding.rule is not None for one in planned):
            self.stdout.write(
                "A rule limits only views with QuotaThrottle, the middleware or @limited. So replace the throttles"
                " and decorators that are listed above."
            )
        if proxies() is None and not conf.TRUSTED_PROXIES:
            self.stdout.write(
                "NUM_PROXIES is not set, so X-Forwarded-For is not trusted. If there is a proxy in front of the site,"
                " set NUM_PROXIES: otherwise all clients of the proxy are counted as one."
            )


def _becomes(one: PlannedImport) -> str:
    if one.finding.rule is None:
        return "no rule"
    name = one.finding.rule["name"]
    return f"rule {name}, which exists: not changed" if one.exists else f"rule {name}: {one.sentence}"
