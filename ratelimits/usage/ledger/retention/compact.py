"""Compaction: join the batches of an hour into one batch, with one line for each key, meter, rule and bin.

The joined batch has the content digests of all original batches. So every link of the shard's chain of digests can
still be verified, and an original batch that comes again is still recognised. A report contains usage up to a position
in the chain. No batch up to this position is joined with a later batch. So every report can still be calculated again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from operator import or_

from django.db import transaction
from django.db.models import Q

from ratelimits.conf import conf
from ratelimits.progress import Progress
from ratelimits.usage.ledger import crash
from ratelimits.usage.ledger.apply import write_lines
from ratelimits.usage.ledger.packet import canonical, content_digest, header_of
from ratelimits.usage.models.ledger import COUNTERS, SUBJECT, Batch, ChainMark, Line, ShardState
from ratelimits.usage.models.sums import MAX_TOTAL, ExactSum
from ratelimits.usage.signatures import sign

#: An hour in µs. Batches are joined if they were sealed in the same hour, by the server's clock.
SPAN = 3_600_000_000
#: The lines of this number of batches are added up in one query.
_BATCHES_PER_QUERY = 32
#: Maximum number of batches that are joined in one transaction.
_MAX_BATCHES = 4096


@dataclass(frozen=True, slots=True)
class CompactResult:
    """The result of joining batches of one shard into one batch."""

    shard: int
    #: How many batches were joined.
    batches: int
    #: How many lines these batches had.
    lines_before: int
    #: How many lines the joined batch has.
    lines: int


def compact(progress: Progress | None = None) -> Iterator[CompactResult]:
    """Join the batches of every hour that ended at least an hour before the shard's watermark.

    Yield a result for each joined batch. An hour that has only one batch is not changed. `progress` shows how many
    shards are done.
    """
    using = conf.DATABASE
    shards = list(ShardState.objects.using(using).order_by("shard").values_list("shard", "watermark"))
    for shard, watermark in (progress or Progress()).counted("shards", shards, len(shards)):
        end = (watermark - SPAN) // SPAN * SPAN
        for first, last in list(_joinable(using, shard, end)):
            if (compacted := _join(using, shard, first, last)) is not None:
                yield compacted


def _joinable(using: str, shard: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the first and the last position of each sequence of batches that can be joined."""
    tallied = ShardState.objects.using(using).get(shard=shard).tallied
    report_ends = set(ChainMark.objects.using(using).filter(shard=shard).values_list("position", flat=True))
    rows = Batch.objects.using(using).filter(shard=shard, position__lte=tallied, sealed_at__lt=end)
    numbers = ("first_position", "position", "first_seq", "seq", "previous_cum", "cum", "sealed_at")
    columns = (*numbers, "incarnation", "fence")
    batches = rows.order_by("position").values_list(*columns, named=True)
    # The first and the last position of the present sequence (0 before the first batch), and how many batches it has.
    first, last, length = 0, 0, 1
    for batch, following in pairwise(batches.iterator(chunk_size=1000)):
        first = first or batch.first_position
        last = batch.position
        can_join = (
            batch.incarnation == following.incarnation
            and batch.seq + 1 == following.first_seq
            and batch.cum == following.previous_cum
            and batch.sealed_at // SPAN == following.sealed_at // SPAN
            and batch.fence == following.fence
            and batch.position not in report_ends
            and length < _MAX_BATCHES
        )
        if can_join:
            length, last = length + 1, following.position
        else:
            if length > 1:
                yield first, last
            first, length = following.first_position, 1
    if length > 1:
        yield first, last


def _join(using: str, shard: int, first: int, last: int) -> CompactResult | None:
    """Join the batches at the positions `first` to `last`.

    Return None if another process has joined them, or if their counters together are too large for one line.
    """
    with transaction.atomic(using=using, durable=True):
        ShardState.lock(using, shard)
        crash.reached("compact:locked")
        rows = Batch.objects.using(using).filter(shard=shard, first_position__gte=first, position__lte=last)
        batches = list(rows.order_by("position"))
        if len(batches) < 2 or batches[0].first_position != first or batches[-1].position != last:
            return None
        lines = _summed_lines(using, batches)
        if lines is None:
            return None
        lines_before = sum(batch.lines().order_by()._raw_delete(using) for batch in batches)
        rows._raw_delete(using)
        crash.reached("compact:deleted")
        joined = _joined_batch(batches, lines)
        joined.save(using=using, force_insert=True)
        write_lines(using, joined, lines)
        crash.reached("compact:written")
    crash.reached("compact:committed")
    return CompactResult(shard, len(batches), lines_before, len(lines))


def _summed_lines(using: str, batches: Sequence[Batch]) -> list[bytes] | None:
    """Return the canonical lines of all these batches. Lines with the same subject are added up.

    Return None if a sum does not fit in the column of a line. Then the batches stay as they are.
    """
    totals: dict[tuple[str | int, ...], list[int]] = {}
    for start in range(0, len(batches), _BATCHES_PER_QUERY):
        ranges = (batch.line_ids() for batch in batches[start : start + _BATCHES_PER_QUERY])
        condition = reduce(or_, (Q(pk__gte=first, pk__lt=end) for first, end in ranges))
        sums = Line.objects.using(using).filter(condition).values_list(*SUBJECT).order_by()
        for row in sums.annotate(*(ExactSum(name) for name in COUNTERS)).iterator(chunk_size=2000):
            subject, counts = row[: len(SUBJECT)], row[len(SUBJECT) :]
            total = totals.get(subject)
            totals[subject] = list(counts) if total is None else [a + b for a, b in zip(total, counts, strict=True)]
    if any(count > MAX_TOTAL for counts in totals.values() for count in counts):
        return None
    return sorted(canonical([*subject, *counts]) for subject, counts in totals.items())


def _joined_batch(batches: Sequence[Batch], lines: Sequence[bytes]) -> Batch:
    """Return the batch that replaces these batches: it begins as the first of them, and ends as the last of them."""
    first, last = batches[0], batches[-1]
    joined = Batch(
        shard=first.shard,
        incarnation=last.incarnation,
        seq=last.seq,
        position=last.position,
        previous_cum=first.previous_cum,
        cum=last.cum,
        previous_requests=first.previous_requests,
        previous_digest=first.previous_digest,
        digest=last.digest,
        opened_at=first.opened_at,
        sealed_at=last.sealed_at,
        run=first.run,
        sealed_run=last.sealed_run,
        follows=first.follows,
        fence=first.fence,
        line_count=len(lines),
        first_seq=first.first_seq,
        first_position=first.first_position,
        parts=b"".join(bytes(batch.parts) or bytes.fromhex(batch.content) for batch in batches),
        part_salts=b"".join(bytes(batch.part_salts) or bytes.fromhex(batch.salt) for batch in batches),
    )
    joined.content = content_digest(header_of(joined), lines)
    joined.signature = sign(signed_text(joined))
    return joined


def signed_text(batch: Batch) -> str:
    """Return the text that is signed for a joined batch.

    Only the signature protects the joined lines: the chain of digests was made from the original lines.
    """
    return "\n".join((batch.content, batch.digest, bytes(batch.parts).hex(), bytes(batch.part_salts).hex()))


def mark_ends(using: str, chains: Iterable[Mapping[str, int]]) -> None:
    """Write a mark for each position up to which a report contains usage."""
    ends = {(int(shard), position) for chain in chains for shard, position in chain.items()}
    marks = [ChainMark(shard=shard, position=position) for shard, position in sorted(ends)]
    ChainMark.objects.using(using).bulk_create(marks, batch_size=1000, ignore_conflicts=True)
