"""What a receiver was sent, what it lacks, and what needs a person."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from django.db import InterfaceError, OperationalError
from django.db.models import Count, QuerySet, Sum

from ratelimits.conf import conf
from ratelimits.models import PushDelivery, PushReceiver, Report
from ratelimits.push.plan import deliveries, unplanned
from ratelimits.push.receivers import Receiver
from ratelimits.push.settle import OPEN

State = PushDelivery.State
#: Unplanned reports of which it is said whether they can be planned: there may be many before the first push.
_TRIED = 50


@dataclass(frozen=True)
class Status:
    """How far a receiver is."""

    name: str
    #: State to the number of deliveries in it and the sum of their overage.
    counts: dict[str, tuple[int, int]]
    #: Versions of reports whose lines are not in the delivery ledger yet.
    unplanned: int
    #: The first of them that cannot be planned, and why: CUSTOMER raises, say.
    failing: list[tuple[Report, str]]
    paused: datetime | None
    error: str
    #: The deliveries that need a person.
    open: QuerySet[PushDelivery]


def status(receiver: Receiver, now: datetime) -> Status:
    """Return how far a receiver is."""
    rows = PushDelivery.objects.using(conf.DATABASE).filter(receiver=receiver.name)
    sums = rows.order_by("state").values_list("state").annotate(Count("pk"), Sum("overage"))
    state = PushReceiver.objects.using(conf.DATABASE).filter(name=receiver.name).first()
    paused = state.paused_until if state is not None else None
    return Status(
        name=receiver.name,
        counts={name: (count, overage) for name, count, overage in sums},
        unplanned=unplanned(receiver).count(),
        failing=[(report, why) for report in unplanned(receiver)[:_TRIED] if (why := _failure(receiver, report, now))],
        paused=paused if paused is not None and paused > now else None,
        error=state.error if state is not None else "",
        open=rows.filter(state__in=OPEN).select_related("report"),
    )


def preview(receiver: Receiver, now: datetime) -> Iterator[tuple[PushDelivery, bool]]:
    """Yield what sending would come to now, each with whether it would be sent; nothing is written."""
    rows = PushDelivery.objects.using(conf.DATABASE).filter(receiver=receiver.name, state=State.WAITING)
    for row in rows.select_related("report").order_by("pk").iterator():
        yield _judged(receiver, row, now)
    for report in unplanned(receiver).iterator():
        if _failure(receiver, report, now):
            continue
        for row in deliveries(receiver, report, now):
            yield _judged(receiver, row, now)


def _failure(receiver: Receiver, report: Report, now: datetime) -> str:
    """Return why a report cannot be planned; "" if it can."""
    try:
        for _row in deliveries(receiver, report, now):
            pass
    except (OperationalError, InterfaceError):
        raise  # the database, not a report
    except Exception as error:  # noqa: BLE001 - CUSTOMER is the project's own
        return f"{type(error).__name__}: {error}"
    return ""


def _judged(receiver: Receiver, row: PushDelivery, now: datetime) -> tuple[PushDelivery, bool]:
    oldest, kept = receiver.service.oldest, receiver.retried_for
    if oldest is not None and row.happened_at < now - oldest:
        row.state, row.note = State.EXPIRED, f"{receiver.service.label} takes nothing older than {oldest.days} days"
    elif kept is not None and row.unsure_since is not None and row.unsure_since <= now - kept:
        row.state, row.note = State.UNSURE, f"{receiver.service.label} may not recognise it any more"
    return row, row.state == State.WAITING
