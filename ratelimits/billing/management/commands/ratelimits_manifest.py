from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError, CommandParser

from ratelimits.billing.management.gains import gain_sentences
from ratelimits.billing.reports.verify.manifest import build
from ratelimits.conf import conf
from ratelimits.management.help import ExplainedCommand
from ratelimits.management.plurals import is_or_are, plural
from ratelimits.management.progress import shown


class Command(ExplainedCommand):
    help = (
        "Writes the manifest of a month: a small signed file that lists the month's reports, and digests of other rows"
        " such as adjustments and gaps. Keep the file outside the database. With this file, ratelimits_verify notices"
        " if one of these rows was changed or deleted."
    )
    examples = ("2026-10 --output 2026-10.json",)

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("month", help="the month, such as 2026-10")
        parser.add_argument(
            "--output", type=Path, metavar="FILE", help="write the manifest to this new file, not to standard output"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            with shown(self) as progress:
                manifest = build(conf.DATABASE, options["month"], progress)
        except ValueError as error:
            raise CommandError(str(error)) from error
        if not manifest["signature"]:
            self.stderr.write(
                "The manifest is not signed, because SIGNING_KEY is not set: nobody can notice changes in the file."
            )
        if open_periods := manifest["open"]:
            first_three = f"{', '.join(open_periods[:3])}{', …' if open_periods[3:] else ''}"
            self.stderr.write(
                f"{plural(len(open_periods), 'period')} of {options['month']} {is_or_are(len(open_periods))} open"
                f" ({first_three}): write another manifest when all are closed (ratelimits_finalise --open lists the"
                " reasons)."
            )
        if unsettled := manifest["unsettled"]:
            self.stderr.write(
                f"{plural(unsettled, 'delivery', 'deliveries')} of {options['month']} {is_or_are(unsettled)} neither"
                " accepted by a billing system nor billed in another way: push or settle all deliveries, then write"
                " another manifest (see ratelimits_push --status)."
            )
        for sentence in gain_sentences(options["month"], "file and the manifest"):
            self.stderr.write(sentence)
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
        self.stdout.write(f"{path}: {plural(len(manifest['reports']), 'report')}")
