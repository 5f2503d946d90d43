"""Resolving a quarantine: a person says whether what the ledger lacks of a batch is usage, or nothing.

A shard's watermark stands still while a batch of it is in quarantine, so no period that may need it is closed. Both
ways of resolving it let the watermark go on; what was decided and by whom stays on the quarantined batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from django.db import transaction
from django.utils import timezone

from ratelimits.models.ledger import COUNTERS, SUBJECT, ArchivedRange, Batch, QuarantinedBatch, ShardState
from ratelimits.usage.apply import insert
from ratelimits.usage.packet import (
    CUM_MODULUS,
    Packet,
    Unreadable,
    canonical,
    content_digest,
    header_of,
    packet,
    values,
)

#: How such a batch is fenced: a person vouches for it.
FENCE = "person"


class UnresolvableError(ValueError):
    """What was asked for cannot be done; the message says why."""


def discard(using: str, pk: int, who: str) -> str:
    """Leave the ledger as it is; the resolution, as it is kept."""
    return _resolve(using, pk, lambda kept, state: f"discarded by {who}")


def accept(using: str, pk: int, who: str) -> str:
    """Add what the batch has and the ledger lacks, as a batch of its own; the resolution, as it is kept.

    Never more than that: what was counted in both is not counted twice. Raises UnresolvableError where nobody can say
    what the ledger lacks.
    """

    def add(kept: QuarantinedBatch, state: ShardState) -> str:
        lines = missing_lines(using, kept)
        if lines:
            insert(using, state, _packet(kept, state, lines), FENCE)
        return f"accepted by {who}: {len(lines)} lines, {_total(lines)} requests and units"

    return _resolve(using, pk, add)


def _resolve(using: str, pk: int, decide: Callable[[QuarantinedBatch, ShardState], str]) -> str:
    shard = QuarantinedBatch.objects.using(using).values_list("shard", flat=True).get(pk=pk)
    with transaction.atomic(using=using, durable=True):
        state = ShardState.lock(using, shard)
        assert state is not None
        kept = QuarantinedBatch.objects.using(using).get(pk=pk)
        if kept.resolved_at is not None:
            raise UnresolvableError(f"this batch was resolved already: {kept.resolution}")
        kept.resolution, kept.resolved_at = decide(kept, state)[:300], timezone.now()
        kept.save(using=using, update_fields=["resolution", "resolved_at"])
        state.frozen = QuarantinedBatch.objects.using(using).filter(shard=shard, resolved_at=None).exists()
        state.save(using=using)
    return kept.resolution


def missing_lines(using: str, kept: QuarantinedBatch) -> list[bytes]:
    """The canonical lines by which a quarantined batch exceeds what the ledger has of it."""
    found = _lines(kept)
    held: dict[tuple[str, ...], list[int]] = {}
    for batch in _held(using, kept):
        for row in batch.lines().values_list(*SUBJECT, *COUNTERS):
            subject, counts = tuple(map(str, row[: len(SUBJECT)])), row[len(SUBJECT) :]
            had = held.get(subject, [0] * len(COUNTERS))
            held[subject] = [one + other for one, other in zip(had, counts, strict=True)]
    lines = []
    for line in found:
        row = values(line)
        subject, counts = tuple(row[: len(SUBJECT)]), map(int, row[len(SUBJECT) :])
        had = held.get(subject, [0] * len(COUNTERS))
        more = [max(count - one, 0) for count, one in zip(counts, had, strict=True)]
        if any(more):
            lines.append(canonical([*subject, *more]))
    return sorted(lines)


def _lines(kept: QuarantinedBatch) -> list[bytes]:
    """Return the canonical lines of a quarantined batch. One that an older version could not read may be readable."""
    if isinstance(kept.fields, list):
        return [text.encode() for text in kept.fields]
    try:
        fields = [(name.encode(), value.encode()) for name, value in kept.fields.items()]
        return list(packet(kept.shard, fields).lines)
    except Unreadable as error:
        raise UnresolvableError(
            f"this batch cannot be read ({error}): discard it, and make an adjustment from its fields"
        ) from error


def _held(using: str, kept: QuarantinedBatch) -> list[Batch]:
    """The batches that the ledger has of this identity: the one that was drained, and what people accepted of it."""
    incarnation, _colon, number = kept.name.rpartition(":")
    rows = Batch.objects.using(using).filter(shard=kept.shard)
    drained = rows.filter(incarnation=incarnation, first_seq__lte=number, seq__gte=number)
    same = QuarantinedBatch.objects.using(using).filter(shard=kept.shard, name=kept.name).exclude(pk=kept.pk)
    accepted = [_incarnation(pk) for pk in same.values_list("pk", flat=True)]
    archived = ArchivedRange.objects.using(using).filter(shard=kept.shard)
    moved = archived.filter(incarnation=incarnation, first_seq__lte=number, last_seq__gte=number)
    for archive in (moved | archived.filter(incarnation__in=accepted)).values_list("archive", flat=True):
        raise UnresolvableError(
            f"what the ledger had of it is in the archive {archive}: restore that first, or discard"
        )
    held = [*drained, *rows.filter(incarnation__in=accepted)]
    if any(batch.parts for batch in held):
        raise UnresolvableError(
            "the ledger's batch was joined with others since, so nobody can say what is missing of it:"
            " discard this one, and make an adjustment if it held usage"
        )
    return held


def _incarnation(pk: int) -> str:
    return f"quarantine-{pk}"


def _total(lines: list[bytes]) -> int:
    return sum(int(count) for line in lines for count in values(line)[len(SUBJECT) :])


def _packet(kept: QuarantinedBatch, state: ShardState, lines: list[bytes]) -> Packet:
    """A batch of its own, that no server ever sealed. Its moment is the watermark: it declares no later one sound."""
    at = state.watermark or time.time_ns() // 1000
    read = Packet(
        shard=kept.shard,
        incarnation=_incarnation(kept.pk),
        seq=1,
        previous_cum=0,
        cum=_total(lines) % CUM_MODULUS,
        opened_at=at,
        sealed_at=at,
        run=state.run,
        sealed_run=state.run,
        follows=kept.name[:100],
        lines=tuple(lines),
        content="",
    )
    return replace(read, content=content_digest(header_of(read), lines))
