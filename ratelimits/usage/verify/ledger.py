"""Verifying the ledger: every line, every sum and every link of the digest chains, streamed in bounded memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator
from functools import reduce

from django.db.models import Exists, F, OuterRef, Q

from ratelimits import signatures
from ratelimits.conf import conf
from ratelimits.models.ledger import (
    COUNTERS,
    LINES_PER_BATCH,
    SUBJECT,
    ArchivedRange,
    Batch,
    DurabilityGap,
    GapKind,
    Line,
    ShardState,
)
from ratelimits.usage.packet import CUM_MODULUS, canonical, chained, checksum, content_digester, header_of
from ratelimits.usage.retention.compact import signed_text
from ratelimits.usage.verify.heads import verify_heads

_CHUNK = 2000
#: How often a shard is read anew, where batches of it were joined or archived meanwhile.
_TRIES = 50


def verify_ledger(
    using: str, shards: list[int] | None = None, *, archive: bool = False, checked: Counter[str] | None = None
) -> Generator[str]:
    """Yield a sentence for each thing that does not hold; nothing if all holds.

    Cursors are open between findings: whoever stops before the end closes it. `archive` says that the database is that
    of an archive, whose chains may begin anywhere. `checked` is given the number of what was checked, by its kind.
    """
    checked = Counter() if checked is None else checked
    batched = _shards_of(Batch, using)
    known = batched if archive else batched | _shards_of(ShardState, using) | _shards_of(ArchivedRange, using)
    wanted = sorted(known if shards is None else known & set(shards))
    for shard in wanted:
        if shard in batched:
            yield from _verify_shard(using, shard, archive, checked)
    if not archive:
        checked["shards"] += len(wanted)
        yield from verify_heads(using, wanted)
    yield from _verify_strays(using)


def _shards_of(model: type[Batch | ShardState | ArchivedRange], using: str) -> set[int]:
    """Return the shards that a table has rows of."""
    return set(model.objects.using(using).order_by().values_list("shard", flat=True).distinct())


def _verify_strays(using: str) -> Iterator[str]:
    """Name the lines that no batch has, and those of another batch than the one that they are counted to."""
    own = Batch.objects.filter(pk=OuterRef("batch_id"))
    astray = ~Q(batch_id=F("id") / LINES_PER_BATCH) | ~Exists(own)
    rows = Line.objects.using(using).filter(astray).order_by("pk")
    for pk, batch, account, key, meter in rows.values_list("pk", "batch_id", "account", "key", "meter").iterator(
        _CHUNK
    ):
        yield (
            f"line {pk} ({account} {key} {meter}) is written under the batch with the row {pk // LINES_PER_BATCH},"
            f" and counted to that with the row {batch}: a line's batch must exist, and be the same"
        )


class _Replaced(Exception):
    """A batch was joined with others, or archived, while it was looked at."""


def _verify_shard(using: str, shard: int, archive: bool, checked: Counter[str]) -> Iterator[str]:
    told: set[str] = set()
    for left in range(_TRIES, 0, -1):
        counted: Counter[str] = Counter()
        try:
            for finding in _verify_batches(using, shard, archive, counted):
                if finding not in told:
                    told.add(finding)
                    yield finding
        except _Replaced:
            if left > 1:
                continue
            yield f"shard {shard:02d} cannot be verified: batches were gone each of the {_TRIES} times that it was read"
        checked.update(counted)
        return


def _verify_batches(using: str, shard: int, archive: bool, counted: Counter[str]) -> Iterator[str]:
    batches = Batch.objects.using(using).filter(shard=shard).order_by("position")
    before: Batch | None = None
    #: By incarnation the number and the running sum of its newest batch: one that comes late stands behind newer ones.
    newest: dict[str, tuple[int, int]] = {}
    for batch in batches.iterator(chunk_size=100):
        found = [*_verify_lines(batch), *_verify_parts(batch), *_verify_digest(batch)]
        if before is not None:
            found += _verify_link(before, batch)
        elif not archive:
            found += _verify_start(using, batch)
        found += _verify_numbers(batch, newest)
        if found and not Batch.objects.using(using).filter(pk=batch.pk).exists():
            raise _Replaced
        counted.update({"batches": 1, "ledger lines": batch.line_count, "links of the chains": len(batch.contents())})
        yield from found
        before = batch


def _verify_lines(batch: Batch) -> Iterator[str]:
    digest, total, count = content_digester(header_of(batch)), 0, 0
    for pk, stored, *row in batch.lines().values_list("pk", "checksum", *SUBJECT, *COUNTERS).iterator(_CHUNK):
        line = canonical(row)
        count += 1
        total += sum(row[len(SUBJECT) :])
        digest.update(b"\n" + line)
        if checksum(line) != stored:
            yield f"line {pk} of batch {batch} ({row[0]} {row[1]} {row[2]}) was changed after it was written"
    if count != batch.line_count:
        yield f"batch {batch} was written with {batch.line_count} lines and has {count}"
    if digest.hexdigest() != batch.content:
        yield f"the lines of batch {batch} are not those that its digest was made of"
    if batch.parts and (wrong := signatures.wrong(signed_text(batch), batch.signature)):
        yield f"compacted batch {batch}: {wrong}"
    if (batch.previous_cum + total) % CUM_MODULUS != batch.cum:
        yield f"the lines of batch {batch} add {total} to the running sum {batch.previous_cum}, not up to {batch.cum}"


def _verify_parts(batch: Batch) -> Iterator[str]:
    """Compare the numbers of its incarnation and of its shard with how many batches it is."""
    count = len(batch.contents())
    if batch.position - batch.first_position + 1 != count or batch.seq - batch.first_seq + 1 != count:
        yield (
            f"batch {batch} is made of {count}, but has the numbers {batch.first_seq} to {batch.seq}"
            f" and the positions {batch.first_position} to {batch.position}"
        )
    if batch.signature and not batch.parts:
        yield f"batch {batch} is not a compacted one, and has a signature"


def _verify_digest(batch: Batch) -> Iterator[str]:
    if reduce(chained, batch.contents(), batch.previous_digest) != batch.digest:
        yield f"the digest of batch {batch} is not that of its content and the batch before"


def _verify_link(before: Batch, batch: Batch) -> Iterator[str]:
    if batch.first_position != before.position + 1:
        first, last = before.position + 1, batch.first_position - 1
        yield f"positions {first} to {last}, between batches {before} and {batch}, are gone"
    if batch.previous_digest != before.digest:
        yield f"batch {batch} does not follow on the digest of batch {before}"


def _verify_numbers(batch: Batch, newest: dict[str, tuple[int, int]]) -> Iterator[str]:
    """Compare a batch's number and running sum with those of the newest of its incarnation, and note them there."""
    seq, cum = newest.get(batch.incarnation, (batch.first_seq - 1, batch.previous_cum))
    gaps = DurabilityGap.objects.using(conf.DATABASE).filter(shard=batch.shard)
    if batch.first_seq > seq + 1:
        missing = gaps.filter(kind=GapKind.MISSING, incarnation=batch.incarnation, last_seq=batch.first_seq - 1)
        if not missing.exists():
            yield f"batches {seq + 1} to {batch.first_seq - 1} before {batch} are missing, and no gap says so"
    elif batch.first_seq == seq + 1 and batch.previous_cum != cum:
        name = f"{GapKind.SUM}:{batch.shard}:{batch.incarnation}:{batch.first_seq}"
        if not gaps.filter(event=name).exists():
            yield f"the running sum was {cum} before batch {batch}, which goes on from {batch.previous_cum}"
    if batch.seq > seq:
        newest[batch.incarnation] = batch.seq, batch.cum


def _verify_start(using: str, batch: Batch) -> Iterator[str]:
    archived = ArchivedRange.objects.using(using).filter(shard=batch.shard).order_by("-last_position").first()
    position, digest = (archived.last_position, archived.digest) if archived is not None else (0, "")
    if batch.first_position != position + 1:
        yield f"the chain of shard {batch.shard:02d} begins at position {batch.first_position}, not at {position + 1}"
    if batch.previous_digest != digest:
        yield f"batch {batch} does not follow on the digest where the archive ends"
