"""Verifying where each shard stands: its state beside the newest batch, the quarantine, and the archives before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from itertools import groupby
from typing import Any

from django.db.models import Count, Max, Min, OuterRef, Q, Subquery

from ratelimits.models.ledger import ArchivedRange, Batch, DurabilityGap, GapKind, QuarantinedBatch, ShardState


def verify_heads(using: str, shards: Collection[int]) -> Iterator[str]:
    """Say what does not hold of the shards' states, one sentence for each finding; nothing if all holds."""
    newest = Batch.objects.filter(shard=OuterRef("shard")).order_by("-position")
    archived = ArchivedRange.objects.filter(shard=OuterRef("shard")).order_by("-last_position")
    # One statement, so that a drain that goes on meanwhile changes both or neither.
    states = (
        ShardState.objects.using(using)
        .filter(shard__in=shards)
        .annotate(
            batch_position=Subquery(newest.values("position")[:1]),
            batch_digest=Subquery(newest.values("digest")[:1]),
            archive_position=Subquery(archived.values("last_position")[:1]),
            archive_digest=Subquery(archived.values("digest")[:1]),
        )
        .in_bulk()
    )
    yield from _verify_archived(using, shards)
    frozen = _frozen(using)
    for shard in sorted(shards):
        name, state = f"shard {shard:02d}", states.get(shard)
        if state is None:
            yield f"{name} has batches, and no state that says where it stands"
            continue
        yield from _verify_position(name, state)
        # Looked at again: it may have come to quarantine, or have been resolved, since the state was read.
        if state.frozen != (shard in frozen) and _still_differs(using, state):
            yield (
                f"{name} is frozen, and no quarantined batch waits"
                if state.frozen
                else f"{name} has a quarantined batch that waits, and is not frozen"
            )
        yield from _verify_newest(using, state)


def _verify_position(name: str, state: Any) -> Iterator[str]:
    """Compare a state with the newest batch or archived range of its shard."""
    position = state.batch_position or state.archive_position or 0
    if state.position > position:
        yield f"{name} stands at position {state.position}: batches {position + 1} to {state.position} are gone"
    elif state.position < position:
        yield f"{name} stands at position {state.position}, and has a batch at position {position}"
    elif state.head != (state.batch_digest or state.archive_digest or ""):
        yield f"the head of {name} is not the digest of its newest batch"
    if state.tallied > state.position:
        yield f"{name} was added up to position {state.tallied}, and stands at {state.position}"


def _frozen(using: str, **about: int) -> set[int]:
    """Return the shards that have a quarantined batch that waits."""
    waiting = QuarantinedBatch.objects.using(using).filter(resolved_at=None, **about)
    return set(waiting.order_by().values_list("shard", flat=True))


def _still_differs(using: str, state: ShardState) -> bool:
    again = ShardState.objects.using(using).filter(pk=state.pk).first()
    return again is not None and again.frozen == state.frozen != bool(_frozen(using, shard=state.shard))


def _verify_newest(using: str, state: ShardState) -> Iterator[str]:
    """The newest identity that a state knows is that of a batch, or of one that is declared not to be in the ledger."""
    name, known = f"shard {state.shard:02d}", f"{state.incarnation}:{state.seq}"
    if not state.incarnation:
        if state.seq or state.cum:
            yield f"{name} knows no incarnation, but a batch {state.seq} and a running sum of {state.cum}"
        return
    mine: Q = Q(shard=state.shard, incarnation=state.incarnation)
    rows = Batch.objects.using(using).filter(mine)
    held = rows.filter(first_seq__lte=state.seq, seq__gte=state.seq).first()
    if held is None:
        missing = DurabilityGap.objects.using(using).filter(mine, kind=GapKind.MISSING)
        quarantined = QuarantinedBatch.objects.using(using).filter(shard=state.shard, name=known)
        archived = ArchivedRange.objects.using(using).filter(mine)
        if not (
            missing.filter(first_seq__lte=state.seq, last_seq__gte=state.seq).exists()
            or quarantined.exists()
            or archived.filter(first_seq__lte=state.seq, last_seq__gte=state.seq).exists()
        ):
            yield f"{name} says that its newest batch is {known}, which is nowhere"
        return
    if held.seq == state.seq and held.cum != state.cum:
        yield f"{name} has the running sum {state.cum} after batch {known}, which ends with {held.cum}"


def _verify_archived(using: str, shards: Collection[int]) -> Iterator[str]:
    """Say where what was archived of a shard is not one piece of its chain, from its beginning."""
    parts = ArchivedRange.objects.using(using).filter(shard__in=shards).order_by("shard", "first_position")
    for _shard, those in groupby(parts, key=lambda part: part.shard):
        position, digest = 0, ""
        for part in those:
            if part.first_position != position + 1 or part.last_position < part.first_position:
                yield f"archived range {part} does not follow on position {position}"
            if part.previous_digest != digest:
                yield f"archived range {part} does not follow on the digest of what was archived before"
            position, digest = part.last_position, part.digest


def verify_archives(using: str, archive: str, names: Collection[str], checked: Counter[str]) -> Iterator[str]:
    """Compare what the ledger says of archived batches with those in the database of the archives of these names.

    `checked` is given the number of archived ranges.
    """
    sums = {"first_position": Min("first_position"), "last_position": Max("position")}
    sums |= {"first_seq": Min("first_seq"), "last_seq": Max("seq"), "incarnations": Count("incarnation", distinct=True)}
    for part in ArchivedRange.objects.using(using).order_by("shard", "first_position"):
        within = {"position__gte": part.first_position, "position__lte": part.last_position}
        batches = Batch.objects.using(archive).filter(shard=part.shard, **within).order_by("position")
        first, last = batches.first(), batches.last()
        if first is None or last is None:
            if part.archive in names:
                yield f"archived range {part} is not in its archive"
            continue
        checked["archived ranges"] += 1
        found = {**batches.order_by().aggregate(**sums), "incarnation": first.incarnation}
        found |= {"previous_digest": first.previous_digest, "digest": last.digest}
        if found.pop("incarnations") > 1:
            yield f"archived range {part} has batches of several incarnations"
        for name, value in found.items():
            if getattr(part, name) != value:
                yield f"archived range {part} has {name} {getattr(part, name)}, its archive {value}"
