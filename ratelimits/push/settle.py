"""Settling: a person decides about deliveries that failed, or of which nobody knows whether they arrived."""

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
#: The states that need a person's decision, and those that a person may change.
OPEN = (State.REFUSED, State.UNSURE, State.EXPIRED)
_SETTLED = (*OPEN, State.SKIPPED)


class Settlement(StrEnum):
    """The decisions that a person can make."""

    #: The receiver has the event.
    ACCEPTED = "accepted"
    #: The line was billed in another way, or is not to be billed.
    ELSEWHERE = "elsewhere"
    #: The receiver does not have the event: send it again.
    AGAIN = "again"


class NotSettledError(ValueError):
    """Raised if a decision does not fit a delivery; the message says why."""


def settle(
    receiver: Receiver, lines: Collection[str], decision: Settlement, by: str, reason: str, now: datetime | None = None
) -> int:
    """Settle the deliveries of these lines, all or none; return their number.

    With AGAIN, an event that the receiver certainly does not have is built again, with its identity and the customer
    that CUSTOMER returns now. Deliveries whose account still has no customer are left as they are. Raises
    NotSettledError.
    """
    now = now or timezone.now()
    note = f"{decision} by {by}: {reason}"[:400]
    with transaction.atomic(using=conf.DATABASE, durable=True):
        PushReceiver.lock(conf.DATABASE, receiver.name)
        rows = PushDelivery.objects.using(conf.DATABASE).filter(receiver=receiver.name, line_id__in=lines)
        chosen = list(rows.select_related("report").order_by("report_id", "pk"))
        missing = sorted(set(lines) - {row.line_id for row in chosen})
        if missing:
            raise NotSettledError(f"{receiver.name} has no delivery of the line {missing[0]}.")
        for row in chosen:
            state = f"The line {row.line_id} is {row.state}"
            if row.state not in _SETTLED:
                raise NotSettledError(f"{state}: there is nothing to settle.")
            if decision == Settlement.ACCEPTED and row.state != State.UNSURE:
                raise NotSettledError(f"{state}, so it was never accepted.")
        if decision == Settlement.AGAIN:
            return _send_again(receiver, chosen, now, note)
        return rows.update(state=State(decision.value), settled_at=now, note=note)


def lines_in(receiver: Receiver, state: str) -> list[str]:
    """Return the line_ids of the receiver's deliveries in a state."""
    rows = PushDelivery.objects.using(conf.DATABASE).filter(receiver=receiver.name, state=state)
    return list(rows.order_by("pk").values_list("line_id", flat=True))


def _send_again(receiver: Receiver, chosen: Sequence[PushDelivery], now: datetime, note: str) -> int:
    """Let these deliveries wait to be sent again; return their number. They must be sorted by report."""
    waiting = []
    for report, group in groupby(chosen, key=lambda row: row.report):
        rows = {row.line_id: row for row in group}
        # If an event may have been accepted, send the same text again, so that the receiver can recognise it.
        rebuilt = {name for name, row in rows.items() if row.unsure_since is None}
        for line in version_rows(report) if rebuilt else ():
            if line.line_id in rebuilt:
                delivery = rows[line.line_id]
                delivery.customer, delivery.event = rendered(receiver, line)
        for row in rows.values():
            if row.customer:
                row.state, row.due_at, row.note = State.WAITING, now, note
                row.unsure_since, row.together = None, receiver.service.max_events
                waiting.append(row)
    if chosen and not waiting:
        raise NotSettledError(f"{receiver.name} still has no customer for the account of any of these lines.")
    columns = ["customer", "event", "state", "due_at", "note", "unsure_since", "together"]
    PushDelivery.objects.using(conf.DATABASE).bulk_update(waiting, columns, batch_size=500)
    return len(waiting)
