"""Do what people and timers do while requests come: `python -m tests.long.soak.operations FOLDER`.

This process edits rules, makes reports, and closes and archives a month whose usage it makes itself. After each round
it writes a line of JSON: how often it has done what. It ends when its standard input ends.
"""

from __future__ import annotations

import io
import json
import select
import sys
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import django
from django.core.management import call_command
from django.db.models import Sum

#: The account whose usage is of a month long ago, and its key.
OLD_ACCOUNT, OLD_KEY = "long-ago", "api_key:long-ago"
#: Requests that the old account makes in each round.
OLD_REQUESTS = 50
#: Seconds between two edits, and edits between two reports and between two rounds of closing.
PAUSE, REPORT_EVERY, CLOSE_EVERY = 1.0, 10, 30


class Operations:
    """What is done, one thing after another. The archives are in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.done: Counter[str] = Counter()
        #: The month in which the old account has made requests last; each round has a new one.
        self._old = datetime(2000, 1, 15, tzinfo=UTC)

    def run(self) -> None:
        """Do everything again and again until standard input ends."""
        for number in range(1, 10**9):
            if select.select([sys.stdin], [], [], PAUSE)[0]:
                return
            self._edit(number)
            if number % REPORT_EVERY == 0:
                self._command("reports", "ratelimits_report", period=f"{datetime.now(UTC):%Y-%m}", format="csv")
            if number % CLOSE_EVERY == 0:
                self._close()
            print(json.dumps(self.done), flush=True)

    def _edit(self, number: int) -> None:
        from ratelimits.models import KeyOverride, Plan, PlanMembership, Rule

        if number % 3 == 0:
            rule = Rule.objects.get(name="burst", plan__slug="free")
            rule.capacity = 20 + number % 10
            rule.save()
        elif number % 3 == 1:
            KeyOverride.objects.filter(key="user:edited").delete()
            KeyOverride.objects.create(key="user:edited", rule="burst", capacity=number)
        else:
            PlanMembership.objects.filter(key="user:edited").delete()
            PlanMembership.objects.create(key="user:edited", plan=Plan.objects.get(slug="free"))
        self.done["edits"] += 1

    def _command(self, name: str, *arguments: Any, **options: Any) -> str:
        """Run a command, count it under this name, and return what it prints."""
        out = io.StringIO()
        call_command(*arguments, stdout=out, stderr=io.StringIO(), **options)
        self.done[name] += 1
        return out.getvalue()

    def _close(self) -> None:
        """Make usage of the old month, and wait until the worker has drained it. Then finalise, archive and verify."""
        from ratelimits.models import ConfigVersion
        from ratelimits.usage.models import Line
        from tests.support.usage.traffic import use

        self._old = (self._old + timedelta(days=30)).replace(day=15)
        moment = int(self._old.timestamp()) * 1_000_000
        lines = Line.objects.filter(account=OLD_ACCOUNT)
        before = lines.aggregate(requests=Sum("admitted_requests", default=0))["requests"]
        version, _complete = ConfigVersion.read("default")
        for _ in range(OLD_REQUESTS):
            assert use(OLD_ACCOUNT, OLD_KEY, now=moment, configuration=version).allowed
        deadline = time.monotonic() + 120
        # The requests may be in two batches. The month must not be closed between these batches.
        while lines.aggregate(requests=Sum("admitted_requests"))["requests"] != before + OLD_REQUESTS:
            assert time.monotonic() < deadline, "the worker has not drained the usage within two minutes"
            time.sleep(0.2)
        # Another batch may be drained, but not tallied yet, whenever the command runs. Then the month stays open.
        while OLD_ACCOUNT not in (closed := self._command("finalisations", "ratelimits_finalise")).split("open:")[0]:
            assert time.monotonic() < deadline, closed
            time.sleep(0.2)
        self.done["months closed"] += 1
        archived = self._command("archives", "ratelimits_archive", self._folder, keep=1)
        assert str(self._folder) in archived, archived
        self._command("compactions", "ratelimits_compact")
        self._command("verifications", "ratelimits_verify", archive=self._folder)


if __name__ == "__main__":
    django.setup()
    Operations(Path(sys.argv[1])).run()
