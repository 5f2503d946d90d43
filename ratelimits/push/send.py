"""Sending: a process claims deliveries for some minutes, sends them, and stores the receiver's answer.

If the process dies in between, the claim ends and the deliveries are sent again, with the same text and identity. This
is safe as long as the receiver recognises a repetition. Later, only the receiver knows whether it has the events, so a
person must look there and settle the deliveries.
"""

from __future__ import annotations

import http.client
import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import groupby
from time import monotonic, time
from uuid import UUID, uuid4

from django.db import transaction
from django.db.models import F, QuerySet, Value
from django.db.models.functions import Coalesce
from django.utils import timezone

from ratelimits.conf import conf
from ratelimits.models import PushDelivery, PushReceiver
from ratelimits.posting import Connection
from ratelimits.push.receivers import Receiver
from ratelimits.push.service import NoneAccepted, OutcomeUnknown, PushFailed, PushOutcome
from ratelimits.usage import crash

logger = logging.getLogger(__name__)

#: How long a process may keep deliveries for itself. A request takes less time.
CLAIM = timedelta(minutes=5)
#: Pause after the first failure of a receiver, and the longest pause. Each pause is twice as long as the previous one.
FIRST_PAUSE, MAX_PAUSE = timedelta(seconds=30), timedelta(hours=1)

#: Seconds between two calls of `give_up` in a long run; much less than receivers.MARGIN.
_GIVE_UP_INTERVAL = 300

State = PushDelivery.State


@dataclass(frozen=True, slots=True)
class Claimed:
    """Deliveries that this process has claimed."""

    token: UUID
    #: When they were claimed, in seconds since 1970 UTC. This clock also runs while the machine sleeps.
    at: float
    rows: Sequence[PushDelivery]
    #: Primary keys of the deliveries that were never sent before.
    never_sent: frozenset[int]


def send(receiver: Receiver, now: datetime | None = None, *, max_seconds: float | None = None) -> Counter[str]:
    """Send deliveries until none is due, the receiver fails and is paused, or `max_seconds` are over.

    Return how many deliveries changed to each state.
    """
    begin, last_give_up = monotonic(), float("-inf")
    changed: Counter[str] = Counter()
    while max_seconds is None or monotonic() - begin < max_seconds:
        if monotonic() - last_give_up > _GIVE_UP_INTERVAL:
            last_give_up = monotonic()
            changed.update(give_up(receiver, now or timezone.now()))
        claimed = _claim(receiver, now or timezone.now())
        if claimed is None:
            break
        crash.reached("push:claimed")
        try:
            outcome = _exchange(receiver, claimed)
        except PushFailed as failure:
            _pause(receiver, claimed, failure, now or timezone.now())
            break
        crash.reached("push:answered")
        changed.update(_record(receiver, claimed, outcome, now or timezone.now()))
        crash.reached("push:marked")
    return changed


def waiting(receiver: Receiver, now: datetime) -> QuerySet[PushDelivery]:
    """Return the deliveries that are due now and that no other process has claimed."""
    rows = PushDelivery.objects.using(conf.DATABASE)
    return rows.filter(receiver=receiver.name, state=State.WAITING, due_at__lte=now)


def resume(receiver: Receiver, now: datetime) -> None:
    """End the pauses of a receiver and of its deliveries. A person calls this after correcting the cause."""
    with transaction.atomic(using=conf.DATABASE, durable=True):
        PushReceiver.lock(conf.DATABASE, receiver.name)
        PushReceiver.objects.using(conf.DATABASE).filter(name=receiver.name).update(failures=0, paused_until=None)
        rows = PushDelivery.objects.using(conf.DATABASE).filter(receiver=receiver.name, state=State.WAITING)
        rows.filter(claim=None, due_at__gt=now).update(due_at=now)


def give_up(receiver: Receiver, now: datetime) -> Counter[str]:
    """Mark the deliveries that must not be sent any more, because the receiver would not accept or recognise them.

    Return how many deliveries changed to each state.
    """
    changed: Counter[str] = Counter()
    label, oldest, retried_for = receiver.service.label, receiver.service.oldest, receiver.retried_for
    with transaction.atomic(using=conf.DATABASE, durable=True):
        PushReceiver.lock(conf.DATABASE, receiver.name)
        rows = waiting(receiver, now)
        if retried_for is not None:
            note = f"an answer was lost, and {label} may not recognise the event any more: look there whether it has it"
            lost = rows.filter(unsure_since__lte=now - retried_for)
            changed[State.UNSURE] += lost.update(state=State.UNSURE, note=note)
        if oldest is not None:
            rows = rows.filter(happened_at__lt=now - oldest)
            note = f"an answer was lost, and {label} accepts no event that is older than {oldest.days} days: look there"
            changed[State.UNSURE] += rows.exclude(unsure_since=None).update(state=State.UNSURE, note=note)
            note = f"{label} accepts no event that is older than {oldest.days} days: bill it in another way"
            changed[State.EXPIRED] += rows.update(state=State.EXPIRED, note=note)
    return +changed


def _claim(receiver: Receiver, now: datetime) -> Claimed | None:
    """Claim the deliveries of the next request; None if nothing is due or the receiver is paused."""
    token, at, limit = uuid4(), time(), receiver.service.max_events
    with transaction.atomic(using=conf.DATABASE, durable=True):
        state = PushReceiver.lock(conf.DATABASE, receiver.name)
        if state.paused_until is not None and state.paused_until > now:
            return None
        due = waiting(receiver, now)
        # Send deliveries whose answer was lost first, while the receiver still recognises them.
        rows = list(due.exclude(unsure_since=None).order_by("unsure_since", "pk")[:limit])
        rows = rows or list(due.filter(unsure_since=None).order_by("pk")[:limit])
        if not rows:
            return None
        size = rows[0].together
        rows = [row for row in rows if row.together >= size][:size]
        PushDelivery.objects.using(conf.DATABASE).filter(pk__in=[row.pk for row in rows]).update(
            claim=token,
            due_at=now + CLAIM,
            attempts=F("attempts") + 1,
            # Write this before the request: a process that dies while sending can write nothing afterwards.
            unsure_since=Coalesce("unsure_since", Value(now)),
        )
    return Claimed(token, at, rows, frozenset(row.pk for row in rows if row.unsure_since is None))


def _exchange(receiver: Receiver, claimed: Claimed) -> PushOutcome:
    """Send the claimed deliveries in one request and return the outcome.

    Raises NoneAccepted or OutcomeUnknown if the request fails.
    """
    content, fields = receiver.service.request([row.event for row in claimed.rows], receiver.key)
    try:
        connection = Connection(receiver.url, conf.PUSH_TIMEOUT)
    except (OSError, ValueError) as error:
        raise NoneAccepted(f"{type(error).__name__}: {error}", suspect=False) from error
    try:
        with connection:
            crash.reached("push:connected")
            # If this process was paused for long, the claim may have ended, and another process may have sent the
            # events. The receiver may no longer recognise them as a repetition.
            if not 0 <= time() - claimed.at < CLAIM.total_seconds() / 2:
                raise NoneAccepted("connecting took too long", suspect=False)
            answer = connection.post(content, fields)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise OutcomeUnknown(f"{type(error).__name__}: {error}") from error
    return receiver.service.outcome(answer, [row.line_id for row in claimed.rows])


def _record(receiver: Receiver, claimed: Claimed, outcome: PushOutcome, now: datetime) -> Counter[str]:
    """Write the outcome of a request to the delivery ledger.

    Return how many deliveries changed to each state.
    """
    changed: Counter[str] = Counter()
    keys = {row.line_id: row.pk for row in claimed.rows}
    rows = PushDelivery.objects.using(conf.DATABASE).filter(receiver=receiver.name, state=State.WAITING)
    with transaction.atomic(using=conf.DATABASE, durable=True):
        PushReceiver.lock(conf.DATABASE, receiver.name)
        _answered(receiver, now)
        crash.reached("push:receiver-written")
        for note, names in _by_note(outcome.accepted):
            # An accepted event stays accepted, even if another process has claimed its delivery meanwhile.
            accepted = rows.filter(pk__in=[keys[name] for name in names])
            changed[State.ACCEPTED] += accepted.update(
                state=State.ACCEPTED, settled_at=now, note=note, claim=None, unsure_since=None
            )
        claimed_rows = rows.filter(claim=claimed.token)
        for note, names in _by_note(outcome.refused):
            refused = claimed_rows.filter(pk__in=[keys[name] for name in names])
            # If an event was sent before, the earlier request may have been accepted, although this one is refused.
            first_sent = claimed.never_sent & {keys[name] for name in names}
            changed[State.REFUSED] += refused.filter(pk__in=first_sent).update(
                state=State.REFUSED, note=note[:400], claim=None, unsure_since=None
            )
            unsure = f"an answer was lost, then the event was refused: {note}"[:400]
            changed[State.UNSURE] += refused.update(state=State.UNSURE, note=unsure, claim=None)
        names_events = bool(outcome.accepted or outcome.refused)
        together = None if names_events else max(len(claimed.rows) // 2, 1)
        _release(claimed_rows, claimed.never_sent, now, outcome.reason, together)
        crash.reached("push:outcome-written")
    return +changed


def _by_note(named: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    """Return each note with the identities of its events."""
    pairs = sorted((note, name) for name, note in named.items())
    return [(note, [name for _note, name in group]) for note, group in groupby(pairs, key=lambda pair: pair[0])]


def _answered(receiver: Receiver, now: datetime) -> None:
    PushReceiver.objects.using(conf.DATABASE).filter(name=receiver.name).update(
        failures=0, paused_until=None, error="", answered_at=now
    )


def _release(
    rows: QuerySet[PushDelivery], never_sent: Collection[int], due: datetime, note: str, together: int | None
) -> None:
    """End the claim of deliveries that were not accepted, so that they are sent again at `due`.

    `together` is the maximum number of events in their next request; None changes nothing. `never_sent` are the primary
    keys of the rows that certainly did not reach the receiver.
    """
    values: dict[str, object] = {"claim": None, "due_at": due, "note": note[:400]}
    if together is not None:
        values["together"] = together
    rows.filter(pk__in=never_sent).update(**values, unsure_since=None)
    rows.update(**values)


def _pause(receiver: Receiver, claimed: Claimed, failure: PushFailed, now: datetime) -> None:
    """Pause the receiver after a failure, and release its deliveries."""
    reason = str(failure)
    rows = PushDelivery.objects.using(conf.DATABASE).filter(claim=claimed.token, state=State.WAITING)
    with transaction.atomic(using=conf.DATABASE, durable=True):
        state = PushReceiver.lock(conf.DATABASE, receiver.name)
        state.failures += 1
        pause = min(FIRST_PAUSE * 2 ** min(state.failures - 1, 20), MAX_PAUSE)
        if failure.after is not None:
            pause = max(timedelta(seconds=failure.after), timedelta(seconds=1))
        state.paused_until, state.error = now + pause, reason[:300]
        state.save(using=conf.DATABASE)
        due, together = now, None
        if failure.suspect:
            # An event may cause the failure. Send these events later and in smaller requests, so that it delays fewer
            # others.
            attempts = max(row.attempts for row in claimed.rows) + 1
            due += max(min(FIRST_PAUSE * 2 ** min(attempts, 20), 2 * MAX_PAUSE), pause)
            together = max(len(claimed.rows) // 2, 1)
        never_sent = claimed.never_sent if isinstance(failure, NoneAccepted) else frozenset()
        _release(rows, never_sent, due, reason, together)
    crash.reached("push:held")
    logger.warning("Pushing to %s pauses until %s: %s", receiver.name, state.paused_until, reason)
