"""Process totals: the numbers of requests that each process has counted. The cross-check compares them with the ledger.

When a total has grown, its process writes the whole new total. So writing a total twice changes nothing, and a process
that dies loses at most the requests since its last write.

For requests with prefetched permits, Redis has a record too. A process takes these permits in advance, and tells Redis
at least every second how many permits it has spent. Redis has a record of each prefetch, until all requests that spent
permits of this prefetch are counted. If the process is killed, the record remains. The record says how many requests
are perhaps missing from the ledger. `declare_unreported` writes this number as a total, in place of the process.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from django.db import DataError, connections, transaction
from django.db.models import F, Max, Min, QuerySet, Sum
from redis.exceptions import AskError, ResponseError

from ratelimits.conf import conf
from ratelimits.engine.counting import Uncounted, uncounted
from ratelimits.engine.keys import ANONYMOUS, BIN_SECONDS
from ratelimits.engine.server import Server
from ratelimits.usage.ledger.gaps import note_changes
from ratelimits.usage.models.gaps import DurabilityGap, GapKind, ProcessTotal
from ratelimits.usage.models.ledger import ShardState

if TYPE_CHECKING:
    from ratelimits.usage.counting.process_totals import Totals

#: How many rows one statement writes.
_ROWS_PER_STATEMENT = 1000
#: A second in µs.
_SECOND = 1_000_000
#: The columns that say what a total is about.
_SUBJECT = ("bin", "kind", "account", "key", "meter")
#: The totals of bins that began longer ago than this (s) are added up over all processes. No process writes such old
#: totals any more. To *fold* totals is to add them up.
_FOLD_AGE = 86_400
#: The kinds of totals that are added up over all processes.
FOLDED = ("admitted", "blocked", "exempt", "unreadable", "undecided")
#: The kinds of requests that may be missing from the ledger, each with the kind of gap that is declared.
GAPS = {
    "unanswered": GapKind.UNKNOWN,
    "unmetered": GapKind.UNMETERED,
    "unreported": GapKind.UNREPORTED,
    "uncounted": GapKind.UNCOUNTED,
}
#: Errors that the database or its driver raises if a value cannot be stored.
_STORE_ERRORS = (DataError, ValueError, OverflowError)
#: Within a second after the permits of a prefetch expire, the process sends how many it spent, and the record of the
#: prefetch is deleted. If the record still exists LATE_SECONDS after the permits expired, the process was killed, or it
#: cannot reach Redis.
LATE_SECONDS = 30

logger = logging.getLogger(__name__)


def write(process: str, totals: Totals) -> None:
    """Write a process's totals, and declare gaps for its unanswered, unmetered, unreported and uncounted requests."""
    using = conf.DATABASE
    rows = [
        ProcessTotal(
            process=process,
            kind=total_key.kind,
            account=total_key.account,
            key=total_key.key,
            meter=total_key.meter,
            bin=total_key.bin,
            requests=requests,
            units=units,
        )
        for total_key, (requests, units) in sorted(totals.items())
    ]
    try:
        store(using, rows)
    finally:
        # Close this thread's own connection: the thread serves no requests, so Django would never close it.
        if not connections[using].in_atomic_block:
            connections[using].close()


def store(using: str, rows: list[ProcessTotal]) -> None:
    """Write totals, and declare the gaps for them."""
    # Totals and gaps are written in one transaction. So no total is stored without its gap, even if the process dies.
    with transaction.atomic(using=using):
        rows = _save(using, rows)
        for kind, account, start in sorted({(row.kind, row.account, row.bin) for row in rows}):
            if kind in GAPS:
                _declare_gap(using, kind, account, start)


def _save(using: str, rows: list[ProcessTotal]) -> list[ProcessTotal]:
    """Write the rows, and return the rows that were written. Log each row that the database refuses."""
    try:
        with transaction.atomic(using=using):
            ProcessTotal.objects.using(using).bulk_create(
                rows,
                batch_size=_ROWS_PER_STATEMENT,
                update_conflicts=True,
                unique_fields=[*_SUBJECT, "process"],
                update_fields=["requests", "units"],
            )
    except _STORE_ERRORS as error:
        if len(rows) == 1:
            logger.error("The database refuses a total of this process: %s: %s", error, _shown(rows[0]))
            return []
        half = len(rows) // 2
        return _save(using, rows[:half]) + _save(using, rows[half:])
    return rows


def _shown(row: ProcessTotal) -> str:
    return ascii({name: getattr(row, name) for name in (*_SUBJECT, "requests", "units")})


def _declare_gap(using: str, kind: str, account: str, start: int) -> None:
    """Declare a gap for the requests of an account in the bin that begins at `start`, or update its numbers."""
    name = account or ANONYMOUS
    gap = GAPS[kind]
    new = DurabilityGap(
        event=f"{gap}:{name}:{start}",
        kind=gap,
        account=name,
        since=start * _SECOND,
        until=(start + BIN_SECONDS) * _SECOND - 1,
        units=0,
    )
    gaps = DurabilityGap.objects.using(using)
    with transaction.atomic(using=using):
        gaps.bulk_create([new], ignore_conflicts=True)
        declared = gaps.filter(event=new.event)
        # This update locks the row. So processes wait for each other, and the last process adds up all totals.
        declared.update(units=F("units"))
        rows = ProcessTotal.objects.using(using).filter(kind=kind, account=account, bin=start)
        declared.update(units=rows.aggregate(units=Sum("units"))["units"], detail=least_requests(rows).text)
        note_changes(using, declared.values_list("pk", flat=True))


class LeastRequests(NamedTuple):
    """The least number of requests that totals can be about, and whether there are exactly so many."""

    number: int
    is_exact: bool

    @property
    def text(self) -> str:
        """Return a text such as "14 requests" or "at least 14 requests"."""
        text = f"{self.number:,} {'request' if self.number == 1 else 'requests'}"
        return text if self.is_exact else f"at least {text}"


def least_requests(rows: QuerySet[ProcessTotal]) -> LeastRequests:
    """Return how many requests these totals are about. A request has a total in each of its meters.

    If not all requests of a key had the same meters, the totals do not tell how many requests there were.
    """
    by_key = rows.order_by().values("process", "account", "key", "bin")
    by_key = by_key.annotate(highest=Max("requests"), lowest=Min("requests"))
    sums = by_key.aggregate(least=Sum("highest"), of_each_meter=Sum("lowest"))
    least = sums["least"] or 0
    return LeastRequests(least, least == (sums["of_each_meter"] or 0))


def declare_unreported(server: Server, shards: Sequence[int], now: int | None = None) -> int:
    """Declare the uncounted requests of processes that were killed. Return how many records were removed from Redis.

    All `shards` must be on one server. `now` is µs since 1970 UTC, by default the server's time. If the server answers
    for a shard with an error, this shard is left out, and the next drain asks again.
    """
    client = server.wire.client_of(server.keyspace, shards[0])
    with client.pipeline(transaction=False) as pipeline:
        pipeline.time()
        for shard in shards:
            pipeline.hgetall(server.keyspace.prefetched(shard))
        (seconds, microseconds), *replies = pipeline.execute(raise_on_error=False)
    if now is None:
        now = seconds * _SECOND + microseconds
    count = 0
    for shard, reply in zip(shards, replies, strict=True):
        records = {} if isinstance(reply, ResponseError) else _late_records(reply, now)
        if not records:
            continue
        rows = [
            _unreported_total(name, meter) for name, meters in records.items() for meter in meters if meter.requests > 0
        ]
        if rows:
            # The name of the prefetch is stored in the column `process`. So a prefetch is not declared twice.
            store(conf.DATABASE, rows)
            logger.warning("Shard %02d: processes ended without counting requests with prefetched permits", shard)
        # If the slot of the shard moves to another node meanwhile, the next drain removes the records.
        with suppress(AskError):
            client.hdel(server.keyspace.prefetched(shard), *records)
            count += len(records)
    return count


def _late_records(reply: dict[bytes, bytes], now: int) -> dict[str, list[Uncounted]]:
    """Return the records whose processes will not send anything more, by the name of the prefetch.

    Leave out texts that are not records.
    """
    records = {}
    for name, text in reply.items():
        try:
            meters = uncounted(text)
        except ValueError as error:
            logger.error("A record of prefetched permits cannot be read: %r: %s", text[:200], error)
            continue
        if all(meter.until + LATE_SECONDS * _SECOND < now for meter in meters):
            records[name.decode(errors="replace")] = meters
    return records


def _unreported_total(name: str, uncounted_requests: Uncounted) -> ProcessTotal:
    return ProcessTotal(
        process=name[:64],
        kind="unreported",
        account=uncounted_requests.account,
        key=uncounted_requests.key,
        meter=uncounted_requests.meter,
        bin=uncounted_requests.bin,
        requests=uncounted_requests.requests,
        units=uncounted_requests.requests * uncounted_requests.cost,
    )


def fold(now: int) -> int:
    """Replace the old totals of single processes by the sums over all processes, for the kinds in `FOLDED`.

    The column `process` of a sum is "". Return by how many rows the table has become smaller. `now` is seconds since
    1970 UTC.
    """
    using, count = conf.DATABASE, 0
    old = ProcessTotal.objects.using(using).filter(kind__in=FOLDED, bin__lt=now - _FOLD_AGE).exclude(process="")
    lock_shard = ShardState.objects.using(using).order_by("shard").values_list("shard", flat=True).first()
    for start in list(old.order_by("bin").values_list("bin", flat=True).distinct()):
        with transaction.atomic(using=using, durable=True):
            if lock_shard is not None:
                # Two processes must not fold at the same time. All processes lock the same shard, so they wait here.
                ShardState.lock(using, lock_shard)
            rows = ProcessTotal.objects.using(using).filter(kind__in=FOLDED, bin=start)
            sums = list(rows.values_list(*_SUBJECT).order_by().annotate(Sum("requests"), Sum("units")))
            count += rows.count() - len(sums)
            rows._raw_delete(using)
            columns = (*_SUBJECT, "requests", "units")
            ProcessTotal.objects.using(using).bulk_create(
                [ProcessTotal(process="", **dict(zip(columns, row, strict=True))) for row in sums],
                batch_size=_ROWS_PER_STATEMENT,
            )
    return count
