"""Verification of the ledger: every line, every sum and every link of the digest chains.

A large ledger needs no more memory for its verification than a small ledger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator
from functools import reduce

from django.db.models import Exists, F, OuterRef, Q

from ratelimits.conf import conf
from ratelimits.salts import SALT_BYTES
from ratelimits.usage import signatures
from ratelimits.usage.ledger.packet import CUM_MODULUS, canonical, chained, checksum, content_digester, header_of
from ratelimits.usage.ledger.retention.compact import signed_text
from ratelimits.usage.ledger.verify.states import verify_states
from ratelimits.usage.models import erased
from ratelimits.usage.models.gaps import DurabilityGap, GapKind
from ratelimits.usage.models.ledger import COUNTERS, LINES_PER_BATCH, SUBJECT, ArchivedRange, Batch, Line, ShardState

#: How many rows are read from the database at once.
_ROWS_PER_READ = 2000
#: Maximum number of times that a shard is read. It is read again if its batches were joined or archived meanwhile.
_MAX_TRIES = 50


def verify_ledger(
    using: str, shards: list[int] | None = None, *, archive: bool = False, checked: Counter[str] | None = None
) -> Generator[str]:
    """Yield a sentence for each error in the ledger.

    A caller that stops early must close this generator, because open database cursors belong to it. If `archive` is
    true, the database has only batches that were read from archive files. The files can start at any position of a
    chain. The numbers of checked rows are added to `checked`, by kind.
    """
    checked = Counter() if checked is None else checked
    existing = with_batches = _shards_of(Batch, using)
    if not archive:
        existing = with_batches | _shards_of(ShardState, using) | _shards_of(ArchivedRange, using)
    chosen = sorted(existing if shards is None else existing & set(shards))
    for shard in chosen:
        if shard in with_batches:
            yield from _verify_shard(using, shard, archive, checked)
    if not archive:
        checked["shards"] += len(chosen)
        yield from verify_states(using, chosen)
    yield from _verify_batches_of_lines(using)


def _shards_of(model: type[Batch | ShardState | ArchivedRange], using: str) -> set[int]:
    """Return the shards that have rows in a table."""
    return set(model.objects.using(using).order_by().values_list("shard", flat=True).distinct())


def _verify_batches_of_lines(using: str) -> Iterator[str]:
    """Yield an error for each line whose batch does not exist, or whose primary key belongs to another batch."""
    batch_of_line = Batch.objects.filter(pk=OuterRef("batch_id"))
    stray = ~Q(batch_id=F("id") / LINES_PER_BATCH) | ~Exists(batch_of_line)
    rows = Line.objects.using(using).filter(stray).order_by("pk")
    for pk, batch, account, key, meter in rows.values_list("pk", "batch_id", "account", "key", "meter").iterator(
        _ROWS_PER_READ
    ):
        name, batch_of_pk = f"line {pk} ({account} {key} {meter})", pk // LINES_PER_BATCH
        if batch_of_pk == batch:
            yield f"{name} belongs to batch row {batch}, which does not exist"
        else:
            yield f"{name} names batch row {batch}, but has the primary key of a line of batch row {batch_of_pk}"


class _BatchReplaced(Exception):
    """Raised if a batch was joined with other batches, or archived, during its verification."""


def _verify_shard(using: str, shard: int, archive: bool, checked: Counter[str]) -> Iterator[str]:
    """Yield each error in a shard once. If a batch was joined or archived meanwhile, read the shard again."""
    reported: set[str] = set()
    for tries_left in range(_MAX_TRIES, 0, -1):
        before = checked.copy()
        try:
            for finding in _verify_batches(using, shard, archive, checked):
                if finding not in reported:
                    reported.add(finding)
                    yield finding
        except _BatchReplaced:
            if tries_left > 1:
                # The caller shows the numbers of this Counter. So subtract what this try has added.
                checked.update({kind: before[kind] - checked[kind] for kind in checked})
                continue
            yield f"shard {shard:02d} cannot be verified: in each of {_MAX_TRIES} tries batches were deleted meanwhile"
        return


def _verify_batches(using: str, shard: int, archive: bool, checked: Counter[str]) -> Iterator[str]:
    batches = Batch.objects.using(using).filter(shard=shard).order_by("position")
    previous: Batch | None = None
    #: The highest batch number of each incarnation so far, and the running sum after the batch with this number. (If a
    #: batch came late, its number is lower than the number of the batch before it.)
    newest: dict[str, tuple[int, int]] = {}
    for batch in batches.iterator(chunk_size=100):
        findings = [*_verify_lines(batch), *_verify_parts(batch), *_verify_digest(batch)]
        if previous is not None:
            findings += _verify_link(previous, batch)
        elif not archive:
            findings += _verify_start(using, batch)
        findings += _verify_numbers(batch, newest)
        if findings and not Batch.objects.using(using).filter(pk=batch.pk).exists():
            raise _BatchReplaced
        checked.update({"batches": 1, "ledger lines": batch.line_count, "links of the chains": len(batch.contents())})
        yield from findings
        previous = batch


def _verify_lines(batch: Batch) -> Iterator[str]:
    digest, total, count = content_digester(header_of(batch)), 0, 0
    for pk, stored, *row in batch.lines().values_list("pk", "checksum", *SUBJECT, *COUNTERS).iterator(_ROWS_PER_READ):
        line = canonical(row)
        count += 1
        total += sum(row[len(SUBJECT) :])
        digest.update(b"\n" + line)
        if checksum(line) != stored:
            yield f"line {pk} of batch {batch} ({row[0]} {row[1]} {row[2]}) was changed after it was written"
    if count != batch.line_count:
        yield f"batch {batch} was written with {batch.line_count} lines, but has {count}"
    if not erased.is_of(conf.DATABASE, digest.hexdigest(), batch.content):
        yield f"the lines of batch {batch} do not match its digest"
    if batch.parts and (error := signatures.error_of(signed_text(batch), batch.signature)):
        yield f"compacted batch {batch}: {error}"
    if (batch.previous_cum + total) % CUM_MODULUS != batch.cum:
        yield (
            f"batch {batch} starts with the running sum {batch.previous_cum}, and its lines add {total}, but it ends"
            f" with the running sum {batch.cum}"
        )


def _verify_parts(batch: Batch) -> Iterator[str]:
    """Compare a batch's numbers and positions with the number of batches that were joined in it."""
    count = len(batch.contents())
    if batch.position - batch.first_position + 1 != count or batch.seq - batch.first_seq + 1 != count:
        yield (
            f"batch {batch} was joined from {count} batches, but has the numbers {batch.first_seq} to {batch.seq}"
            f" and the positions {batch.first_position} to {batch.position}"
        )
    if batch.signature and not batch.parts:
        yield f"batch {batch} is not compacted, but has a signature"
    salts = bytes(batch.part_salts)
    if (batch.parts and len(salts) != count * SALT_BYTES) or (not batch.parts and salts.strip(b"\0")):
        yield f"the salts of the parts of batch {batch} are not those of {count} batches"


def _verify_digest(batch: Batch) -> Iterator[str]:
    if reduce(chained, batch.contents(), batch.previous_digest) != batch.digest:
        yield f"the digest of batch {batch} does not match its content and the batch before"


def _verify_link(previous: Batch, batch: Batch) -> Iterator[str]:
    if batch.first_position != previous.position + 1:
        first, last = previous.position + 1, batch.first_position - 1
        yield f"positions {first} to {last}, between batches {previous} and {batch}, are missing"
    if batch.previous_digest != previous.digest:
        yield f"batch {batch} does not continue the digest of batch {previous}"


def _verify_numbers(batch: Batch, newest: dict[str, tuple[int, int]]) -> Iterator[str]:
    """Compare a batch's number and running sum with the newest batch of its incarnation, and update `newest`."""
    seq, cum = newest.get(batch.incarnation, (batch.first_seq - 1, batch.previous_cum))
    gaps = DurabilityGap.objects.using(conf.DATABASE).filter(shard=batch.shard)
    if batch.first_seq > seq + 1:
        missing = gaps.filter(kind=GapKind.MISSING, incarnation=batch.incarnation, last_seq=batch.first_seq - 1)
        if not missing.exists():
            yield f"batches {seq + 1} to {batch.first_seq - 1} before {batch} are missing, but no gap declares it"
    elif batch.first_seq == seq + 1 and batch.previous_cum != cum:
        name = f"{GapKind.SUM}:{batch.shard}:{batch.incarnation}:{batch.first_seq}"
        if not gaps.filter(event=name).exists():
            yield f"the running sum was {cum} before batch {batch}, but this batch starts at {batch.previous_cum}"
    if batch.seq > seq:
        newest[batch.incarnation] = batch.seq, batch.cum


def _verify_start(using: str, batch: Batch) -> Iterator[str]:
    """Yield an error if the first batch does not follow the archive. Without an archive, it must begin the chain."""
    archived = ArchivedRange.objects.using(using).filter(shard=batch.shard).order_by("-last_position").first()
    position, digest = (archived.last_position, archived.digest) if archived is not None else (0, "")
    if batch.first_position != position + 1:
        yield f"the chain of shard {batch.shard:02d} begins at position {batch.first_position}, not at {position + 1}"
    if batch.previous_digest != digest:
        if archived is not None:
            yield f"batch {batch} does not continue the digest at the end of the archive"
        else:
            yield f"batch {batch} begins the chain, but continues the digest of an earlier batch"
