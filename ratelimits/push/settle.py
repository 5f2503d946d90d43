"""Settling: what a person decides of deliveries that only a person can know about."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from enum import StrEnum

from django.db import transaction
from django.utils import timezone

from ratelimits.conf import conf
from ratelimits.models import PushDelivery, PushReceiver, Report
from ratelimits.push.plan import rendered
from ratelimits.push.receivers import Receiver
from ratelimits.reports.statements import version_rows

State = PushDelivery.State
#: What needs a person, and what a person may change.
OPEN = (State.REFUSED, State.UNSURE, State.EXPIRED)
_SETTLED = (*OPEN, State.SKIPPED)


class Decision(StrEnum):
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
    receiver: Receiver, lines: Collection[str], decision: Decision, by: str, reason: str, now: datetime | None = None
) -> int:
    """Settle the deliveries of these lines, all or none; return how many.

    With AGAIN an event that was never taken is made anew, by what CUSTOMER says now; its identity stays. Raises
    NotSettledError.
    """
    now = now or timezone.now()
    note = f"{decision} by {by}: {reason}"[:400]
    with transaction.atomic(using=conf.DATABASE, durable=True):
        PushReceiver.lock(conf.DATABASE, receiver.name)
        rows = PushDelivery.objects.using(conf.DATABASE).filter(receiver=receiver.name, line_id__in=lines)
        found = list(rows.select_related("report").order_by("pk"))
        missing = sorted(set(lines) - {row.line_id for row in found})
        if missing:
            raise NotSettledError(f"{receiver.name} has no delivery of the line {missing[0]}.")
        for row in found:
            if row.state not in _SETTLED:
                raise NotSettledError(
                    f"The line {row.line_id} is {row.get_state_display()}: there is nothing to settle."
                )
            if decision == Decision.ACCEPTED and row.state != State.UNSURE:
                raise NotSettledError(f"The line {row.line_id} was never taken: it is {row.get_state_display()}.")
        if decision == Decision.AGAIN:
            for row in found:
                _again(receiver, row, now, note)
        else:
            rows.update(state=State(decision.value), settled_at=now, note=note)
    return len(found)


def lines_in(receiver: Receiver, state: str) -> list[str]:
    """Return the lines whose deliveries are in a state."""
    rows = PushDelivery.objects.using(conf.DATABASE).filter(receiver=receiver.name, state=state)
    return list(rows.order_by("pk").values_list("line_id", flat=True))


def _again(receiver: Receiver, row: PushDelivery, now: datetime, note: str) -> None:
    # What may have been taken is sent as it was, whatever the person found.
    if row.unsure_since is None:
        row.customer, row.event = _rendered(receiver, row.report, row.line_id)
        if not row.customer:
            raise NotSettledError(f"The account of the line {row.line_id} still has no customer.")
    row.state, row.due_at, row.note = State.WAITING, now, note
    row.unsure_since, row.together = None, receiver.service.together
    row.save(using=conf.DATABASE)


def _rendered(receiver: Receiver, report: Report, line_id: str) -> tuple[str, str]:
    row = next(row for row in version_rows(report) if row.line_id == line_id)
    return rendered(receiver, row)
