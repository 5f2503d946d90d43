from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from ratelimits.conf import conf
from ratelimits.reports.verify.manifest import build


class Command(BaseCommand):
    help = (
        "Writes the manifest of a month: one small signed file, to be kept outside the database, with which"
        " ratelimits_verify proves every report, adjustment and gap that it lists."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("month", help="the month, such as 2026-10")
        parser.add_argument("--output", type=Path, metavar="FILE", help="instead of standard output; not overwritten")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            manifest = build(conf.DATABASE, options["month"])
        except ValueError as error:
            raise CommandError(str(error)) from error
        if not manifest["signature"]:
            self.stderr.write("It is not signed: without SIGNING_KEY whoever can change it can change it unseen.")
        if left := manifest["open"]:
            named = f"{', '.join(left[:3])}{', …' if left[3:] else ''}"
            self.stderr.write(
                f"{len(left)} periods of {options['month']} are open ({named}): write a further manifest once they are"
                " closed (ratelimits_finalise --open says what each waits for)."
            )
        if manifest["unsettled"]:
            self.stderr.write(
                f"{manifest['unsettled']} deliveries of {options['month']} are not settled: write a further manifest"
                " once they are (ratelimits_push --status says what each waits for)."
            )
        text = json.dumps(manifest, indent=1, sort_keys=True)
        path: Path | None = options["output"]
        if path is None:
            self.stdout.write(text)
            return
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(f"{text}\n")
        except OSError as error:
            raise CommandError(f"{path} could not be written: {error.strerror or error}") from error
        self.stdout.write(f"{path}: {len(manifest['reports'])} reports")
