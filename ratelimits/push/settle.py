"""Settle deliveries: a person decides about each delivery that failed, or whose answer was lost."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from enum import StrEnum
from itertools import groupby

from django.db import transaction

from ratelimits.conf import conf
from ratelimits.models import PushDelivery, PushReceiver
from ratelimits.moments.databases import now_of
from ratelimits.progress import Progress
from ratelimits.push.plan import billed_account, rendered
from ratelimits.push.receivers import Receiver
from ratelimits.push.service import MAX_NOTE
from ratelimits.reports.statements import version_rows

State = PushDelivery.State
#: The states in which a delivery needs a person's decision.
TO_DECIDE = (State.REFUSED, State.UNSURE, State.EXPIRED)
#: The states in which a person can settle a delivery.
_CAN_BE_SETTLED = (*TO_DECIDE, State.SKIPPED)
#: Maximum number of deliveries that one statement writes.
_CHUNK = 500


class Settlement(StrEnum):
    """The decisions that a person can make."""

    #: The receiver has the event.
    ACCEPTED = "accepted"
    #: The line was billed in another way, or must not be billed.
    ELSEWHERE = "elsewhere"
    #: The receiver does not have the event: send it again.
    AGAIN = "again"


class NotSettledError(ValueError):
    """Raised if a decision does not fit a delivery; the message says why."""


def settle(
    receiver: Receiver,
    lines: Collection[str],
    decision: Settlement,
    by: str,
    reason: str,
    now: datetime | None = None,
    progress: Progress | None = None,
) -> int:
    """Settle the deliveries of the lines with these line_ids; return how many were settled.

    With AGAIN, make a new event in place of each event that the receiver certainly does not have. The new event has the
    same identity, and the customer that CUSTOMER returns now. If the account of a delivery still has no customer, this
    delivery does not change. `progress` gets two stages, but only with AGAIN.

    Raise NotSettledError, and settle nothing, if a line has no delivery, or if the decision does not fit one of the
    deliveries. With AGAIN, also raise this error if no account of the deliveries has a customer.
    """
    now = now or now_of(conf.DATABASE)
    note = f"{decision} by {by}: {reason}"[:MAX_NOTE]
    with transaction.atomic(using=conf.DATABASE, durable=True):
        PushReceiver.lock(conf.DATABASE, receiver.name)
        rows = PushDelivery.objects.using(conf.DATABASE).filter(receiver=receiver.name, line_id__in=lines)
        chosen = list(rows.select_related("report").order_by("report_id", "pk"))
        missing = sorted(set(lines) - {row.line_id for row in chosen})
        if missing:
            raise NotSettledError(f"{receiver.name} has no delivery of the line {missing[0]}.")
        for row in chosen:
            state = f"The line {row.line_id} is {row.state}"
            if row.state not in _CAN_BE_SETTLED:
                raise NotSettledError(f"{state}: there is nothing to settle.")
            if decision == Settlement.ACCEPTED and row.state != State.UNSURE:
                raise NotSettledError(f"{state}, so it was never accepted.")
        if decision == Settlement.AGAIN:
            return _send_again(receiver, chosen, now, note, progress or Progress())
        return rows.update(state=State(decision.value), settled_at=now, note=note)


def line_ids_in(receiver: Receiver, state: str) -> list[str]:
    """Return the line_ids of the receiver's deliveries in a state."""
    rows = PushDelivery.objects.using(conf.DATABASE).filter(receiver=receiver.name, state=state)
    return list(rows.order_by("pk").values_list("line_id", flat=True))


def _send_again(
    receiver: Receiver, chosen: Sequence[PushDelivery], now: datetime, note: str, progress: Progress
) -> int:
    """Mark deliveries to be sent again; return how many were marked. `chosen` must be sorted by report."""
    waiting = []
    counted = progress.counted(f"deliveries to {receiver.name}", chosen, len(chosen))
    for report, group in groupby(counted, key=lambda row: row.report):
        rows = {row.line_id: row for row in group}
        # An event that was perhaps accepted keeps its text, so that the receiver can recognise the event.
        to_rebuild = {line_id for line_id, row in rows.items() if row.unsure_since is None}
        account = billed_account(report)
        for line in version_rows(report) if to_rebuild else ():
            if line.line_id in to_rebuild:
                delivery = rows[line.line_id]
                delivery.customer, delivery.event = rendered(receiver, line, account)
        for row in rows.values():
            if row.customer:
                row.state, row.due_at, row.note = State.WAITING, now, note
                row.unsure_since, row.together = None, receiver.service.max_events
                waiting.append(row)
    if chosen and not waiting:
        raise NotSettledError(f"{receiver.name} still has no customer for the account of any of these lines.")
    columns = ["customer", "event", "state", "due_at", "note", "unsure_since", "together"]
    written = progress.counter("written deliveries", len(waiting))
    for begin in range(0, len(waiting), _CHUNK):
        chunk = waiting[begin : begin + _CHUNK]
        PushDelivery.objects.using(conf.DATABASE).bulk_update(chunk, columns)
        written(len(chunk))
    return len(waiting)
