from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, CommandParser
from django.db import DatabaseError
from redis.exceptions import RedisError

from ratelimits.doctor.diagnosis import ServerDiagnosis, as_json, broken, diagnose, heading, rows, sentences
from ratelimits.doctor.findings import Part, counts_usage, needed
from ratelimits.embedded import ServerStartError
from ratelimits.engine import Unavailable
from ratelimits.engine.server import current_server
from ratelimits.management.help import ExplainedCommand
from ratelimits.management.table import table

#: The last line if no rule needs the ledger, but usage is counted all the same.
_STUCK = (
    "Limits work. Usage is counted, but it will not reach the ledger: it stays in Redis, and takes more and more"
    " memory. (The exit status is 0, because no rule bills and none is restored from the ledger.)"
)


class Command(ExplainedCommand):
    help = (
        "Tries everything that the app does with the Redis server, on keys of its own, which it deletes again. Prints"
        " what works, what does not, why, and the ACL line or the setting that would change it. It changes no limit"
        " and no usage."
    )
    examples = ("", "--json")
    exit_codes = {
        0: "everything that the project needs works",
        1: "something that the project's rules, settings and code need does not work, or the server does not answer",
        2: "wrong options",
    }
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--json", action="store_true", help="print a JSON object for programs")

    def handle(self, *args: Any, **options: Any) -> None:
        parts = needed()
        try:
            diagnoses = diagnose()
        except (Unavailable, ServerStartError, ImproperlyConfigured, OSError) as error:
            raise CommandError(f"No server could be asked: {error}") from error
        stuck = not all(one.works(Part.BILLS) or one.is_only_endangered(Part.BILLS) for one in diagnoses)
        stuck = stuck and _is_counted()
        if options["json"]:
            self.stdout.write(json.dumps(as_json(diagnoses, parts, stuck=stuck), indent=2))
        else:
            for one in diagnoses:
                self._describe(one, parts)
        if failing := broken(diagnoses, parts):
            raise CommandError(f"The project needs what does not work, or is at risk: {', '.join(failing)}.")
        if options["json"]:
            return
        if stuck:
            self.stdout.write(self.style.WARNING(_STUCK))
        else:
            self.stdout.write(self.style.SUCCESS("Everything that the project needs works."))

    def _describe(self, one: ServerDiagnosis, parts: Iterable[Part]) -> None:
        self.stdout.write(self.style.MIGRATE_HEADING(_printable(heading(one))))
        columns = ("part", "works", "needed", "what it does")
        for line in table(columns, rows(one, frozenset(parts))):
            self.stdout.write(line)
        for line in sentences(one):
            self.stdout.write(_printable(line))


def _is_counted() -> bool:
    try:
        return counts_usage(current_server())
    except (DatabaseError, RedisError, Unavailable, OSError):
        return True  # nobody knows, so nobody may rely on the ledger


def _printable(line: str) -> str:
    """Return a line with all control characters escaped: the server's words can contain any."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line)
