"""Verify shard states: compare each state with the shard's batches, quarantined batches and archived ranges.

A state is a row of `ShardState`: what the ledger knows about a shard. An archived range is a row about batches of one
incarnation that were moved to one archive file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from itertools import groupby
from typing import Any

from django.db.models import Count, Max, Min, OuterRef, Q, Subquery

from ratelimits.usage.ledger.watermark import TOLERANCE
from ratelimits.usage.models.gaps import DurabilityGap, GapKind
from ratelimits.usage.models.ledger import ArchivedRange, Batch, QuarantinedBatch, ShardState


def verify_states(using: str, shards: Collection[int]) -> Iterator[str]:
    """Yield a sentence for each error in the shards' states."""
    newest = Batch.objects.filter(shard=OuterRef("shard")).order_by("-position")
    archived = ArchivedRange.objects.filter(shard=OuterRef("shard")).order_by("-last_position")
    # One statement reads states and batches as they are at one moment, even while a drain changes both.
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
    unresolved_shards = _unresolved_shards(using)
    for shard in sorted(shards):
        name, state = f"shard {shard:02d}", states.get(shard)
        if state is None:
            yield f"{name} has batches, but no row of its state"
            continue
        yield from _verify_position(name, state)
        # Read the state again: perhaps a batch was quarantined or resolved meanwhile.
        if state.frozen != (shard in unresolved_shards) and _still_differs(using, state):
            yield (
                f"{name} is frozen, but has no unresolved quarantined batch"
                if state.frozen
                else f"{name} has an unresolved quarantined batch, but is not frozen"
            )
        yield from _verify_newest(using, state)
        if state.ahead and not _clock_was_ahead(using, state):
            yield f"{name} says that its server's clock is ahead, but no gap declares it"


def _verify_position(name: str, state: Any) -> Iterator[str]:
    """Compare a state with the newest batch or archived range of its shard."""
    position = state.batch_position or state.archive_position or 0
    if state.position > position:
        yield f"{name} is at position {state.position}: batches {position + 1} to {state.position} are missing"
    elif state.position < position:
        yield f"{name} is at position {state.position}, but has a batch at position {position}"
    elif state.head != (state.batch_digest or state.archive_digest or ""):
        yield f"the head of the digest chain of {name} is not the digest of its newest batch"
    if state.tallied > state.position:
        yield f"{name} was tallied up to position {state.tallied}, but is at {state.position}"


def _unresolved_shards(using: str, **filters: int) -> set[int]:
    """Return the shards that have an unresolved quarantined batch."""
    unresolved = QuarantinedBatch.objects.using(using).filter(resolved_at=None, **filters)
    return set(unresolved.order_by().values_list("shard", flat=True))


def _still_differs(using: str, state: ShardState) -> bool:
    read_again = ShardState.objects.using(using).filter(pk=state.pk).first()
    if read_again is None or read_again.frozen != state.frozen:
        return False
    return state.frozen != bool(_unresolved_shards(using, shard=state.shard))


def _clock_was_ahead(using: str, state: ShardState) -> bool:
    """Return whether a gap declares that the server's clock was ahead.

    The gap must end after the watermark, or at most TOLERANCE µs before the watermark.
    """
    gaps = DurabilityGap.objects.using(using).filter(kind=GapKind.CLOCK, shard=state.shard)
    return gaps.filter(until__gte=state.watermark - TOLERANCE).exists()


def _verify_newest(using: str, state: ShardState) -> Iterator[str]:
    """Yield an error if the newest batch of a state is unknown, or if its running sum is not that of the state.

    A batch is known if it is in the ledger, archived, quarantined or declared missing.
    """
    name, newest = f"shard {state.shard:02d}", f"{state.incarnation}:{state.seq}"
    if not state.incarnation:
        if state.seq or state.cum:
            yield f"{name} has no incarnation, but it has the batch number {state.seq} and the running sum {state.cum}"
        return
    numbering: Q = Q(shard=state.shard, incarnation=state.incarnation)
    rows = Batch.objects.using(using).filter(numbering)
    batch = rows.filter(first_seq__lte=state.seq, seq__gte=state.seq).first()
    if batch is None:
        missing = DurabilityGap.objects.using(using).filter(numbering, kind=GapKind.MISSING)
        quarantined = QuarantinedBatch.objects.using(using).filter(shard=state.shard, name=newest)
        archived = ArchivedRange.objects.using(using).filter(numbering)
        if not (
            missing.filter(first_seq__lte=state.seq, last_seq__gte=state.seq).exists()
            or quarantined.exists()
            or archived.filter(first_seq__lte=state.seq, last_seq__gte=state.seq).exists()
        ):
            yield f"{name} says that its newest batch is {newest}, which does not exist"
        return
    if batch.seq == state.seq and batch.cum != state.cum:
        yield f"{name} has the running sum {state.cum} after batch {newest}, but this batch ends with {batch.cum}"


def _verify_archived(using: str, shards: Collection[int]) -> Iterator[str]:
    """Yield an error for each archived range that does not continue the range before it.

    The first range must start at the beginning of the chain.
    """
    rows = ArchivedRange.objects.using(using).filter(shard__in=shards).order_by("shard", "first_position")
    for _shard, group in groupby(rows, key=lambda row: row.shard):
        position, digest = 0, ""
        for archived in group:
            if archived.first_position != position + 1 or archived.last_position < archived.first_position:
                yield f"archived range {archived} does not start at position {position + 1}, or ends before its start"
            if archived.previous_digest != digest:
                yield f"archived range {archived} does not continue the digest of the archived range before"
            position, digest = archived.last_position, archived.digest


def verify_archives(using: str, archive: str, names: Collection[str], checked: Counter[str]) -> Iterator[str]:
    """Compare the ledger's archived ranges with the batches in the archives.

    `archive` is the alias of a database into which archives were read, and `names` has the names of these archives.
    The number of compared ranges is added to `checked`.
    """
    aggregates = {"first_position": Min("first_position"), "last_position": Max("position")}
    aggregates |= {"first_seq": Min("first_seq"), "last_seq": Max("seq")}
    aggregates |= {"incarnations": Count("incarnation", distinct=True)}
    for archived in ArchivedRange.objects.using(using).order_by("shard", "first_position"):
        positions = {"position__gte": archived.first_position, "position__lte": archived.last_position}
        batches = Batch.objects.using(archive).filter(shard=archived.shard, **positions).order_by("position")
        first, last = batches.first(), batches.last()
        if first is None or last is None:
            if archived.archive in names:
                yield f"archived range {archived} is not in its archive"
            continue
        checked["archived ranges"] += 1
        expected = {**batches.order_by().aggregate(**aggregates), "incarnation": first.incarnation}
        expected |= {"previous_digest": first.previous_digest, "digest": last.digest}
        if expected.pop("incarnations") > 1:
            yield f"archived range {archived} has batches of several incarnations"
        for name, value in expected.items():
            if getattr(archived, name) != value:
                yield f"archived range {archived} has {name} {getattr(archived, name)}, but its archive has {value}"
