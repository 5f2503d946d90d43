"""Resolving a quarantined batch: a person either discards it, or accepts its usage that the ledger does not have.

While a batch waits for this decision, its shard's watermark does not advance. So a period that perhaps needs the batch
is not closed. Once all batches of the shard are resolved, the watermark advances again. The decision and the person's
name are stored with the batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from django.db import transaction
from django.db.models import Q

from ratelimits import moments
from ratelimits.salts import new_salt
from ratelimits.usage.ledger.apply import insert
from ratelimits.usage.ledger.packet import (
    CUM_MODULUS,
    Packet,
    Unreadable,
    canonical,
    content_digest,
    header_of,
    packet,
    values,
)
from ratelimits.usage.models.ledger import COUNTERS, SUBJECT, ArchivedRange, Batch, QuarantinedBatch, ShardState

#: The value of `Batch.fence` for a batch that a person has accepted.
FENCE = "person"


class UnresolvableError(ValueError):
    """Raised if a batch cannot be resolved as requested; the message says why."""


def discard(using: str, pk: int, who: str) -> str:
    """Resolve a batch without a change to the ledger. Return the text of the decision, which is stored.

    Raise UnresolvableError if the batch was resolved before.
    """
    return _resolve(using, pk, lambda quarantined, state: f"discarded by {who}")


def accept(using: str, pk: int, who: str) -> str:
    """Add the usage that the ledger does not have, as a new batch. Return the text of the decision, which is stored.

    Usage that the ledger already has is not added again. Raise UnresolvableError if the batch was resolved before, if
    it cannot be read, or if nobody can know which usage the ledger does not have.
    """

    def add(quarantined: QuarantinedBatch, state: ShardState) -> str:
        lines = missing_lines(using, quarantined)
        if lines:
            insert(using, state, _packet(quarantined, state, lines), FENCE)
        return f"accepted by {who}: {len(lines)} lines, {_sum_of_counters(lines)} requests and units"

    return _resolve(using, pk, add)


def _resolve(using: str, pk: int, decide: Callable[[QuarantinedBatch, ShardState], str]) -> str:
    """Store the decision that `decide` returns. If no other batch of the shard waits, unfreeze the shard."""
    shard = QuarantinedBatch.objects.using(using).values_list("shard", flat=True).get(pk=pk)
    with transaction.atomic(using=using, durable=True):
        state = ShardState.lock(using, shard)
        assert state is not None
        quarantined = QuarantinedBatch.objects.using(using).get(pk=pk)
        if quarantined.resolved_at is not None:
            raise UnresolvableError(f"this batch was resolved already: {quarantined.resolution}")
        quarantined.resolution, quarantined.resolved_at = decide(quarantined, state)[:300], moments.now()
        quarantined.save(using=using, update_fields=["resolution", "resolved_at"])
        state.frozen = QuarantinedBatch.objects.using(using).filter(shard=shard, resolved_at=None).exists()
        state.save(using=using)
    return quarantined.resolution


def missing_lines(using: str, quarantined: QuarantinedBatch) -> list[bytes]:
    """Return canonical lines with the part of a quarantined batch's usage that is not in the ledger."""
    incarnation, seq, quarantined_lines = _identity_and_lines(quarantined)
    in_ledger: dict[tuple[str, ...], list[int]] = {}
    for batch in _batches_in_ledger(using, quarantined, incarnation, seq):
        for row in batch.lines().values_list(*SUBJECT, *COUNTERS):
            subject, counts = tuple(map(str, row[: len(SUBJECT)])), row[len(SUBJECT) :]
            total = in_ledger.get(subject, [0] * len(COUNTERS))
            in_ledger[subject] = [count + more for count, more in zip(total, counts, strict=True)]
    lines = []
    for line in quarantined_lines:
        row = values(line)
        subject, counts = tuple(row[: len(SUBJECT)]), map(int, row[len(SUBJECT) :])
        total = in_ledger.get(subject, [0] * len(COUNTERS))
        missing = [max(count - known, 0) for count, known in zip(counts, total, strict=True)]
        if any(missing):
            lines.append(canonical([*subject, *missing]))
    return sorted(lines)


def _identity_and_lines(quarantined: QuarantinedBatch) -> tuple[str, int, list[bytes]]:
    """Return the incarnation, the number and the canonical lines of a quarantined batch.

    Raise UnresolvableError if the batch cannot be read. A newer version of the app can perhaps read a batch that an
    older version quarantined as unreadable.
    """
    if isinstance(quarantined.fields, list):
        incarnation, _colon, number = quarantined.name.rpartition(":")
        return incarnation, int(number), [text.encode() for text in quarantined.fields]
    try:
        fields = [(name.encode(), value.encode()) for name, value in quarantined.fields.items()]
        batch = packet(quarantined.shard, fields)
    except Unreadable as error:
        raise UnresolvableError(
            f"this batch cannot be read ({error}): discard it, and make an adjustment from its fields"
        ) from error
    return batch.incarnation, batch.seq, list(batch.lines)


def _batches_in_ledger(using: str, quarantined: QuarantinedBatch, incarnation: str, seq: int) -> list[Batch]:
    """Return the ledger's batches with the identity of a quarantined batch.

    At most one of these batches was drained. Each other batch was made when a person accepted another quarantined batch
    with this identity. Raise UnresolvableError if one of these batches was archived, or joined with other batches.
    """
    rows = Batch.objects.using(using).filter(shard=quarantined.shard)
    drained = rows.filter(incarnation=incarnation, first_seq__lte=seq, seq__gte=seq)
    # A "~" in the name means: a second batch with the same incarnation and number (see lua/batch.lua).
    name = f"{incarnation}:{seq}"
    has_identity = Q(name=name) | Q(name__startswith=f"{name}~")
    same_identity = QuarantinedBatch.objects.using(using).filter(has_identity, shard=quarantined.shard)
    accepted = [_incarnation(pk) for pk in same_identity.exclude(pk=quarantined.pk).values_list("pk", flat=True)]
    archived = ArchivedRange.objects.using(using).filter(shard=quarantined.shard)
    drained_then_archived = archived.filter(incarnation=incarnation, first_seq__lte=seq, last_seq__gte=seq)
    accepted_then_archived = archived.filter(incarnation__in=accepted)
    archive = (drained_then_archived | accepted_then_archived).values_list("archive", flat=True).first()
    if archive is not None:
        raise UnresolvableError(
            f"the ledger's batch with this identity is in the archive {archive}: restore the archive first, or discard"
            " the quarantined batch"
        )
    batches = [*drained, *rows.filter(incarnation__in=accepted)]
    if any(batch.parts for batch in batches):
        raise UnresolvableError(
            "the ledger's batch with this identity was joined with other batches, so nobody can know what is missing:"
            " discard the quarantined batch, and make an adjustment if it had usage"
        )
    return batches


def _incarnation(pk: int) -> str:
    """Return the incarnation of the new batch that is made when the quarantined batch `pk` is accepted."""
    return f"quarantine-{pk}"


def _sum_of_counters(lines: list[bytes]) -> int:
    return sum(int(count) for line in lines for count in values(line)[len(SUBJECT) :])


def _packet(quarantined: QuarantinedBatch, state: ShardState, lines: list[bytes]) -> Packet:
    """Return a new batch for the accepted lines.

    Its `opened_at` and `sealed_at` are the watermark, or the present moment if the shard has no watermark. A later
    moment would wrongly show that the ledger has usage from after the watermark.
    """
    moment = state.watermark or time.time_ns() // 1000
    without_digest = Packet(
        shard=quarantined.shard,
        incarnation=_incarnation(quarantined.pk),
        seq=1,
        previous_cum=0,
        previous_requests=0,
        cum=_sum_of_counters(lines) % CUM_MODULUS,
        opened_at=moment,
        sealed_at=moment,
        run=state.run,
        sealed_run=state.run,
        follows=quarantined.name[:100],
        lines=tuple(lines),
        salt=new_salt(),
        content="",
    )
    return replace(without_digest, content=content_digest(header_of(without_digest), lines))
