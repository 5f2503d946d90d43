"""Sending: deliveries are claimed for a while, sent, and marked with what the receiver answered.

Who dies in between leaves them claimed. When the claim has run out they are sent again, the same text under the same
identity, for as long as the receiver recognises it. After that nobody here can know, and a person settles them.
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
from ratelimits.push.service import Held, NotTaken, PushOutcome, Unclear
from ratelimits.usage import crash

logger = logging.getLogger(__name__)

#: For this long a delivery is its claimer's: longer than a request may take.
CLAIM = timedelta(minutes=5)
#: The pause after the first failure of a receiver; each further one in a row is twice as long, up to the longest.
FIRST_PAUSE, LONGEST_PAUSE = timedelta(seconds=30), timedelta(hours=1)

#: Seconds after which a long run looks again for what is to be given up; less than receivers.MARGIN by far.
_SWEEP = 300

State = PushDelivery.State


@dataclass(frozen=True, slots=True)
class Claimed:
    """Deliveries that are this process's for a while, and which of them were never sent before."""

    token: UUID
    #: When, in seconds since 1970 UTC, also while the machine sleeps.
    at: float
    rows: Sequence[PushDelivery]
    fresh: frozenset[int]


def send(receiver: Receiver, now: datetime | None = None, *, longest: float | None = None) -> Counter[str]:
    """Send what is due until nothing is, the receiver must be left alone, or `longest` seconds are over.

    Return how many deliveries changed to which state.
    """
    begin, swept = monotonic(), float("-inf")
    done: Counter[str] = Counter()
    while longest is None or monotonic() - begin < longest:
        if monotonic() - swept > _SWEEP:
            swept = monotonic()
            done.update(give_up(receiver, now or timezone.now()))
        claimed = _claim(receiver, now or timezone.now())
        if claimed is None:
            break
        crash.reached("push:claimed")
        try:
            outcome = _exchange(receiver, claimed)
        except Held as held:
            _hold(receiver, claimed, held, now or timezone.now())
            break
        crash.reached("push:answered")
        done.update(_mark(receiver, claimed, outcome, now or timezone.now()))
        crash.reached("push:marked")
    return done


def waiting(receiver: Receiver, now: datetime) -> QuerySet[PushDelivery]:
    """Return the deliveries that are due now and nobody else's."""
    rows = PushDelivery.objects.using(conf.DATABASE)
    return rows.filter(receiver=receiver.name, state=State.WAITING, due_at__lte=now)


def resume(receiver: Receiver, now: datetime) -> None:
    """End the pauses of a receiver and of what is to be sent to it: a person has mended what was wrong."""
    with transaction.atomic(using=conf.DATABASE, durable=True):
        PushReceiver.lock(conf.DATABASE, receiver.name)
        PushReceiver.objects.using(conf.DATABASE).filter(name=receiver.name).update(failures=0, paused_until=None)
        rows = PushDelivery.objects.using(conf.DATABASE).filter(receiver=receiver.name, state=State.WAITING)
        rows.filter(claim=None, due_at__gt=now).update(due_at=now)


def give_up(receiver: Receiver, now: datetime) -> Counter[str]:
    """Say of deliveries that the receiver would not take, or not recognise, any more, that they are."""
    done: Counter[str] = Counter()
    label, oldest, kept = receiver.service.label, receiver.service.oldest, receiver.retried_for
    with transaction.atomic(using=conf.DATABASE, durable=True):
        PushReceiver.lock(conf.DATABASE, receiver.name)
        rows = waiting(receiver, now)
        if kept is not None:
            note = f"an answer was lost, and {label} may not recognise the event any more: look there whether it has it"
            lost = rows.filter(unsure_since__lte=now - kept)
            done[State.UNSURE] += lost.update(state=State.UNSURE, note=note)
        if oldest is not None:
            rows = rows.filter(happened_at__lt=now - oldest)
            note = f"an answer was lost, and {label} takes no event that is older than {oldest.days} days: look there"
            done[State.UNSURE] += rows.exclude(unsure_since=None).update(state=State.UNSURE, note=note)
            note = f"{label} takes no event that is older than {oldest.days} days: bill it in another way"
            done[State.EXPIRED] += rows.update(state=State.EXPIRED, note=note)
    return +done


def _claim(receiver: Receiver, now: datetime) -> Claimed | None:
    """Claim the next deliveries that go together; None if nothing is due, or the receiver is left alone."""
    token, at, most = uuid4(), time(), receiver.service.together
    with transaction.atomic(using=conf.DATABASE, durable=True):
        state = PushReceiver.lock(conf.DATABASE, receiver.name)
        if state.paused_until is not None and state.paused_until > now:
            return None
        due = waiting(receiver, now)
        # Lost answers first, while the receiver still recognises what it was sent.
        rows = list(due.exclude(unsure_since=None).order_by("unsure_since", "pk")[:most])
        rows = rows or list(due.filter(unsure_since=None).order_by("pk")[:most])
        if not rows:
            return None
        size = rows[0].together
        rows = [row for row in rows if row.together >= size][:size]
        PushDelivery.objects.using(conf.DATABASE).filter(pk__in=[row.pk for row in rows]).update(
            claim=token,
            due_at=now + CLAIM,
            attempts=F("attempts") + 1,
            # Before it is sent: who dies while sending can write nothing any more.
            unsure_since=Coalesce("unsure_since", Value(now)),
        )
    return Claimed(token, at, rows, frozenset(row.pk for row in rows if row.unsure_since is None))


def _exchange(receiver: Receiver, claimed: Claimed) -> PushOutcome:
    """Send, and return what became of it. Raises NotTaken and Unclear."""
    content, fields = receiver.service.request([row.event for row in claimed.rows], receiver.key)
    try:
        connection = Connection(receiver.url, conf.PUSH_TIMEOUT)
    except (OSError, ValueError) as error:
        raise NotTaken(f"{type(error).__name__}: {error}", suspect=False) from error
    try:
        with connection:
            crash.reached("push:connected")
            # Who slept meanwhile could send what others have sent again since, and the receiver has forgotten.
            if not 0 <= time() - claimed.at < CLAIM.total_seconds() / 2:
                raise NotTaken("connecting took too long", suspect=False)
            answer = connection.post(content, fields)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Unclear(f"{type(error).__name__}: {error}") from error
    return receiver.service.outcome(answer, [row.line_id for row in claimed.rows])


def _mark(receiver: Receiver, claimed: Claimed, outcome: PushOutcome, now: datetime) -> Counter[str]:
    """Write down what the receiver said."""
    done: Counter[str] = Counter()
    keys = {row.line_id: row.pk for row in claimed.rows}
    rows = PushDelivery.objects.using(conf.DATABASE).filter(receiver=receiver.name, state=State.WAITING)
    with transaction.atomic(using=conf.DATABASE, durable=True):
        PushReceiver.lock(conf.DATABASE, receiver.name)
        _answered(receiver, now)
        crash.reached("push:receiver-written")
        for note, names in _by_note(outcome.accepted):
            # Whoever else has claimed it meanwhile: what was taken stays taken.
            taken = rows.filter(pk__in=[keys[name] for name in names])
            done[State.ACCEPTED] += taken.update(
                state=State.ACCEPTED, settled_at=now, note=note, claim=None, unsure_since=None
            )
        mine = rows.filter(claim=claimed.token)
        for note, names in _by_note(outcome.refused):
            refused = mine.filter(pk__in=[keys[name] for name in names])
            # Of a first request a refusal is the whole truth; an earlier one may have been taken.
            first = claimed.fresh & {keys[name] for name in names}
            done[State.REFUSED] += refused.filter(pk__in=first).update(
                state=State.REFUSED, note=note[:400], claim=None, unsure_since=None
            )
            unsure = f"an answer was lost, then it was refused: {note}"[:400]
            done[State.UNSURE] += refused.update(state=State.UNSURE, note=unsure, claim=None)
        named = bool(outcome.accepted or outcome.refused)
        _release(mine, claimed.fresh, now, outcome.reason, None if named else max(len(claimed.rows) // 2, 1))
        crash.reached("push:outcome-written")
    return +done


def _by_note(named: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    """Return each note with the identities that have it."""
    pairs = sorted((note, name) for name, note in named.items())
    return [(note, [name for _note, name in group]) for note, group in groupby(pairs, key=lambda pair: pair[0])]


def _answered(receiver: Receiver, now: datetime) -> None:
    PushReceiver.objects.using(conf.DATABASE).filter(name=receiver.name).update(
        failures=0, paused_until=None, error="", answered_at=now
    )


def _release(
    mine: QuerySet[PushDelivery], fresh: Collection[int], due: datetime, note: str, together: int | None
) -> None:
    """Give back what was claimed and not taken; `together`: what is to be sent in one request next time."""
    values: dict[str, object] = {"claim": None, "due_at": due, "note": note[:400]}
    if together is not None:
        values["together"] = together
    mine.filter(pk__in=fresh).update(**values, unsure_since=None)
    mine.update(**values)


def _hold(receiver: Receiver, claimed: Claimed, held: Held, now: datetime) -> None:
    """Leave the receiver alone for a while, and its deliveries waiting."""
    reason = str(held)
    mine = PushDelivery.objects.using(conf.DATABASE).filter(claim=claimed.token, state=State.WAITING)
    with transaction.atomic(using=conf.DATABASE, durable=True):
        state = PushReceiver.lock(conf.DATABASE, receiver.name)
        state.failures += 1
        pause = min(FIRST_PAUSE * 2 ** min(state.failures - 1, 20), LONGEST_PAUSE)
        if held.after is not None:
            pause = max(timedelta(seconds=held.after), timedelta(seconds=1))
        state.paused_until, state.error = now + pause, reason[:300]
        state.save(using=conf.DATABASE)
        due, together = now, None
        if held.suspect:
            # Later than the others, and fewer together, so that one event that is the cause holds up no other.
            attempts = max(row.attempts for row in claimed.rows) + 1
            due += max(min(FIRST_PAUSE * 2 ** min(attempts, 20), 2 * LONGEST_PAUSE), pause)
            together = max(len(claimed.rows) // 2, 1)
        fresh = claimed.fresh if isinstance(held, NotTaken) else frozenset()
        _release(mine, fresh, due, reason, together)
    crash.reached("push:held")
    logger.warning("Pushing to %s pauses until %s: %s", receiver.name, state.paused_until, reason)
