"""Upgrade the database of DATABASE_URL, export its months, and verify it.

Run it with `python -m tests.support.reports.upgraded DIRECTORY SIGNING_KEY MONTH.FORMAT…`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import django


def main(directory: Path, signing_key: str, names: list[str]) -> None:
    """Write the files with these names. Raises CommandError if a report does not verify."""
    django.setup()
    from django.conf import settings
    from django.core.management import call_command
    from django.test import override_settings

    call_command("migrate", verbosity=0)
    with override_settings(RATELIMITS={**settings.RATELIMITS, "SIGNING_KEY": signing_key}):
        for name in names:
            month, form = name.split(".")
            call_command("ratelimits_report", period=month, format=form, output=str(directory / name))
        call_command("ratelimits_verify", all=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
