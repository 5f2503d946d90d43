"""What a person sees and decides: the state of a receiver, and the deliveries that failed or whose answer was lost.

A report is unplanned for a receiver if the report must be pushed, but its lines are not in the delivery ledger yet.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from itertools import groupby
from typing import NamedTuple

from django.db import InterfaceError, OperationalError, transaction
from django.db.models import Count, Exists, OuterRef, QuerySet

from ratelimits.billing.models import PushDelivery, PushReceiver, Report
from ratelimits.billing.push.deliveries import AHEAD, billed_account, deliveries, rendered, unplanned
from ratelimits.billing.push.receivers import MAX_NOTE, Receiver
from ratelimits.billing.reports.statements import version_rows
from ratelimits.conf import conf
from ratelimits.models import Name
from ratelimits.moments import now_of
from ratelimits.progress import Progress
from ratelimits.usage.models.sums import ExactSum

State = PushDelivery.State
#: The states in which a delivery needs a person's decision.
TO_DECIDE = (State.REFUSED, State.UNSURE, State.EXPIRED)
#: The states in which a person can settle a delivery.
_CAN_BE_SETTLED = (*TO_DECIDE, State.SKIPPED)
#: Maximum number of deliveries that one statement writes.
_CHUNK = 500
#: Maximum number of unplanned reports for which `status` checks whether they can be planned. Before the first push,
#: very many reports can be unplanned.
_MAX_TRIED = 50


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


class WithoutAccount(NamedTuple):
    """A customer that no account names now, with the lines that were skipped because of this."""

    #: The account on the customer's reports.
    account: str
    #: The number of skipped lines, and the sum of their overage.
    lines: int
    overage: int


@dataclass(frozen=True)
class PushStatus:
    """The state of a receiver."""

    name: str
    #: For each state, the number of deliveries and the sum of their overage.
    counts: dict[str, tuple[int, int]]
    #: Number of unplanned report versions.
    unplanned: int
    #: The first unplanned reports that cannot be planned, each with its error (for example one that CUSTOMER raised).
    failing: list[tuple[Report, str]]
    #: When the receiver's pause ends; None if it is not paused now.
    paused: datetime | None
    #: The error of the last request to the receiver; "" if this request did not fail.
    error: str
    #: The deliveries that need a person's decision.
    to_decide: QuerySet[PushDelivery]
    #: Customers that no account names now. So CUSTOMER is not asked for them, and nobody bills their lines.
    without_account: list[WithoutAccount]

    @property
    def needs_a_person(self) -> bool:
        """Return whether some lines are not billed until a person decides."""
        return bool(self.to_decide or self.failing or self.without_account)


def status(receiver: Receiver, now: datetime, progress: Progress | None = None) -> PushStatus:
    """Return the state of a receiver. `progress` shows how many reports were tried."""
    rows = PushDelivery.objects.using(conf.DATABASE).filter(receiver=receiver.name)
    sums = rows.order_by("state").values_list("state").annotate(Count("pk"), ExactSum("overage"))
    state = PushReceiver.objects.using(conf.DATABASE).filter(name=receiver.name).first()
    paused = state.paused_until if state is not None else None
    tried = list(unplanned(receiver)[:_MAX_TRIED])
    tried_reports = (progress or Progress()).counted(f"unplanned reports for {receiver.name}", tried, len(tried))
    return PushStatus(
        name=receiver.name,
        counts={name: (count, overage) for name, count, overage in sums},
        unplanned=unplanned(receiver).count(),
        failing=[(report, why) for report in tried_reports if (why := _failure(receiver, report, now))],
        paused=paused if paused is not None and paused > now else None,
        error=state.error if state is not None else "",
        to_decide=rows.filter(state__in=TO_DECIDE).select_related("report"),
        without_account=_without_account(rows),
    )


def _without_account(rows: QuerySet[PushDelivery]) -> list[WithoutAccount]:
    """Return the customers that no account names now, if they have skipped lines with overage."""
    names = Name.objects.using(conf.DATABASE).filter(customer__token=OuterRef("report__customer"), until=None)
    skipped = rows.filter(~Exists(names), state=State.SKIPPED)
    by_account = skipped.order_by("report__account").values_list("report__account", "report__customer")
    sums = by_account.annotate(Count("pk"), ExactSum("overage"))
    return [WithoutAccount(account, lines, overage) for account, _token, lines, overage in sums if overage]


def preview(receiver: Receiver, now: datetime, progress: Progress) -> Iterator[tuple[PushDelivery, bool]]:
    """Yield each delivery that waits or would be planned, and whether its event would be sent. Write nothing.

    Pauses are ignored: a delivery that would be sent only after a pause counts as sent.

    `progress` gets two stages: waiting deliveries, and reports that would be planned.
    """
    rows = PushDelivery.objects.using(conf.DATABASE).filter(receiver=receiver.name, state=State.WAITING)
    waiting = rows.select_related("report").order_by("pk").iterator()
    for row in progress.counted(f"deliveries to {receiver.name}", waiting, rows.count()):
        yield _preview_row(receiver, row, now)
    reports = unplanned(receiver)
    for report in progress.counted(f"reports for {receiver.name}", reports.iterator(), reports.count()):
        if _failure(receiver, report, now):
            continue
        for row in deliveries(receiver, report, billed_account(report), now):
            yield _preview_row(receiver, row, now)


def _failure(receiver: Receiver, report: Report, now: datetime) -> str:
    """Return why a report cannot be planned; "" if it can be planned."""
    try:
        for _row in deliveries(receiver, report, billed_account(report), now):
            pass
    except (OperationalError, InterfaceError):
        raise  # The database failed, so the report is not the cause.
    except Exception as error:  # noqa: BLE001 - the project's CUSTOMER can raise anything
        return f"{type(error).__name__}: {error}"
    return ""


def _preview_row(receiver: Receiver, row: PushDelivery, now: datetime) -> tuple[PushDelivery, bool]:
    """Return a delivery with the state that `give_up` would give it, and whether its event would be sent."""
    label, max_age, retried_for = receiver.service.label, receiver.service.max_age, receiver.retried_for
    # As in `give_up`, look for a lost answer first: then the event was perhaps accepted, however old it is.
    since = row.unsure_since
    if retried_for is not None and since is not None and not now - retried_for < since <= now + AHEAD:
        row.state, row.note = State.UNSURE, f"an answer was lost, and perhaps {label} no longer recognises the event"
    elif max_age is not None and row.happened_at < now - max_age:
        too_old = f"{label} accepts no event older than {max_age.days} days"
        row.state, row.note = State.EXPIRED, too_old
        if row.unsure_since is not None:
            row.state, row.note = State.UNSURE, f"an answer was lost, and {too_old}"
    return row, row.state == State.WAITING
