from __future__ import annotations

from datetime import datetime
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.utils import timezone

from ratelimits.conf import conf
from ratelimits.push import receivers
from ratelimits.push.plan import plan
from ratelimits.push.receivers import Receiver
from ratelimits.push.send import resume, send
from ratelimits.push.settle import OPEN, NotSettledError, Settlement, lines_in, settle
from ratelimits.push.status import Status, preview, status

#: Deliveries that --status names, by receiver and state; the admin lists all.
_NAMED = 50


class Command(BaseCommand):
    help = (
        "Sends the lines of finalised reports to the billing systems of RATELIMITS['PUSH'], each once: what is new"
        " since the last time. Says what was accepted and refused; ends with status 1 if something needs a person."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--receiver", metavar="NAME", help="this billing system alone")
        parser.add_argument("--now", action="store_true", help="do not wait until pauses after failures are over")
        what = parser.add_mutually_exclusive_group()
        what.add_argument("--dry-run", action="store_true", help="send and write nothing, print what would be sent")
        what.add_argument("--status", action="store_true", help="send nothing, only say what was delivered")
        what.add_argument(
            "--settle",
            choices=[each.value for each in Settlement],
            help="settle what needs a person: 'accepted' (it is there), 'elsewhere' (it was billed in another way),"
            " 'again' (it is not there, send it)",
        )
        parser.add_argument("--line", action="append", default=[], help="with --settle: a line's id; may be repeated")
        parser.add_argument("--all", choices=["refused", "unsure", "expired", "skipped"], help="with --settle")
        parser.add_argument("--by", help="with --settle: who decided it")
        parser.add_argument("--reason", help="with --settle: why")

    def handle(self, *args: Any, **options: Any) -> None:
        chosen = self._chosen(options["receiver"])
        now = timezone.now()
        if options["settle"]:
            self._settle(chosen, options)
            return
        if options["dry_run"]:
            for each in chosen:
                self._preview(each, now)
            return
        if not options["status"]:
            for each in chosen:
                plan(each)
                if options["now"]:
                    resume(each, timezone.now())
                send(each)
        found = [status(each, timezone.now()) for each in chosen]
        for one in found:
            self._show(one)
        if any(one.open or one.failing for one in found):
            raise CommandError("Some of it needs a person: see above, and --settle.", returncode=1)

    def _chosen(self, name: str | None) -> list[Receiver]:
        if not conf.PUSH:
            raise CommandError("RATELIMITS['PUSH'] names no billing system.")
        if name is None:
            return receivers.receivers()
        if name not in conf.PUSH:
            raise CommandError(f"RATELIMITS['PUSH'] has no {name!r}, only {', '.join(conf.PUSH)}.")
        return [receivers.receiver(name)]

    def _show(self, found: Status) -> None:
        self.stdout.write(f"{found.name}:")
        for state, (count, overage) in found.counts.items():
            self.stdout.write(f"  {state}: {count:,} lines, {overage:,} units of overage")
        if found.unplanned:
            self.stdout.write(f"  not looked at yet: {found.unplanned:,} reports")
        for report, why in found.failing:
            self.stdout.write(f"  cannot be pushed: {report}: {why}")
        if found.paused:
            self.stdout.write(f"  paused until {found.paused:%Y-%m-%d %H:%M:%S} UTC: {found.error}")
        for state in OPEN:
            for row in found.open.filter(state=state).order_by("pk")[:_NAMED]:
                self.stdout.write(f"  {state} {row.line_id} ({row.report}, {row.overage:,} {row.meter}): {row.note}")

    def _preview(self, receiver: Receiver, now: datetime) -> None:
        count = 0
        for row, event in preview(receiver, now):
            count += event
            if event:
                self.stdout.write(row.event)
            else:
                self.stderr.write(f"not sent: {row.line_id} ({row.report}): {row.note or row.get_state_display()}")
        for report, why in status(receiver, now).failing:
            self.stderr.write(f"cannot be pushed: {report}: {why}")
        self.stderr.write(f"{receiver.name}: {count:,} events would be sent.")

    def _settle(self, chosen: list[Receiver], options: dict[str, Any]) -> None:
        if len(chosen) != 1:
            raise CommandError("--settle needs --receiver: more than one is in RATELIMITS['PUSH'].")
        (receiver,) = chosen
        if not options["by"] or not options["reason"]:
            raise CommandError("--settle needs --by and --reason.")
        if bool(options["line"]) == bool(options["all"]):
            raise CommandError("--settle needs either --line or --all.")
        lines = options["line"] or lines_in(receiver, options["all"])
        try:
            count = settle(receiver, lines, Settlement(options["settle"]), options["by"], options["reason"])
        except NotSettledError as error:
            raise CommandError(str(error)) from error
        self.stdout.write(f"{receiver.name}: {count:,} lines are {options['settle']}.")
