"""The deliveries of report lines: plan them, claim some of them for a few minutes, send them, and store the answer.

Each line that a report version added, and that has something to bill, gets one delivery for each receiver. All
deliveries of a version are written in one transaction. If the process dies before the commit, nothing is planned, and
the next call finds the version again. After the commit, this version is never planned again.

If a process dies before it stores the answer, its claim ends, and the events are sent again with the same text and
identity. This is safe while the receiver recognises repeated events. When the receiver no longer recognises them, a
person must ask the receiver whether it has the events, and settle the deliveries.
"""

from __future__ import annotations

import http.client
import logging
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import groupby, islice
from time import monotonic
from uuid import UUID, uuid4

from django.db import InterfaceError, OperationalError, transaction
from django.db.models import Exists, F, OuterRef, Q, QuerySet, Value
from django.db.models.functions import Coalesce

from ratelimits.billing.models import PushDelivery, PushedReport, PushReceiver, Report
from ratelimits.billing.push.receivers import (
    MAX_ERROR,
    MAX_NOTE,
    NoneAccepted,
    OutcomeUnknown,
    PushFailed,
    PushOutcome,
    Receiver,
)
from ratelimits.billing.reports.exports.billing import last_second
from ratelimits.billing.reports.rows import Row
from ratelimits.billing.reports.statements import version_rows
from ratelimits.conf import conf
from ratelimits.engine.keys import LONGEST_NAME
from ratelimits.models.accounts.named import of_tokens
from ratelimits.moments import moment, now_of
from ratelimits.moments.columns import UTCDateTimeField
from ratelimits.progress import Progress
from ratelimits.usage.ledger import crash
from ratelimits.usage.periods import SECOND
from ratelimits.usage.posting import Connection

# Projects can configure these names, which are older than this module.
_plan_logger = logging.getLogger("ratelimits.billing.push.plan")
_send_logger = logging.getLogger("ratelimits.billing.push.send")

#: Maximum number of reports that are planned in one transaction.
_MAX_REPORTS = 100
#: Maximum number of deliveries that one statement writes.
_CHUNK = 1000
#: How long a claim lasts. A request takes less time than this.
CLAIM = timedelta(minutes=5)
#: Pause after the first failure of a receiver. Each further failure doubles the pause, up to `MAX_PAUSE`.
FIRST_PAUSE, MAX_PAUSE = timedelta(seconds=30), timedelta(hours=1)
#: If an answer was lost more than this time after the present moment, the database's clock was ahead then. So nobody
#: knows how long ago that was.
AHEAD = timedelta(minutes=5)
#: Maximum number of times that a pause is doubled. The pause reaches `MAX_PAUSE` long before. Without this limit,
#: the computation could exceed the longest timedelta.
_MAX_DOUBLINGS = 20
#: Seconds between two calls of `give_up` while `send` runs; much less than `MARGIN`.
_GIVE_UP_INTERVAL = 300

State = PushDelivery.State


def plan(receiver: Receiver, now: datetime | None = None, progress: Progress | None = None) -> int:
    """Plan all reports that `unplanned` returns; return the number of new deliveries. `progress` counts the reports.

    Some reports cannot be planned, for example because CUSTOMER raises an error. They are logged and skipped, and the
    next call tries them again.
    """
    now = now or now_of(conf.DATABASE)
    planned, last_pk = 0, 0
    total = unplanned(receiver).count() if progress is not None else None
    count = (progress or Progress()).counter(f"reports for {receiver.name}", total)
    while True:
        with transaction.atomic(using=conf.DATABASE, durable=True):
            PushReceiver.lock(conf.DATABASE, receiver.name)
            crash.reached("push:locked")
            reports = list(unplanned(receiver).filter(pk__gt=last_pk)[:_MAX_REPORTS])
            customers = of_tokens(conf.DATABASE, {report.customer_id for report in reports})
            for report in reports:
                try:
                    with transaction.atomic(using=conf.DATABASE):
                        planned += _plan(receiver, report, customers[report.customer_id].billed_account, now)
                except (OperationalError, InterfaceError):
                    raise  # The database failed, so the next report would fail too.
                except Exception:
                    _plan_logger.exception(
                        "Report %r cannot be pushed to %s; other reports are pushed", str(report), receiver.name
                    )
                last_pk = report.pk
                count(1)
            crash.reached("push:planned")
        crash.reached("push:plan-committed")
        if len(reports) < _MAX_REPORTS:
            return planned


def unplanned(receiver: Receiver) -> QuerySet[Report]:
    """Return the report versions whose lines are not in the delivery ledger yet, oldest first.

    Reports of months before the receiver's SINCE are left out.
    """
    planned = PushedReport.objects.filter(receiver=receiver.name, report=OuterRef("pk"))
    reports = Report.objects.using(conf.DATABASE).filter(label__gte=receiver.since)
    return reports.exclude(Exists(planned)).order_by("pk")


def deliveries(receiver: Receiver, report: Report, account: str, now: datetime) -> Iterator[PushDelivery]:
    """Yield an unsaved delivery for each line that a report version added.

    `account` is that of `billed_account`. Lines with nothing to bill are left out. Raise the errors of `rendered`.
    """
    for row in version_rows(report):
        delivery = _delivery(receiver, report, row, account, now)
        if delivery is not None:
            yield delivery


def billed_account(report: Report) -> str:
    """Return the account under which billing systems know the customer of a report now; "" if it has none."""
    return of_tokens(conf.DATABASE, [report.customer_id])[report.customer_id].billed_account


def rendered(receiver: Receiver, row: Row, account: str) -> tuple[str, str]:
    """Return the customer and the event of a line. The customer is "" if the receiver does not bill the account.

    `account` is that of `billed_account`.

    Raise ValueError if the function CUSTOMER returns neither None nor a text of at most 255 characters. Errors
    that CUSTOMER raises are not caught.
    """
    customer: object = (receiver.customer(account) or "") if account else ""
    if not isinstance(customer, str) or len(customer) > LONGEST_NAME:
        raise ValueError(
            f"CUSTOMER returns {customer!r:.80} for {account!r}: it must return a text of at most {LONGEST_NAME}"
            " characters, or None"
        )
    return customer, receiver.service.event(row, customer)


def _plan(receiver: Receiver, report: Report, account: str, now: datetime) -> int:
    """Write the deliveries of a report version, and mark it as planned. Return the number of deliveries."""
    unsaved, count = deliveries(receiver, report, account, now), 0
    while chunk := list(islice(unsaved, _CHUNK)):
        PushDelivery.objects.using(conf.DATABASE).bulk_create(chunk)
        count += len(chunk)
        crash.reached("push:lines-planned")
    PushedReport.objects.using(conf.DATABASE).create(receiver_id=receiver.name, report=report, lines=count)
    return count


def _delivery(receiver: Receiver, report: Report, row: Row, account: str, now: datetime) -> PushDelivery | None:
    customer, event = rendered(receiver, row, account)
    if not event:
        return None
    return PushDelivery(
        receiver_id=receiver.name,
        report=report,
        line_id=row.line_id,
        customer=customer,
        meter=row.meter,
        overage=row.overage_quantity,
        event=event if customer else "",
        happened_at=moment(last_second(row) * SECOND),
        state=State.WAITING if customer else State.SKIPPED,
        together=receiver.service.max_events,  # maximum number of events in the next request with this delivery
        due_at=now,
    )


@dataclass(frozen=True, slots=True)
class ClaimedDeliveries:
    """Deliveries that this process has claimed."""

    token: UUID
    #: The moment of the claim, by the database's clock. (A monotonic clock could stop while the machine sleeps.)
    claimed_at: datetime
    rows: Sequence[PushDelivery]
    #: Primary keys of the deliveries that the receiver certainly did not accept before this claim.
    surely_new: frozenset[int]


def send(
    receiver: Receiver,
    now: datetime | None = None,
    *,
    max_seconds: float | None = None,
    progress: Progress | None = None,
) -> Counter[str]:
    """Send deliveries until none is due, a failure pauses the receiver, or `max_seconds` have passed.

    Return how many deliveries changed to each state. `now` is the time of the database's clock by default: the age of a
    delivery must not depend on the clock of a worker. `progress` counts the deliveries that changed.
    """
    started, last_give_up = monotonic(), float("-inf")
    changed: Counter[str] = Counter()
    total = waiting(receiver, now or now_of(conf.DATABASE)).count() if progress is not None else None
    count = (progress or Progress()).counter(f"deliveries to {receiver.name}", total)
    while max_seconds is None or monotonic() - started < max_seconds:
        if monotonic() - last_give_up > _GIVE_UP_INTERVAL:
            last_give_up = monotonic()
            given_up = give_up(receiver, now or now_of(conf.DATABASE))
            changed.update(given_up)
            count(given_up.total())
        claimed = _claim(receiver, now or now_of(conf.DATABASE))
        if claimed is None:
            break
        crash.reached("push:claimed")
        try:
            outcome = _exchange(receiver, claimed)
        except PushFailed as failure:
            _pause(receiver, claimed, failure, now or now_of(conf.DATABASE))
            break
        crash.reached("push:answered")
        recorded = _record(receiver, claimed, outcome, now or now_of(conf.DATABASE))
        changed.update(recorded)
        count(recorded.total())
        crash.reached("push:marked")
    return changed


def waiting(receiver: Receiver, now: datetime) -> QuerySet[PushDelivery]:
    """Return the deliveries that are due now and that no other process has claimed."""
    rows = PushDelivery.objects.using(conf.DATABASE)
    return rows.filter(receiver=receiver.name, state=State.WAITING, due_at__lte=now)


def resume(receiver: Receiver, now: datetime) -> None:
    """End the pauses of a receiver and of its deliveries, for a person who has corrected the cause of the failure."""
    with transaction.atomic(using=conf.DATABASE, durable=True):
        PushReceiver.lock(conf.DATABASE, receiver.name)
        PushReceiver.objects.using(conf.DATABASE).filter(name=receiver.name).update(failures=0, paused_until=None)
        rows = PushDelivery.objects.using(conf.DATABASE).filter(receiver=receiver.name, state=State.WAITING)
        rows.filter(claim=None, due_at__gt=now).update(due_at=now)


def give_up(receiver: Receiver, now: datetime) -> Counter[str]:
    """Mark the deliveries that must not be sent any more; return how many deliveries changed to each state.

    There are two reasons: the receiver would refuse an event because of its age, or perhaps the receiver would not
    recognise a repeated event.
    """
    changed: Counter[str] = Counter()
    label, max_age, retried_for = receiver.service.label, receiver.service.max_age, receiver.retried_for
    with transaction.atomic(using=conf.DATABASE, durable=True):
        PushReceiver.lock(conf.DATABASE, receiver.name)
        rows = waiting(receiver, now)
        if retried_for is not None:
            not_recognised = f"perhaps {label} no longer recognises the event"
            note = f"an answer was lost, and {not_recognised}: check if {label} has the event"
            unsent = PushDelivery.objects.using(conf.DATABASE).filter(receiver=receiver.name, state=State.WAITING)
            long_lost = Q(due_at__lte=now, unsure_since__lte=now - retried_for)
            lost = unsent.filter(long_lost | Q(unsure_since__gt=now + AHEAD))
            changed[State.UNSURE] += lost.update(state=State.UNSURE, note=note)
        if max_age is not None:
            rows = rows.filter(happened_at__lt=now - max_age)
            too_old = f"{label} accepts no event that is older than {max_age.days} days"
            note = f"an answer was lost, and {too_old}: check if {label} has the event"
            changed[State.UNSURE] += rows.exclude(unsure_since=None).update(state=State.UNSURE, note=note)
            note = f"{too_old}: bill the line in another way"
            changed[State.EXPIRED] += rows.update(state=State.EXPIRED, note=note)
    return +changed  # `+` leaves out states with 0 deliveries.


def _claim(receiver: Receiver, now: datetime) -> ClaimedDeliveries | None:
    """Claim deliveries for the next request and return them; None if nothing is due or the receiver is paused."""
    token, claimed_at, limit = uuid4(), now_of(conf.DATABASE), receiver.service.max_events
    with transaction.atomic(using=conf.DATABASE, durable=True):
        state = PushReceiver.lock(conf.DATABASE, receiver.name)
        if state.paused_until is not None and state.paused_until > now:
            return None
        due = waiting(receiver, now)
        # Deliveries whose answer was lost come first, while the receiver still recognises their events.
        rows = list(due.exclude(unsure_since=None).order_by("unsure_since", "pk")[:limit])
        rows = rows or list(due.filter(unsure_since=None).order_by("pk")[:limit])
        if not rows:
            return None
        # The first row's `together` limits this request. Rows that allow fewer events wait for another request.
        size = rows[0].together
        rows = [row for row in rows if row.together >= size][:size]
        PushDelivery.objects.using(conf.DATABASE).filter(pk__in=[row.pk for row in rows]).update(
            claim=token,
            due_at=now + CLAIM,
            attempts=F("attempts") + 1,
            # Write this before the request, because the process can die during the request.
            unsure_since=Coalesce("unsure_since", Value(now, UTCDateTimeField())),
        )
    return ClaimedDeliveries(token, claimed_at, rows, frozenset(row.pk for row in rows if row.unsure_since is None))


def _exchange(receiver: Receiver, claimed: ClaimedDeliveries) -> PushOutcome:
    """Send the claimed deliveries in one request and return the outcome.

    Raise NoneAccepted or OutcomeUnknown if the request fails.
    """
    content, fields = receiver.service.request([row.event for row in claimed.rows], receiver.key)
    try:
        connection = Connection(receiver.url, conf.PUSH_TIMEOUT)
    except (OSError, ValueError) as error:
        raise NoneAccepted(f"{type(error).__name__}: {error}", suspect=False) from error
    try:
        with connection:
            crash.reached("push:connected")
            # If this process was stopped for a long time, perhaps its claim has ended and another process has sent the
            # events. If the receiver has already forgotten these events, the receiver would accept them a second time.
            # So send nothing in the second half of the claim, because the request must end before the claim ends.
            if not timedelta() <= now_of(conf.DATABASE) - claimed.claimed_at < CLAIM / 2:
                raise NoneAccepted("connecting took too long", suspect=False)
            answer = connection.post(content, fields)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise OutcomeUnknown(f"{type(error).__name__}: {error}") from error
    return receiver.service.outcome(answer, [row.line_id for row in claimed.rows])


def _record(receiver: Receiver, claimed: ClaimedDeliveries, outcome: PushOutcome, now: datetime) -> Counter[str]:
    """Write the outcome of a request to its deliveries.

    Return how many deliveries changed to each state.
    """
    changed: Counter[str] = Counter()
    pks = {row.line_id: row.pk for row in claimed.rows}
    rows = PushDelivery.objects.using(conf.DATABASE).filter(receiver=receiver.name, state=State.WAITING)
    with transaction.atomic(using=conf.DATABASE, durable=True):
        PushReceiver.lock(conf.DATABASE, receiver.name)
        _mark_as_answering(receiver, now)
        crash.reached("push:receiver-written")
        for note, line_ids in _by_note(outcome.accepted):
            # An accepted event stays accepted, even if another process has claimed its delivery meanwhile.
            accepted = rows.filter(pk__in=[pks[line_id] for line_id in line_ids])
            changed[State.ACCEPTED] += accepted.update(
                state=State.ACCEPTED, settled_at=now, note=note, claim=None, unsure_since=None
            )
        claimed_rows = rows.filter(claim=claimed.token)
        for note, line_ids in _by_note(outcome.refused):
            refused = claimed_rows.filter(pk__in=[pks[line_id] for line_id in line_ids])
            # An event whose earlier answer was lost was perhaps accepted at that time. Only events without a lost
            # answer are certainly refused.
            surely_refused = claimed.surely_new & {pks[line_id] for line_id in line_ids}
            changed[State.REFUSED] += refused.filter(pk__in=surely_refused).update(
                state=State.REFUSED, note=note[:MAX_NOTE], claim=None, unsure_since=None
            )
            unsure = f"an answer was lost, then the event was refused: {note}"[:MAX_NOTE]
            changed[State.UNSURE] += refused.update(state=State.UNSURE, note=unsure, claim=None)
        # If the receiver did not say which events were wrong, send the events again in smaller requests.
        names_events = bool(outcome.accepted or outcome.refused)
        together = None if names_events else max(len(claimed.rows) // 2, 1)
        _release(claimed_rows, claimed.surely_new, now, outcome.reason, together)
        crash.reached("push:outcome-written")
    return +changed  # `+` leaves out states with 0 deliveries.


def _by_note(notes: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    """Return each note with the identities of its events."""
    pairs = sorted((note, line_id) for line_id, note in notes.items())
    return [(note, [line_id for _note, line_id in group]) for note, group in groupby(pairs, key=lambda pair: pair[0])]


def _mark_as_answering(receiver: Receiver, now: datetime) -> None:
    """Store that the receiver has answered, and end its pause."""
    PushReceiver.objects.using(conf.DATABASE).filter(name=receiver.name).update(
        failures=0, paused_until=None, error="", answered_at=now
    )


def _release(
    rows: QuerySet[PushDelivery], not_accepted: Collection[int], due: datetime, note: str, together: int | None
) -> None:
    """End the claim of deliveries, so that they are sent again at `due`.

    `together` is the new maximum number of events in one request; None keeps the old maximum. `not_accepted` has the
    primary keys of the deliveries that the receiver certainly did not accept.
    """
    values: dict[str, object] = {"claim": None, "due_at": due, "note": note[:MAX_NOTE]}
    if together is not None:
        values["together"] = together
    rows.filter(pk__in=not_accepted).update(**values, unsure_since=None)
    rows.update(**values)


def _pause(receiver: Receiver, claimed: ClaimedDeliveries, failure: PushFailed, now: datetime) -> None:
    """Pause the receiver after a failure, and end the claim of the claimed deliveries."""
    reason = str(failure)
    rows = PushDelivery.objects.using(conf.DATABASE).filter(claim=claimed.token, state=State.WAITING)
    with transaction.atomic(using=conf.DATABASE, durable=True):
        state = PushReceiver.lock(conf.DATABASE, receiver.name)
        state.failures += 1
        pause = min(FIRST_PAUSE * 2 ** min(state.failures - 1, _MAX_DOUBLINGS), MAX_PAUSE)
        if failure.after is not None:
            pause = max(timedelta(seconds=failure.after), timedelta(seconds=1))
        state.paused_until, state.error = now + pause, reason[:MAX_ERROR]
        state.save(using=conf.DATABASE)
        due, together = now, None
        if failure.suspect:
            # Perhaps one of the events caused the failure. Send all of them later and in smaller requests, so that this
            # event delays fewer other events.
            attempts = max(row.attempts for row in claimed.rows) + 1
            due += max(min(FIRST_PAUSE * 2 ** min(attempts, _MAX_DOUBLINGS), 2 * MAX_PAUSE), pause)
            together = max(len(claimed.rows) // 2, 1)
        not_accepted = claimed.surely_new if isinstance(failure, NoneAccepted) else frozenset()
        _release(rows, not_accepted, due, reason, together)
    crash.reached("push:held")
    _send_logger.warning("Pushing to %s pauses until %s: %s", receiver.name, state.paused_until, reason)
