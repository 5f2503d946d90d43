from __future__ import annotations

from datetime import datetime
from typing import Any

from django.core.management.base import CommandError, CommandParser

from ratelimits.billing import jobs
from ratelimits.billing.push import receivers
from ratelimits.billing.push.receivers import Receiver
from ratelimits.billing.push.settle import (
    TO_DECIDE,
    NotSettledError,
    PushStatus,
    Settlement,
    line_ids_in,
    preview,
    settle,
    status,
)
from ratelimits.conf import conf
from ratelimits.management.help import ExplainedCommand
from ratelimits.management.plurals import plural
from ratelimits.management.progress import shown
from ratelimits.moments import now_of

#: Maximum number of deliveries that --status names for each receiver and state. The admin lists all deliveries.
_MAX_NAMED = 50


class Command(ExplainedCommand):
    help = (
        "Sends new lines of finalised reports to the billing systems in RATELIMITS['PUSH']. A billing system counts"
        " each line once, even if it receives the line again after a failure. Prints how many lines are in each state."
        " The exit status is 1 if a person must settle a delivery."
    )
    examples = (
        "",
        "--dry-run",
        "--status",
    )
    exit_codes = {0: "done", 1: "a person must settle a delivery, or another error", 2: "wrong options"}

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--receiver", metavar="NAME", help="only this billing system")
        parser.add_argument("--now", action="store_true", help="send now, even during the pause after a failure")
        modes = parser.add_mutually_exclusive_group()
        modes.add_argument(
            "--dry-run",
            action="store_true",
            help="only print the events that would be sent; nothing is sent and nothing is stored",
        )
        modes.add_argument("--status", action="store_true", help="send nothing, only list the deliveries by state")
        modes.add_argument(
            "--settle",
            choices=[settlement.value for settlement in Settlement],
            help="decide about deliveries: 'accepted' (the billing system has the event), 'elsewhere' (the line was"
            " billed in another way), 'again' (the billing system does not have the event: send it again)",
        )
        parser.add_argument(
            "--line", action="append", default=[], help="with --settle: a line_id; can be given several times"
        )
        parser.add_argument(
            "--all", choices=["refused", "unsure", "expired", "skipped"], help="with --settle: all lines in this state"
        )
        parser.add_argument("--by", help="with --settle: the person who decided this")
        parser.add_argument("--reason", help="with --settle: the reason")

    def handle(self, *args: Any, **options: Any) -> None:
        chosen = self._chosen_receivers(options["receiver"])
        now = now_of(conf.DATABASE)
        if options["settle"]:
            self._settle(chosen, options)
            return
        if options["dry_run"]:
            for receiver in chosen:
                self._preview(receiver, now)
            return
        with shown(self) as progress:
            if not options["status"]:
                for receiver in chosen:
                    jobs.push(receiver, progress, at_once=options["now"])
            statuses = [status(receiver, now_of(conf.DATABASE), progress) for receiver in chosen]
        for push_status in statuses:
            self._show(push_status)
        if any(push_status.needs_a_person for push_status in statuses):
            raise CommandError("The deliveries above need a person's decision: see --settle.", returncode=1)

    def _chosen_receivers(self, name: str | None) -> list[Receiver]:
        if not conf.PUSH:
            raise CommandError("RATELIMITS['PUSH'] names no billing system.")
        if name is None:
            return receivers.receivers()
        if name not in conf.PUSH:
            raise CommandError(f"RATELIMITS['PUSH'] has no {name!r}, only {', '.join(conf.PUSH)}.")
        return [receivers.receiver(name)]

    def _show(self, push_status: PushStatus) -> None:
        self.stdout.write(f"{push_status.name}:")
        for state, (count, overage) in push_status.counts.items():
            self.stdout.write(f"  {state}: {plural(count, 'line')}, {plural(overage, 'unit')} of overage")
        if push_status.unplanned:
            self.stdout.write(f"  without deliveries yet: {plural(push_status.unplanned, 'report')}")
        for report, why in push_status.failing:
            self.stdout.write(f"  cannot be pushed: {report}: {why}")
        if push_status.paused:
            self.stdout.write(f"  paused until {push_status.paused:%Y-%m-%d %H:%M:%S} UTC: {push_status.error}")
        for each in push_status.without_account:
            self.stdout.write(
                f"  skipped: {each.account}, {plural(each.lines, 'line')}, {plural(each.overage, 'unit')} of overage:"
                " no account names this customer now. Give the customer an account, then run `--settle again`. Or bill"
                " the lines in another way, then run `--settle elsewhere`"
            )
        for state in TO_DECIDE:
            for row in push_status.to_decide.filter(state=state).order_by("pk")[:_MAX_NAMED]:
                self.stdout.write(f"  {state} {row.line_id} ({row.report}, {row.overage:,} {row.meter}): {row.note}")

    def _preview(self, receiver: Receiver, now: datetime) -> None:
        count = 0
        with shown(self, alone=True) as progress:
            for row, would_be_sent in preview(receiver, now, progress):
                count += would_be_sent
                if would_be_sent:
                    self.stdout.write(row.event)
                else:
                    self.stderr.write(f"not sent: {row.line_id} ({row.report}): {row.note or row.get_state_display()}")
            failing = status(receiver, now, progress).failing
        for report, why in failing:
            self.stderr.write(f"cannot be pushed: {report}: {why}")
        self.inform(f"{receiver.name}: {plural(count, 'event')} would be sent.")

    def _settle(self, chosen: list[Receiver], options: dict[str, Any]) -> None:
        if len(chosen) != 1:
            raise CommandError("--settle needs --receiver, because RATELIMITS['PUSH'] has several billing systems.")
        (receiver,) = chosen
        if not options["by"] or not options["reason"]:
            raise CommandError("--settle needs --by and --reason.")
        if bool(options["line"]) == bool(options["all"]):
            raise CommandError("--settle needs either --line or --all.")
        lines = options["line"] or line_ids_in(receiver, options["all"])
        decision, by, reason = Settlement(options["settle"]), options["by"], options["reason"]
        try:
            with shown(self) as progress:
                count = settle(receiver, lines, decision, by, reason, progress=progress)
        except NotSettledError as error:
            raise CommandError(str(error)) from error
        self.stdout.write(f"{receiver.name}: {plural(count, 'line')} settled as '{options['settle']}'.")
