"""Verifying the ledger: every line, every sum and every link of the digest chains, streamed in bounded memory."""

from __future__ import annotations

from collections.abc import Generator, Iterator

from ratelimits.conf import conf
from ratelimits.models.ledger import COUNTERS, SUBJECT, ArchivedRange, Batch, DurabilityGap, GapKind
from ratelimits.usage.compact import signature_of
from ratelimits.usage.packet import CUM_MODULUS, canonical, chained, checksum, content_digester, header_of

_CHUNK = 2000


def verify_ledger(using: str, shards: list[int] | None = None, *, archive: bool = False) -> Generator[str]:
    """What does not hold, one sentence for each finding; nothing if all holds.

    Cursors are open between findings: whoever stops before the end closes it.
    `archive`: the database is that of an archive, whose chains may begin anywhere.
    """
    rows = Batch.objects.using(using)
    known = list(rows.order_by("shard").values_list("shard", flat=True).distinct())
    for shard in known if shards is None else sorted(set(shards) & set(known)):
        yield from _verify_shard(using, shard, archive)


class _Replaced(Exception):
    """A batch was joined with others, or archived, while it was looked at."""


def _verify_shard(using: str, shard: int, archive: bool) -> Iterator[str]:
    told: set[str] = set()
    while True:
        try:
            for finding in _verify_batches(using, shard, archive):
                if finding not in told:
                    told.add(finding)
                    yield finding
        except _Replaced:
            continue
        return


def _verify_batches(using: str, shard: int, archive: bool) -> Iterator[str]:
    batches = Batch.objects.using(using).filter(shard=shard).order_by("position")
    before: Batch | None = None
    for batch in batches.iterator(chunk_size=100):
        found = list(_verify_lines(batch))
        if before is not None:
            found += _verify_link(before, batch)
        elif not archive:
            found += _verify_start(using, batch)
        if found and not Batch.objects.using(using).filter(pk=batch.pk).exists():
            raise _Replaced
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
    if batch.parts and conf.SIGNING_KEY and batch.signature != signature_of(batch):
        yield f"the signature of compacted batch {batch} is not the one of SIGNING_KEY"
    if (batch.previous_cum + total) % CUM_MODULUS != batch.cum:
        yield f"the lines of batch {batch} add {total} to the running sum {batch.previous_cum}, not up to {batch.cum}"


def link(batch: Batch) -> str:
    """The digest that a batch brings its shard's chain to."""
    digest, parts = batch.previous_digest, bytes(batch.parts)
    if not parts:
        return chained(digest, batch.content)
    for start in range(0, len(parts), 32):
        digest = chained(digest, parts[start : start + 32].hex())
    return digest


def _verify_link(before: Batch, batch: Batch) -> Iterator[str]:
    if batch.first_position != before.position + 1:
        first, last = before.position + 1, batch.first_position - 1
        yield f"positions {first} to {last}, between batches {before} and {batch}, are gone"
    if batch.previous_digest != before.digest:
        yield f"batch {batch} does not follow on the digest of batch {before}"
    if link(batch) != batch.digest:
        yield f"the digest of batch {batch} is not that of its content and the batch before"
    if batch.incarnation == before.incarnation and batch.first_seq > before.seq + 1:
        gap = DurabilityGap.objects.using(conf.DATABASE).filter(
            kind=GapKind.MISSING, shard=batch.shard, incarnation=batch.incarnation, last_seq=batch.first_seq - 1
        )
        if not gap.exists():
            yield f"batches {before.seq + 1} to {batch.first_seq - 1} before {batch} are missing, and no gap says so"


def _verify_start(using: str, batch: Batch) -> Iterator[str]:
    archived = ArchivedRange.objects.using(using).filter(shard=batch.shard).order_by("-last_position").first()
    position, digest = (archived.last_position, archived.digest) if archived is not None else (0, "")
    if batch.first_position != position + 1:
        yield f"the chain of shard {batch.shard:02d} begins at position {batch.first_position}, not at {position + 1}"
    if batch.previous_digest != digest:
        yield f"batch {batch} does not follow on the digest where the archive ends"
    if link(batch) != batch.digest:
        yield f"the digest of batch {batch} is not that of its content and the batch before"
