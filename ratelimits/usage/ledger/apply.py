"""Applying a batch: write the batch and its lines to the ledger exactly once.

The function `apply` does this in one transaction, under the lock of the shard's row. A shard is a part of the accounts.
The watermark of a shard is the moment before which all usage of the shard is in the ledger.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto
from itertools import count, islice
from operator import add
from typing import Any
from zlib import crc32

from django.db import connections, transaction

from ratelimits import moments
from ratelimits.usage.ledger import crash, gaps
from ratelimits.usage.ledger.packet import Packet, chained, content_digest, header_of, values
from ratelimits.usage.models.gaps import DurabilityGap, GapKind
from ratelimits.usage.models.ledger import (
    COUNTERS,
    LINES_PER_BATCH,
    SUBJECT,
    ArchivedRange,
    Batch,
    Line,
    QuarantinedBatch,
    ShardState,
)

#: The columns of a line, in the order in which they are written.
COLUMNS = ("id", "batch_id", *SUBJECT, *COUNTERS, "checksum")
#: How many lines one call of `executemany` writes, and how many lines COPY gets at once.
_LINES_PER_INSERT, _LINES_PER_COPY = 2000, 500
#: The first two columns of `SUBJECT`, account and key, are names.
_FIRST_WITHOUT_NAMES = SUBJECT.index("meter")


class BatchOutcome(Enum):
    """The result of applying a batch."""

    APPLIED = auto()  # The batch is in the ledger now.
    DONE_BEFORE = auto()  # The batch was written to the ledger, or quarantined, before. Nothing was done now.
    DISCARDED = auto()  # The ledger already has this batch, with more usage; a gap is declared.
    QUARANTINED = auto()  # The batch is stored for a person's decision, and the shard's watermark is frozen.
    LOST = auto()  # The batch was listed, but disappeared from Redis and was never applied; a gap is declared.
    BUSY = auto()  # Another process drains the shard.


def apply(
    using: str, packet: Packet, fence: str, *, wait: bool = True, live_runs: Mapping[str, gaps.LiveRun] | None = None
) -> BatchOutcome:
    """Write a fenced batch to the ledger and commit. Do nothing if the batch was applied before.

    `fence` is the server's fsync policy. If `wait` is false, do not wait for another process that has locked the shard:
    return BUSY. `live_runs` are the runs of the servers that answer now. (A run is the time from a start of a server
    until its restart.)
    """
    with transaction.atomic(using=using, durable=True):
        state = ShardState.lock(using, packet.shard, wait=wait)
        if state is None:
            return BatchOutcome.BUSY
        crash.reached("drain:locked")
        in_ledger, archived, quarantined = _find_earlier(using, packet)
        if in_ledger:
            outcome = _apply_again(using, state, packet, fence)
        elif archived:
            reason = "a batch with this number was archived: compare the two batches"
            outcome = quarantine(using, state, packet, reason)
        elif quarantined:
            reason = "a batch with this number was quarantined before: compare the two batches"
            outcome = quarantine(using, state, packet, reason)
        # A batch that a gap declares missing may come late: if `_was_missing` finds its gap, the batch is written.
        elif packet.incarnation == state.incarnation and packet.seq <= state.seq and not _was_missing(using, packet):
            outcome = quarantine(using, state, packet, "the ledger has later batches, but not this batch")
        else:
            if packet.incarnation != state.incarnation or packet.seq > state.seq:
                gaps.declare_gaps_before(using, state, packet, fence, live_runs)
                state.run = packet.sealed_run
            insert(using, state, packet, fence)
            _advance(state, packet)
            outcome = BatchOutcome.APPLIED
        state.save(using=using)
        crash.reached("drain:state-written")
    crash.reached("drain:committed")
    return outcome


def _advance(state: ShardState, packet: Packet) -> None:
    """Note this batch as the newest batch in the shard's state, if no later batch of its incarnation is noted there."""
    if packet.incarnation != state.incarnation or packet.seq > state.seq:
        state.incarnation, state.seq, state.cum = packet.incarnation, packet.seq, packet.cum


def _find_earlier(using: str, packet: Packet) -> tuple[bool, bool, bool]:
    """Return whether this batch is in the ledger, whether it was archived, and whether it was quarantined.

    The batch is recognised by its shard, its incarnation and its number.

    This is one statement instead of three queries of the ORM, because a drain executes it for each batch.
    """
    connection = connections[using]
    batch_table, archived_table, quarantined_table = (
        connection.ops.quote_name(model._meta.db_table) for model in (Batch, ArchivedRange, QuarantinedBatch)
    )
    identity = "shard = %s AND incarnation = %s AND first_seq <= %s"
    identity_values = (packet.shard, packet.incarnation, packet.seq)
    with connection.cursor() as cursor:
        cursor.execute(
            f"SELECT EXISTS (SELECT 1 FROM {batch_table} WHERE {identity} AND seq >= %s),"  # noqa: S608
            f" EXISTS (SELECT 1 FROM {archived_table} WHERE {identity} AND last_seq >= %s),"
            f" EXISTS (SELECT 1 FROM {quarantined_table} WHERE shard = %s AND name = %s)",
            [
                *(*identity_values, packet.seq),
                *(*identity_values, packet.seq),
                *(packet.shard, f"{packet.incarnation}:{packet.seq}"),
            ],
        )
        in_ledger, was_archived, was_quarantined = cursor.fetchone()
    return bool(in_ledger), bool(was_archived), bool(was_quarantined)


def _was_missing(using: str, packet: Packet) -> bool:
    """Return whether a gap declares this batch missing.

    If no other batch of the gap is missing, mark the gap as recovered.
    """
    numbering = {"shard": packet.shard, "incarnation": packet.incarnation}
    missing = DurabilityGap.objects.using(using).filter(
        kind=GapKind.MISSING, first_seq__lte=packet.seq, last_seq__gte=packet.seq, **numbering
    )
    spans: list[Any] = list(missing.values_list("pk", "first_seq", "last_seq"))
    for pk, first, last in spans:
        rows = Batch.objects.using(using).filter(seq__gte=first, first_seq__lte=last, **numbering)
        # How many batches of the gap are in the ledger. If batches were joined, one row stands for all of them.
        in_ledger = sum(min(last, seq) - max(first, start) + 1 for start, seq in rows.values_list("first_seq", "seq"))
        if in_ledger == last - first:  # only this batch is still missing
            gaps.change(using, missing.filter(pk=pk), recovered_at=moments.now())
    return bool(spans)


def _apply_again(using: str, state: ShardState, packet: Packet, fence: str) -> BatchOutcome:
    """Return the outcome for a packet that has the identity of a batch in the ledger.

    If the packet has the same contents as the ledger's batch, do nothing. If the packet has usage that the ledger's
    batch does not have, quarantine the packet. If the packet has no such usage, but lacks some of the ledger's usage,
    discard the packet and declare a gap.
    """
    rows = Batch.objects.using(using).filter(shard=packet.shard, incarnation=packet.incarnation)
    in_ledger = rows.filter(first_seq__lte=packet.seq, seq__gte=packet.seq).first()
    assert in_ledger is not None
    salt, is_joined = in_ledger.salt_of(packet.seq), in_ledger.first_seq != in_ledger.seq
    # The digest with the same salt. Without a salt, only counters can be compared: names were replaced meanwhile.
    content = content_digest(header_of(replace(packet, salt=salt)), packet.lines)
    if salt and content == in_ledger.contents()[packet.seq - in_ledger.first_seq]:
        return BatchOutcome.DONE_BEFORE
    if salt and is_joined:
        return quarantine(using, state, packet, "a batch that was compacted came again with different contents")
    first_column = 0 if salt else _FIRST_WITHOUT_NAMES
    ledger_rows = in_ledger.lines().values_list(*SUBJECT, *COUNTERS)
    ledger_counts = _sums(ledger_rows.iterator(_LINES_PER_INSERT), first_column)
    packet_counts = _sums(map(values, packet.lines), first_column)
    for subject, counts in packet_counts.items():
        known = ledger_counts.get(subject)
        if known is None or any(new > old for new, old in zip(counts, known, strict=True)):
            return quarantine(using, state, packet, "the batch came again with usage that the ledger does not have")
    if not salt and (is_joined or packet_counts == ledger_counts):
        return BatchOutcome.DONE_BEFORE
    gaps.declare(
        using,
        GapKind.FORK,
        f"{packet.shard}:{packet.incarnation}:{packet.seq}:{_digest_without_names(packet)}",
        shard=packet.shard,
        since=packet.opened_at,
        until=max(packet.sealed_at, in_ledger.sealed_at),
        fsync=fence,
        incarnation=packet.incarnation,
        first_seq=packet.seq,
        last_seq=packet.seq,
        detail=(
            "the server lost part of this batch after it was drained; the smaller batch that came again was discarded"
        ),
    )
    return BatchOutcome.DISCARDED


def _digest_without_names(packet: Packet) -> str:
    """Return a digest of a packet's counters that is the same each time that the packet comes."""
    sums = _sums(map(values, packet.lines), _FIRST_WITHOUT_NAMES)
    return hashlib.sha256(repr(sorted(sums.items())).encode()).hexdigest()


def _sums(rows: Iterable[Sequence[Any]], first_column: int) -> dict[tuple[str, ...], list[int]]:
    """Return the sums of the counters of lines, by the columns of `SUBJECT` from `first_column` on."""
    split, sums = len(SUBJECT), dict[tuple[str, ...], list[int]]()
    for row in rows:
        counts = sums.setdefault(tuple(map(str, row[first_column:split])), [0] * len(COUNTERS))
        counts[:] = map(add, counts, map(int, row[split:]))
    return sums


def quarantine(
    using: str, state: ShardState, packet: Packet | None, reason: str, *, name: str = "", fields: Any = None
) -> BatchOutcome:
    """Store the contents of a batch for a person's decision, and freeze the shard's watermark.

    If the batch could not be read, `packet` is None, and `name` and `fields` are those of the batch in Redis. The
    caller must hold the lock of the shard's row, and must save `state`.
    """
    if packet is None:
        digest = checksum_of(fields)
    else:
        name, digest = f"{packet.incarnation}:{packet.seq}", packet.content
        fields = [line.decode() for line in packet.lines]
    # Texts are cut to the lengths of their columns.
    rows = QuarantinedBatch.objects.using(using).filter(shard=state.shard, name=name[:200])
    # The digest has another salt each time, so the contents themselves are compared.
    quarantined = next((row for row in rows if row.content == digest or row.fields == fields), None)
    if quarantined is None:
        quarantined = rows.create(
            shard=state.shard, name=name[:200], content=digest, reason=reason[:300], fields=fields
        )
    # If a person has resolved a batch with the same contents before, it does not freeze the watermark again.
    state.frozen = state.frozen or quarantined.resolved_at is None
    if packet is not None:
        _advance(state, packet)
    return BatchOutcome.QUARANTINED


def checksum_of(fields: Any) -> str:
    """Return a digest of fields that cannot be read as a batch."""
    return f"{crc32(str(fields).encode()):08x}"


def insert(using: str, state: ShardState, packet: Packet, fence: str) -> None:
    """Write a batch and its lines at the end of its shard's chain.

    The caller must hold the lock of the shard's row, and must save `state`.
    """
    state.position += 1
    digest = chained(state.head, packet.content)
    batch = Batch(
        shard=packet.shard,
        incarnation=packet.incarnation,
        seq=packet.seq,
        position=state.position,
        previous_cum=packet.previous_cum,
        cum=packet.cum,
        previous_requests=packet.previous_requests,
        salt=packet.salt,
        content=packet.content,
        previous_digest=state.head,
        digest=digest,
        opened_at=packet.opened_at,
        sealed_at=packet.sealed_at,
        run=packet.run,
        sealed_run=packet.sealed_run,
        follows=packet.follows,
        fence=fence,
        line_count=len(packet.lines),
        first_seq=packet.seq,
        first_position=state.position,
    )
    batch.save(using=using, force_insert=True)
    crash.reached("drain:batch-written")
    write_lines(using, batch, packet.lines)
    crash.reached("drain:lines-written")
    state.head = digest


def copy_rows(first: int, batch_id: int, lines: Sequence[bytes]) -> Iterator[bytes]:
    """Return the rows of a batch's lines in the text format of COPY. `first` is the id of the first line."""
    # A row is: id, id of the batch, the canonical line, checksum. `map` needs half the time of a generator.
    row = b"%%d\t%d\t%%b\t%%d\n" % batch_id
    return map(row.__mod__, zip(count(first), lines, map(crc32, lines), strict=False))


def write_lines(using: str, batch: Batch, lines: Sequence[bytes]) -> None:
    """Insert the canonical lines of a batch. Raise ValueError for `LINES_PER_BATCH` lines or more."""
    if len(lines) >= LINES_PER_BATCH:
        raise ValueError(f"a batch must have fewer than {LINES_PER_BATCH} lines, not {len(lines)}")
    first, batch_id = batch.line_ids()[0], batch.pk
    connection = connections[using]
    table = connection.ops.quote_name(Line._meta.db_table)
    columns = ", ".join(map(connection.ops.quote_name, COLUMNS))
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql" and hasattr(cursor, "copy"):
            rows = copy_rows(first, batch_id, lines)
            with cursor.copy(f"COPY {table} ({columns}) FROM STDIN") as copy:
                # The server reads one text while this process makes the next one.
                while text := b"".join(islice(rows, _LINES_PER_COPY)):
                    copy.write(text)
            return
        statement = f"INSERT INTO {table} ({columns}) VALUES ({', '.join(['%s'] * len(COLUMNS))})"  # noqa: S608
        tuples: Iterator[tuple[int | str, ...]] = (
            (pk, batch_id, *values(line), crc32(line)) for pk, line in enumerate(lines, first)
        )
        while chunk := list(islice(tuples, _LINES_PER_INSERT)):
            cursor.executemany(statement, chunk)
