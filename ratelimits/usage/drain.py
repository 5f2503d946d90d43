"""Draining: fenced batches go from Redis to the ledger, in order in each shard, each exactly once.

Any number of drainers may run at once: a batch is applied under its shard's row lock, and forgotten by Redis only
after the transaction that holds it was committed. A drainer that dies anywhere leaves nothing that the next one cannot
finish.
"""

from __future__ import annotations

import logging
import random
from collections import Counter, deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import redis
from django.db import connections, transaction
from redis.exceptions import RedisError, ResponseError

from ratelimits.conf import conf
from ratelimits.engine import scripts
from ratelimits.engine.server import Server, current_server, on_each
from ratelimits.engine.transport.connection import run_named
from ratelimits.models.ledger import Batch, QuarantinedBatch, ShardState
from ratelimits.usage import crash, gaps, watermark
from ratelimits.usage.apply import BatchOutcome, apply, quarantine
from ratelimits.usage.fence import fence
from ratelimits.usage.packet import Packet, Unreadable, packet
from ratelimits.usage.pending import Waiting, waiting

logger = logging.getLogger(__name__)

_SCAN = 2500
#: Shards that one drainer brings into the database at the same time, where that can lock a row.
_LANES = 2
#: Batches that are read before the database has taken the ones before them.
_AHEAD = 2


@dataclass(slots=True)
class Drained:
    """What one drain did: batches by outcome, ledger lines written, the fsync policy that it was fenced under.

    `refused` are the shards that the server would not read for now, and what it said. `alive` are the runs of all
    servers that answered as it began: a shard that was under one of them before was moved, and has lost nothing.
    """

    outcomes: Counter[BatchOutcome] = field(default_factory=Counter)
    lines: int = 0
    fsync: str = ""
    refused: dict[int, ResponseError] = field(default_factory=dict)
    alive: set[str] = field(default_factory=set)

    @property
    def batches(self) -> int:
        return self.outcomes[BatchOutcome.APPLIED]


def drain(now: int | None = None) -> Drained:
    """Take every batch that waits into the ledger, and move the watermarks: server by server, where it is a cluster.

    `now` is µs since 1970 UTC, by default this machine's clock. Raises NotFencedError when the server may still forget
    what was read, redis.exceptions.RedisError when it is away or refuses a shard for now, when all others were drained;
    what was applied stays applied, and the next drain goes on.
    """
    server, using, done = current_server(), conf.DATABASE, Drained()
    shards = range(server.keyspace.shards)
    if ShardState.objects.using(using).filter(shard__in=shards).count() < len(shards):
        ShardState.objects.using(using).bulk_create([ShardState(shard=s) for s in shards], ignore_conflicts=True)
    try:
        done.alive = _runs(server, shards)
        on_each(server, shards, lambda _client, those: _drain_server(server, using, those, done, now))
    finally:
        for shard, error in done.refused.items():
            logger.warning("usage of shard %02d could not be drained; the next drain goes on: %s", shard, error)
    for error in done.refused.values():
        raise error
    return done


def _runs(server: Server, shards: Sequence[int]) -> set[str]:
    """Return the runs of the servers that answer now."""
    found = set()
    for client, _shards in server.wire.servers(server.keyspace, shards):
        with suppress(RedisError):
            found.add(run_named(client.info()))
    return found


def _drain_server(server: Server, using: str, shards: list[int], done: Drained, now: int | None) -> None:
    while True:
        found = waiting(server, shards, done.refused, now)
        if not found:
            return
        crash.reached("drain:listed")
        if len({each.run for each in found}) > 1:
            continue  # restarted while it was asked
        # Remembered before anything is waited for: what this run forgets before its first drain is declared too.
        ShardState.objects.using(using).filter(shard__in=shards, run="").update(run=found[0].run)
        done.fsync = fence(server, found[0].run, shard=found[0].shard)
        crash.reached("drain:fenced")
        states = ShardState.objects.using(using).in_bulk([each.shard for each in found])
        _meet(server, using, found, states, done)
        watermark.watch(using, found, states)
        busy = [each for each in found if each.batches]
        # Several drainers start at several shards, so that they seldom meet.
        start = random.randrange(len(busy)) if busy else 0  # noqa: S311
        more = _drain_lanes(server, using, busy[start:] + busy[:start], done)
        watermark.move_idle(using, [each for each in found if not each.count])
        if not more:
            return


def _meet(server: Server, using: str, found: list[Waiting], states: Mapping[int, ShardState], done: Drained) -> None:
    """Declare what the server no longer is or knows, also in shards that have no new usage to show it."""
    odd = [each for each in found if _differs(states[each.shard], each)]
    if not odd:
        return
    with transaction.atomic(using=using, durable=True):
        for odd_one in odd:
            state = ShardState.lock(using, odd_one.shard)
            # Asked again under the lock: another drainer may have gone on since.
            again = waiting(server, [odd_one.shard], done.refused)
            each = again[0] if again else None
            if state is None or each is None or each.run != odd_one.run or not _differs(state, each):
                continue
            if each.incarnation or not each.count:
                gaps.declare_server(using, state, each.incarnation, each.seq, fsync=done.fsync, now=each.now)
            # Batches that wait were sealed by earlier runs perhaps: each is met as it is applied.
            if state.run != each.run and not each.count:
                began = each.up_since if each.up_since > state.watermark else each.now
                if state.run not in done.alive:
                    gaps.declare_restart(using, state, each.run, until=began, fsync=done.fsync)
                state.run = each.run
            state.save(using=using)


def _differs(state: ShardState, each: Waiting) -> bool:
    wiped = not each.incarnation and not each.count
    forgot = wiped or (each.incarnation == state.incarnation and each.seq < state.seq)
    return state.run != each.run or (bool(state.incarnation) and forgot)


class _Read(NamedTuple):
    """A batch as it was read, or why it could not be; `last` of those listed of its shard."""

    each: Waiting
    name: str
    packet: Packet | Exception
    last: bool


def _read(server: Server, each: Waiting, name: str) -> _Read:
    found: Packet | Exception
    try:
        client = server.wire.client_of(server.keyspace, each.shard)
        found = packet(each.shard, _fields(client, server.keyspace.batch(each.shard, name)))
    except Unreadable as error:
        found = error
    except ResponseError as error:
        # Of itself a batch can only be no hash. All else passes: a server is busy, a cluster's slot is on the move.
        found = Unreadable(str(error)) if str(error).startswith("WRONGTYPE") else error
    return _Read(each, name, found, name == each.batches[-1])


def _read_ahead(server: Server, busy: list[Waiting]) -> Generator[_Read]:
    """The batches in order, the next ones read while the database takes one: bounded memory, both at work."""
    jobs = ((each, name) for each in busy for name in each.batches)
    with ThreadPoolExecutor(1, thread_name_prefix="ratelimits-drain") as reader:
        ahead = deque(reader.submit(_read, server, *job) for job in islice(jobs, _AHEAD))
        try:
            while ahead:
                read = ahead.popleft().result()
                ahead.extend(reader.submit(_read, server, *job) for job in islice(jobs, 1))
                yield read
        finally:
            reader.shutdown(cancel_futures=True)


def _drain_lanes(server: Server, using: str, busy: list[Waiting], done: Drained) -> bool:
    """Drain shards side by side where the database can write side by side; whether more waits."""
    connection = connections[using]
    # Other connections would not see what a transaction that is open here, a test's, has written.
    side_by_side = connection.features.has_select_for_update and not connection.in_atomic_block
    count = min(_LANES if side_by_side else 1, len(busy))
    if count < 2:
        return _drain_lane(server, using, busy, done)
    lanes = [Drained(fsync=done.fsync) for _number in range(count)]

    def drain_lane(number: int) -> bool:
        try:
            return _drain_lane(server, using, busy[number::count], lanes[number])
        finally:
            connections[using].close()  # this thread's own

    with ThreadPoolExecutor(count, thread_name_prefix="ratelimits-lane") as pool:
        more = list(pool.map(drain_lane, range(count)))
    for lane in lanes:
        done.outcomes += lane.outcomes
        done.lines += lane.lines
        done.refused |= lane.refused
    return any(more)


def _drain_lane(server: Server, using: str, busy: list[Waiting], done: Drained) -> bool:
    with closing(_read_ahead(server, busy)) as batches:
        return _drain_shards(server, using, batches, done)


def _drain_shards(server: Server, using: str, batches: Iterable[_Read], done: Drained) -> bool:
    """Apply what was listed; whether more waits that this drainer should go on with."""
    busy: set[int] = set()
    more = False
    for read in batches:
        each, name = read.each, read.name
        if each.shard in busy or each.shard in done.refused:
            continue
        try:
            outcome = _drain_batch(server, using, read, done)
        except ResponseError as error:
            done.refused[each.shard] = error
            continue
        done.outcomes[outcome] += 1
        if outcome is BatchOutcome.BUSY:
            # Another drainer has the shard, and will go on with it.
            busy.add(each.shard)
            continue
        try:
            _drop(server, each.shard, name)
        except ResponseError as error:
            done.refused[each.shard] = error
            continue
        crash.reached("drain:dropped")
        if read.last:
            if each.count > len(each.batches):
                more = True
            else:
                watermark.move(using, each)
    return more


def _drain_batch(server: Server, using: str, read: _Read, done: Drained) -> BatchOutcome:
    each, name, found, _last = read
    if isinstance(found, ResponseError):
        raise found
    if isinstance(found, Exception):
        outcome = _unreadable(server, using, each, name, str(found))
    else:
        crash.reached("drain:read")
        outcome = apply(using, found, done.fsync, wait=False, alive=done.alive)
        if outcome is BatchOutcome.APPLIED:
            done.lines += len(found.lines)
    if outcome not in (BatchOutcome.APPLIED, BatchOutcome.KNOWN, BatchOutcome.BUSY):
        logger.error("usage batch %02d:%s was %s", each.shard, name, outcome.name.lower())
    return outcome


def _fields(client: redis.Redis, key: str) -> Iterable[tuple[bytes, bytes]]:
    # A hash that is scanned may show a field twice; a sealed batch does not change, so the values are equal.
    seen: dict[bytes, bytes] = dict(client.hscan_iter(key, count=_SCAN))
    return seen.items()


def _unreadable(server: Server, using: str, each: Waiting, name: str, reason: str) -> BatchOutcome:
    """A batch that is gone was drained by another, or is lost; any other goes to quarantine as it is."""
    client: Any = server.wire.client_of(server.keyspace, each.shard)
    key = server.keyspace.batch(each.shard, name)
    with transaction.atomic(using=using, durable=True):
        # Under the lock nobody else can drain it, so what is read now is what there is.
        state = ShardState.lock(using, each.shard)
        assert state is not None
        kind = client.type(key).decode()
        incarnation, _colon, number = name.partition("~")[0].rpartition(":")
        if number.isdigit() and (kind == "none" or "~" not in name):
            rows = Batch.objects.using(using).filter(shard=each.shard, incarnation=incarnation)
            if rows.filter(first_seq__lte=int(number), seq__gte=int(number)).exists():
                return BatchOutcome.KNOWN
        if kind == "none":
            aside = QuarantinedBatch.objects.using(using).filter(shard=each.shard, name=name[:200])
            if not number.isdigit() or aside.exists():
                return BatchOutcome.KNOWN
            gaps.declare_gone(using, state, incarnation, int(number), until=each.now)
            state.save(using=using)
            return BatchOutcome.LOST
        fields = _raw(client, key, kind)
        outcome = quarantine(using, state, None, reason, name=name, fields=fields)
        state.save(using=using)
        return outcome


def _raw(client: Any, key: str, kind: str) -> dict[str, str]:
    """A key's contents as text, whatever it holds."""
    raw = client.hgetall(key) if kind == "hash" else {b"type": kind.encode(), b"dump": client.dump(key).hex().encode()}
    # PostgreSQL keeps no NUL.
    return {
        field.decode(errors="replace").replace("\0", "\ufffd"): value.decode(errors="replace").replace("\0", "\ufffd")
        for field, value in raw.items()
    }


def _drop(server: Server, shard: int, name: str) -> None:
    text = scripts.read("drop").text.decode()
    server.wire.client_of(server.keyspace, shard).eval(text, 1, server.keyspace.meta(shard), name)
