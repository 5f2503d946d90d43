"""Settling: what a person decides of deliveries that only a person can know about."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from enum import StrEnum
from itertools import groupby

from django.db import transaction
from django.utils import timezone

from ratelimits.conf import conf
from ratelimits.models import PushDelivery, PushReceiver
from ratelimits.push.plan import rendered
from ratelimits.push.receivers import Receiver
from ratelimits.reports.statements import version_rows

State = PushDelivery.State
#: What needs a person, and what a person may change.
OPEN = (State.REFUSED, State.UNSURE, State.EXPIRED)
_SETTLED = (*OPEN, State.SKIPPED)


class Settlement(StrEnum):
    """What a person found, or wants."""

    #: The receiver has it.
    ACCEPTED = "accepted"
    #: It was billed, or forgiven, in another way.
    ELSEWHERE = "elsewhere"
    #: The receiver does not have it: send it.
    AGAIN = "again"


class NotSettledError(ValueError):
    """A decision that makes no sense for a delivery; the message says why."""


def settle(
    receiver: Receiver, lines: Collection[str], decision: Settlement, by: str, reason: str, now: datetime | None = None
) -> int:
    """Settle the deliveries of these lines, all or none; return how many.

    With AGAIN an event that was never taken is made anew, by what CUSTOMER says now; its identity stays. Those whose
    account still has no customer are left as they are. Raises NotSettledError.
    """
    now = now or timezone.now()
    note = f"{decision} by {by}: {reason}"[:400]
    with transaction.atomic(using=conf.DATABASE, durable=True):
        PushReceiver.lock(conf.DATABASE, receiver.name)
        rows = PushDelivery.objects.using(conf.DATABASE).filter(receiver=receiver.name, line_id__in=lines)
        found = list(rows.select_related("report").order_by("report_id", "pk"))
        missing = sorted(set(lines) - {row.line_id for row in found})
        if missing:
            raise NotSettledError(f"{receiver.name} has no delivery of the line {missing[0]}.")
        for row in found:
            about = f"The line {row.line_id} is {row.state}"
            if row.state not in _SETTLED:
                raise NotSettledError(f"{about}: there is nothing to settle.")
            if decision == Settlement.ACCEPTED and row.state != State.UNSURE:
                raise NotSettledError(f"{about}, so it was never taken.")
        if decision == Settlement.AGAIN:
            return _again(receiver, found, now, note)
        return rows.update(state=State(decision.value), settled_at=now, note=note)


def lines_in(receiver: Receiver, state: str) -> list[str]:
    """Return the lines whose deliveries are in a state."""
    rows = PushDelivery.objects.using(conf.DATABASE).filter(receiver=receiver.name, state=state)
    return list(rows.order_by("pk").values_list("line_id", flat=True))


def _again(receiver: Receiver, found: Sequence[PushDelivery], now: datetime, note: str) -> int:
    """Make these, which come report by report, wait again; return how many do."""
    sent = []
    for report, group in groupby(found, key=lambda row: row.report):
        rows = {row.line_id: row for row in group}
        # What may have been taken is sent as it was, whatever the person found.
        anew = {name for name, row in rows.items() if row.unsure_since is None}
        for line in version_rows(report) if anew else ():
            if line.line_id in anew:
                delivery = rows[line.line_id]
                delivery.customer, delivery.event = rendered(receiver, line)
        for row in rows.values():
            if row.customer:
                row.state, row.due_at, row.note = State.WAITING, now, note
                row.unsure_since, row.together = None, receiver.service.together
                sent.append(row)
    if found and not sent:
        raise NotSettledError(f"{receiver.name} still has no customer for the account of any of these lines.")
    columns = ["customer", "event", "state", "due_at", "note", "unsure_since", "together"]
    PushDelivery.objects.using(conf.DATABASE).bulk_update(sent, columns, batch_size=500)
    return len(sent)
