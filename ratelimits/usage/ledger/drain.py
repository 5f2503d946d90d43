"""Draining: write sealed batches from Redis to the ledger. Each batch is written exactly once, in its shard's order.

A shard is a part of the accounts, and a batch is a set of counters of one shard. Before a batch is written, the fence
makes sure that the server cannot lose it any more. Any number of processes can drain at the same time: a batch is
written under the lock of its shard's row, and is deleted from Redis only after the commit. If a process dies at any
point, the next drain completes its work.
"""

from __future__ import annotations

import logging
import random
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import date
from itertools import islice
from typing import Any, NamedTuple

import redis
from django.db import DatabaseError, OperationalError, connections, transaction
from redis.exceptions import RedisError, ResponseError

from ratelimits.conf import conf
from ratelimits.engine.assemble import scripts
from ratelimits.engine.server import Server, current_server, on_each
from ratelimits.engine.transport.connection import read_run
from ratelimits.moments import moment
from ratelimits.progress import Progress
from ratelimits.usage.ledger import crash, gaps, watermark
from ratelimits.usage.ledger.apply import BatchOutcome, apply, quarantine
from ratelimits.usage.ledger.fence import check_server, fence
from ratelimits.usage.ledger.gaps import LiveRun
from ratelimits.usage.ledger.packet import Packet, Unreadable, packet
from ratelimits.usage.ledger.pending import PendingBatches, read_pending
from ratelimits.usage.ledger.process_totals import declare_unreported
from ratelimits.usage.models.ledger import Batch, QuarantinedBatch, ShardState
from ratelimits.usage.models.sums import is_overflow

logger = logging.getLogger(__name__)

#: About how many fields one HSCAN command reads.
_FIELDS_PER_SCAN = 2500
#: How many threads of a drain write at the same time, if the database can lock rows. Each thread has its own
#: shards. The shards of one thread are called a *lane*.
_LANES = 2
#: How many batches are read from Redis in advance, while the database writes an earlier batch.
_BATCHES_AHEAD = 2


@dataclass(slots=True)
class DrainResult:
    """The result of a drain."""

    #: How many batches had each outcome.
    outcomes: Counter[BatchOutcome] = field(default_factory=Counter)
    #: How many lines were written to the ledger.
    lines: int = 0
    #: How the server kept the batches until they were written: its fsync policy, or the name of another promise.
    fsync: str = ""
    #: The days (UTC) for which reports name the promise `fsync`.
    declared: set[date] = field(default_factory=set)
    #: By shard: the error with which the server answered a command about this shard, or the database refused its batch.
    refused: dict[int, Exception] = field(default_factory=dict)
    #: The runs of the servers that answered after the batches were listed. (A run is the time from a start of a server
    #: until its restart.) If a shard has a new run, but its former run is among these runs, its former server did not
    #: restart: the shard was moved to another node, and lost nothing.
    live_runs: dict[str, LiveRun] = field(default_factory=dict)
    #: The function that is called with 1 after each batch, to show the progress.
    add_progress: Callable[[int], None] = lambda _batches: None

    @property
    def batches(self) -> int:
        """Return how many batches were written to the ledger."""
        return self.outcomes[BatchOutcome.APPLIED]


def drain(now: int | None = None, progress: Progress | None = None) -> DrainResult:
    """Write every pending batch to the ledger, and advance the watermarks. In a cluster, do this server by server.

    A watermark is the moment before which all usage of a shard is in the ledger.

    `now` replaces this machine's time (µs since 1970 UTC). For each server, `progress` shows how many batches are done.

    Raise NotFencedError if a server could still lose the batches that were read. Raise redis.exceptions.RedisError if a
    server does not answer. Raise it also if a server answers with an error for one shard, after all other shards were
    drained. Raise django.db.DatabaseError in the same way if the database refuses a batch. After any error, the next
    drain writes the batches that are not in the ledger yet.
    """
    server, using, result = current_server(), conf.DATABASE, DrainResult()
    shards = range(server.keyspace.shards)
    if ShardState.objects.using(using).filter(shard__in=shards).count() < len(shards):
        ShardState.objects.using(using).bulk_create(
            [ShardState(shard=shard) for shard in shards], ignore_conflicts=True
        )
    try:
        on_each(
            server,
            shards,
            lambda _client, server_shards: _drain_server(server, using, server_shards, result, now, progress),
        )
    finally:
        for shard, error in result.refused.items():
            logger.warning("usage of shard %02d could not be drained; the next drain tries again: %s", shard, error)
    for error in result.refused.values():
        raise error
    return result


def _live_runs(server: Server, listed: PendingBatches, states: Iterable[ShardState]) -> dict[str, LiveRun]:
    """Return the runs of the servers that answer now.

    `listed` comes from the server that listed the batches. If the states of all shards have the run of this server
    already, return only this run.
    """
    runs = {listed.run: LiveRun(listed.up_since)}
    if any(state.run != listed.run for state in states):
        for client, shards in server.wire.servers(server.keyspace, range(server.keyspace.shards)):
            with suppress(RedisError):
                run = read_run(client, server.keyspace.head(shards[0]))
                runs.setdefault(run, LiveRun())
                info: Any = client.info()
                runs[run] = runs[run]._replace(server="Valkey" if "valkey_version" in info else "Redis")
    return runs


def _drain_server(
    server: Server, using: str, shards: list[int], result: DrainResult, now: int | None, progress: Progress | None
) -> None:
    """Drain the shards of one server, in passes, until no batch of these shards waits."""
    declare_unreported(server, shards)
    while True:
        listed = read_pending(server, shards, result.refused, now)
        if not listed:
            return
        if progress is not None:
            # The number of batches in the first pass. Later passes drain batches that come meanwhile.
            result.add_progress = progress.counter("batches", sum(pending.count for pending in listed))
            progress = None
        crash.reached("drain:listed")
        if len({pending.run for pending in listed}) > 1:
            continue  # The server restarted between two replies.
        # Store the first run before the fence waits. If the server restarts before this first drain ends, the next
        # drain notices this by the stored run.
        new_shards = ShardState.objects.using(using).filter(shard__in=shards, run="")
        for shard in new_shards.values_list("shard", flat=True):
            # One after another: one statement would lock them in any order, and others lock several shards too.
            new_shards.filter(shard=shard).update(run=listed[0].run)
        if _is_up_to_date(using, listed):
            # Nothing is written, so there is nothing to wait for. Most drains of an idle server end here.
            result.fsync = check_server(server, listed[0].run, listed[0].shard)
            return
        result.fsync = fence(server, listed[0].run, shards=[pending.shard for pending in listed])
        crash.reached("drain:fenced")
        states = ShardState.objects.using(using).in_bulk([pending.shard for pending in listed])
        result.live_runs = _live_runs(server, listed[0], states.values())
        _declare_losses(server, using, listed, states, result)
        watermark.correct(using, listed, states)
        with_batches = [pending for pending in listed if pending.batches]
        # Start at a random shard, so that processes that drain at the same time rarely wait for each other.
        start = random.randrange(len(with_batches)) if with_batches else 0  # noqa: S311
        more = _drain_lanes(server, using, with_batches[start:] + with_batches[:start], result)
        watermark.advance_idle(using, [pending for pending in listed if not pending.count])
        if not more:
            return


def _is_up_to_date(using: str, listed: list[PendingBatches]) -> bool:
    """Return whether nothing is to be done: no batch to apply, no loss to declare, and no watermark to change."""
    if any(pending.count for pending in listed):
        return False
    states = ShardState.objects.using(using).in_bulk([pending.shard for pending in listed])
    if any(_has_new_run_or_loss(using, states[pending.shard], pending) for pending in listed):
        return False
    return watermark.are_current(listed, states)


def _declare_losses(
    server: Server, using: str, listed: list[PendingBatches], states: Mapping[int, ShardState], result: DrainResult
) -> None:
    """Declare a restart of the server or a loss of its data, also for shards without a new batch."""
    changed = [pending for pending in listed if _has_new_run_or_loss(using, states[pending.shard], pending)]
    if not changed:
        return
    with transaction.atomic(using=using, durable=True):
        locked = ShardState.lock_all(using, [pending.shard for pending in changed])
        # Read again under the locks: perhaps another process has drained some of the shards meanwhile.
        for pending in read_pending(server, sorted(locked), result.refused) if locked else ():
            state = locked[pending.shard]
            if pending.run != listed[0].run:
                continue
            if not _has_new_run_or_loss(using, state, pending):
                continue
            # If batches wait and Redis does not name the incarnation, only these batches can show a loss. Then `apply`
            # declares it.
            only_batches_show_loss = pending.count and not pending.incarnation
            if not only_batches_show_loss:
                gaps.declare_loss(using, state, pending, fsync=result.fsync)
            # Waiting batches were perhaps sealed in earlier runs. So if batches wait, only `apply` declares restarts.
            if state.run != pending.run and not pending.count:
                # If a replica replaced the server, the replica can have started before the watermark. Then nobody knows
                # when it replaced the server, so the gap ends now.
                until = pending.up_since if pending.up_since > state.watermark else pending.now
                if state.run not in result.live_runs:
                    gaps.declare_restart(
                        using, state, pending.run, until=until, fsync=result.fsync, live_runs=result.live_runs
                    )
                state.run = pending.run
            state.save(using=using)


def _has_new_run_or_loss(using: str, state: ShardState, pending: PendingBatches) -> bool:
    """Return whether the shard's server is in another run than at the last drain, or has lost usage of the shard."""
    return state.run != pending.run or gaps.is_loss(using, state, pending)


class _ReadBatch(NamedTuple):
    """The result of reading one batch."""

    pending: PendingBatches
    name: str
    #: The batch; or the error, if the batch could not be read.
    packet: Packet | Exception
    #: Whether this is the last listed batch of its shard.
    is_last: bool


def _read_batch(server: Server, pending: PendingBatches, name: str) -> _ReadBatch:
    packet_or_error: Packet | Exception
    try:
        client = server.wire.client_of(server.keyspace, pending.shard)
        packet_or_error = packet(pending.shard, read_fields(client, server.keyspace.batch(pending.shard, name)))
    except Unreadable as error:
        packet_or_error = error
    except ResponseError as error:
        # WRONGTYPE means that the Redis key is not a batch. Other errors are temporary: for example, a busy server.
        packet_or_error = Unreadable(str(error)) if str(error).startswith("WRONGTYPE") else error
    return _ReadBatch(pending, name, packet_or_error, name == pending.batches[-1])


def _read_ahead(server: Server, with_batches: list[PendingBatches]) -> Generator[_ReadBatch]:
    """Yield the batches in order. While the database writes one batch, read the next `_BATCHES_AHEAD` batches."""
    jobs = ((pending, name) for pending in with_batches for name in pending.batches)
    with ThreadPoolExecutor(1, thread_name_prefix="ratelimits-drain") as reader:
        started = deque(reader.submit(_read_batch, server, *job) for job in islice(jobs, _BATCHES_AHEAD))
        try:
            while started:
                read = started.popleft().result()
                started.extend(reader.submit(_read_batch, server, *job) for job in islice(jobs, 1))
                yield read
        finally:
            reader.shutdown(cancel_futures=True)


def _drain_lanes(server: Server, using: str, with_batches: list[PendingBatches], result: DrainResult) -> bool:
    """Drain several shards at the same time if the database allows this. Return whether another pass is needed."""
    connection = connections[using]
    # The connections of other threads would not see the writes of an open transaction (for example, of a test).
    parallel = connection.features.has_select_for_update and not connection.in_atomic_block
    lane_count = min(_LANES if parallel else 1, len(with_batches))
    if lane_count < 2:
        return _drain_lane(server, using, with_batches, result)
    lanes = [
        DrainResult(fsync=result.fsync, live_runs=result.live_runs, add_progress=result.add_progress)
        for _index in range(lane_count)
    ]

    def drain_lane(index: int) -> bool:
        try:
            return _drain_lane(server, using, with_batches[index::lane_count], lanes[index])
        finally:
            connections[using].close()  # The connection of this thread.

    with ThreadPoolExecutor(lane_count, thread_name_prefix="ratelimits-lane") as pool:
        more = list(pool.map(drain_lane, range(lane_count)))
    for lane in lanes:
        result.outcomes += lane.outcomes
        result.lines += lane.lines
        result.refused |= lane.refused
    return any(more)


def _drain_lane(server: Server, using: str, with_batches: list[PendingBatches], result: DrainResult) -> bool:
    with closing(_read_ahead(server, with_batches)) as batches:
        return _drain_shards(server, using, batches, result)


def _drain_shards(server: Server, using: str, batches: Iterable[_ReadBatch], result: DrainResult) -> bool:
    """Apply the listed batches. Return whether another pass is needed."""
    busy_shards: set[int] = set()
    more = False
    for read in batches:
        pending, name = read.pending, read.name
        if pending.shard in busy_shards or pending.shard in result.refused:
            continue
        try:
            outcome = _drain_batch(server, using, read, result)
        except (ResponseError, DatabaseError) as error:
            if isinstance(error, OperationalError) and not is_overflow(error):
                raise  # The database failed, not this shard.
            result.refused[pending.shard] = error
            continue
        result.outcomes[outcome] += 1
        if outcome is BatchOutcome.BUSY:
            # Another process drains this shard. Leave all batches of the shard to that process.
            busy_shards.add(pending.shard)
            continue
        try:
            _drop(server, pending.shard, name)
        except ResponseError as error:
            result.refused[pending.shard] = error
            continue
        result.add_progress(1)
        crash.reached("drain:dropped")
        if read.is_last:
            if pending.count > len(pending.batches) or _is_of_earlier_run(read):
                more = True  # For a batch of an earlier run, the next pass declares the restart.
            else:
                watermark.advance(using, pending)
    return more


def _is_of_earlier_run(read: _ReadBatch) -> bool:
    """Return whether a batch was sealed before the present run of its server."""
    return isinstance(read.packet, Packet) and read.packet.sealed_run != read.pending.run


def _drain_batch(server: Server, using: str, read: _ReadBatch, result: DrainResult) -> BatchOutcome:
    """Write a batch to the ledger. If it could not be read, quarantine it or declare its loss. Return the outcome."""
    pending, name, packet_or_error, _is_last = read
    if isinstance(packet_or_error, ResponseError):
        raise packet_or_error
    if isinstance(packet_or_error, Exception):
        outcome = _handle_unreadable(server, using, pending, name, str(packet_or_error))
    else:
        crash.reached("drain:read")
        _declare_promise(using, packet_or_error, result)
        watermark.declare_counted_ahead(using, pending, packet_or_error)
        outcome = apply(using, packet_or_error, result.fsync, wait=False, live_runs=result.live_runs)
        if outcome is BatchOutcome.APPLIED:
            result.lines += len(packet_or_error.lines)
    if outcome not in (BatchOutcome.APPLIED, BatchOutcome.DONE_BEFORE, BatchOutcome.BUSY):
        logger.error("usage batch %02d:%s was %s", pending.shard, name, outcome.name.lower())
    return outcome


def _declare_promise(using: str, read: Packet, result: DrainResult) -> None:
    """Let reports name the promise under which a batch is billed. Ask the database once for each day of the usage."""
    for at in (read.opened_at, read.sealed_at):
        if (day := moment(at).date()) not in result.declared:
            gaps.declare_promise(using, result.fsync, at)
            result.declared.add(day)


def read_fields(client: redis.Redis, key: str) -> Iterable[tuple[bytes, bytes]]:
    """Return the fields of a batch's hash, each field once."""
    # HSCAN can return a field twice. Both values are equal, because a sealed batch does not change.
    fields: dict[bytes, bytes] = dict(client.hscan_iter(key, count=_FIELDS_PER_SCAN))
    return fields.items()


def _handle_unreadable(server: Server, using: str, pending: PendingBatches, name: str, reason: str) -> BatchOutcome:
    """Return the outcome for a batch that could not be read.

    If the batch is no longer in Redis, another process has drained it, or it is lost. A loss is declared. If the batch
    is still in Redis, and not yet in the ledger, its fields are quarantined without a change.
    """
    client: Any = server.wire.client_of(server.keyspace, pending.shard)
    key = server.keyspace.batch(pending.shard, name)
    with transaction.atomic(using=using, durable=True):
        # Under the lock no other process can drain the batch.
        state = ShardState.lock(using, pending.shard)
        assert state is not None
        kind = client.type(key).decode()
        # A "~" in the name means: a second batch with the same incarnation and number (see lua/batch.lua). While it is
        # in Redis, the ledger's batch with this incarnation and number can be the first batch, with other contents.
        incarnation, _colon, number = name.partition("~")[0].rpartition(":")
        if number.isdigit() and (kind == "none" or "~" not in name):
            rows = Batch.objects.using(using).filter(shard=pending.shard, incarnation=incarnation)
            if rows.filter(first_seq__lte=int(number), seq__gte=int(number)).exists():
                return BatchOutcome.DONE_BEFORE
        if kind == "none":
            quarantined = QuarantinedBatch.objects.using(using).filter(shard=pending.shard, name=name[:200])
            if not number.isdigit() or quarantined.exists():
                return BatchOutcome.DONE_BEFORE
            gaps.declare_lost_batch(using, state, incarnation, int(number), until=pending.now)
            state.save(using=using)
            return BatchOutcome.LOST
        fields = _contents(client, key, kind)
        outcome = quarantine(using, state, None, reason, name=name, fields=fields)
        state.save(using=using)
        return outcome


def _contents(client: Any, key: str, kind: str) -> dict[str, str]:
    """Return the contents of a Redis key of any type, as texts."""
    raw = client.hgetall(key) if kind == "hash" else {b"type": kind.encode(), b"dump": client.dump(key).hex().encode()}
    # PostgreSQL cannot store NUL characters.
    return {
        field.decode(errors="replace").replace("\0", "\ufffd"): value.decode(errors="replace").replace("\0", "\ufffd")
        for field, value in raw.items()
    }


def _drop(server: Server, shard: int, name: str) -> None:
    """Delete a batch from Redis."""
    script, number_of_keys = scripts.read("drop").text.decode(), 1
    server.wire.client_of(server.keyspace, shard).eval(script, number_of_keys, server.keyspace.meta(shard), name)
