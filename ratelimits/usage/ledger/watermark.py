"""Watermarks. A watermark is the moment before which all usage of a shard (a part of the accounts) is in the ledger.

If a server's clock is ahead, the server counts and seals usage at times in the future. Such a time must not become a
watermark: after the clock is corrected, new usage would be before the watermark. So the server's clock is compared with
this machine's clock. If the server's clock is ahead, the watermark does not advance until both clocks agree again, and
a gap declares that usage was counted at wrong times.

People read until when the ledger is complete, and how many batches still wait in Redis.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

import redis
from django.db import transaction
from django.db.models import Min
from redis.exceptions import RedisError

from ratelimits.conf import conf
from ratelimits.engine import Unavailable
from ratelimits.engine.keys import account_shard
from ratelimits.engine.server import current_server, on_each
from ratelimits.engine.transport.refused import cause
from ratelimits.moments import moment, when
from ratelimits.usage.ledger import crash, gaps
from ratelimits.usage.ledger.packet import Packet, newest_bin
from ratelimits.usage.ledger.pending import PendingBatches
from ratelimits.usage.models.gaps import GapKind
from ratelimits.usage.models.ledger import Batch, ShardState

logger = logging.getLogger(__name__)

#: How far a moment can be ahead of this machine's clock (µs) before it counts as wrong. Synchronised clocks differ by
#: much less.
TOLERANCE = 60 * 1_000_000


def is_ahead(at: int, clock: int) -> bool:
    """Return whether `at` is later than `clock` by more than the tolerance. Both are µs since 1970 UTC."""
    return at > clock + TOLERANCE


def correct(using: str, shards: Iterable[PendingBatches], states: Mapping[int, ShardState]) -> None:
    """Declare gaps for usage that was counted while a clock was ahead. Lower watermarks that are in the future."""
    to_correct = [pending for pending in shards if _needs_correction(states[pending.shard], pending)]
    if not to_correct:
        return
    with transaction.atomic(using=using, durable=True):
        for pending in to_correct:
            state = ShardState.lock(using, pending.shard)
            if state is not None and _needs_correction(state, pending):
                _correct(using, state, pending)
                state.save(using=using, update_fields=["watermark", "ahead"])


def _needs_correction(state: ShardState, pending: PendingBatches) -> bool:
    """Return whether the watermark is in the future, or `state.ahead` must change.

    `state.ahead` is 0 while the clocks agree. Otherwise it says by how many µs the server's clock was ahead when this
    was noticed.
    """
    return (pending.lead > TOLERANCE) != bool(state.ahead) or is_ahead(state.watermark, pending.clock)


def _correct(using: str, state: ShardState, pending: PendingBatches) -> None:
    if is_ahead(state.watermark, pending.clock):
        # A watermark is stored only while the server's clock and a worker's clock agree. So both clocks were ahead when
        # this watermark was stored.
        lead, since = state.watermark - pending.clock, _sealed_before(using, state.shard, pending.clock)
        # While batches wait, usage is in the ledger only up to the moment at which the last drained batch was sealed.
        state.watermark = since if pending.count else min(pending.sealed_at, pending.clock)
        _declare_clock_gaps(using, state.shard, since, pending.clock, lead)
    if pending.lead <= TOLERANCE:
        if state.ahead:
            _declare_clock_gaps(using, state.shard, state.watermark, pending.clock, state.ahead)
            logger.warning("The clocks of shard %02d's server and of this machine agree again", state.shard)
        state.ahead = 0
    elif not state.ahead:
        state.ahead = pending.lead
        _declare_clock_gaps(using, state.shard, state.watermark, pending.clock, pending.lead)
        logger.error(
            "Shard %02d was sealed at %s by its server's clock, which is %s seconds ahead of the worker's clock: no"
            " billing period is closed until the clocks agree",
            state.shard,
            moment(pending.sealed_at),
            f"{pending.lead // 1_000_000:,}",
        )


def _sealed_before(using: str, shard: int, clock: int) -> int:
    """Return the last moment up to `clock` at which a batch in the ledger was sealed; 0 if there is no such batch."""
    rows = Batch.objects.using(using).filter(shard=shard, sealed_at__lte=clock).order_by("-position")
    return rows.values_list("sealed_at", flat=True).first() or 0


def _declare_clock_gaps(using: str, shard: int, since: int, until: int, lead: int) -> None:
    """Declare two gaps for usage that was counted at wrong times. The times are up to `lead` µs too late.

    One gap covers the true times at which the usage happened. The other gap covers the wrong times at which the usage
    was counted. If the gaps are declared already, extend them to their new ends.

    `since` and `until` are the first and the last true time, in µs since 1970 UTC. `since` is 0 if it is not known.
    """
    late = f"up to {lead // 1_000_000:,} seconds"
    for kind, shift, detail in (
        ("used", 0, f"the server's clock was ahead: usage that happened at this time was counted {late} later"),
        ("counted", lead, f"the server's clock was ahead: usage counted at this time happened {late} earlier"),
    ):
        event = f"{shard}:{since}:{kind}"
        first, last = min(since or until, until) + shift, until + shift
        if not gaps.declare(using, GapKind.CLOCK, event, shard=shard, since=first, until=last, detail=detail):
            gaps.extend(using, GapKind.CLOCK, event, last)


def declare_counted_ahead(using: str, pending: PendingBatches, packet: Packet) -> None:
    """Declare gaps if a batch has usage that was counted at a time which is still to come, although the clocks agree.

    Then the server's clock was ahead for a while and was put back before this drain.
    """
    lead = newest_bin(packet) * 1_000_000 - pending.clock
    if lead <= TOLERANCE or pending.lead > TOLERANCE:
        return  # Nothing is in the future, or the clock is still ahead: then `correct` declares the gaps.
    state = ShardState.objects.using(using).get(shard=packet.shard)
    logger.error("Shard %02d has usage that was counted up to %s seconds ahead", packet.shard, f"{lead // 1_000_000:,}")
    _declare_clock_gaps(using, packet.shard, min(state.watermark, pending.clock), pending.clock, lead)


def advance(using: str, pending: PendingBatches) -> None:
    """Advance a shard's watermark to `pending.sealed_at`. Call this when all batches of `pending` are in the ledger.

    Do nothing if the shard is frozen or has another run now, or if the server's clock is ahead.
    """
    with transaction.atomic(using=using, durable=True):
        state = ShardState.lock(using, pending.shard)
        crash.reached("drain:watermark-locked")
        if (
            state is not None
            and state.run == pending.run
            and pending.lead <= TOLERANCE
            and not state.frozen
            and pending.sealed_at > state.watermark
        ):
            state.watermark = pending.sealed_at
            state.save(using=using, update_fields=["watermark"])
    crash.reached("drain:watermark-written")


def advance_idle(using: str, idle: Iterable[PendingBatches]) -> None:
    """Advance the watermarks of shards without pending batches: all usage until the last seal is in the ledger."""
    idle = list(idle)
    if not (watermarks := _idle_watermarks(idle)):
        return
    with transaction.atomic(using=using):
        # In their order, as all who lock several shards. The updates alone would lock them in any order.
        ShardState.lock_all(using, [shard for shards in watermarks.values() for shard in shards])
        for watermark, shards in watermarks.items():
            rows = ShardState.objects.using(using).filter(shard__in=shards)
            rows.filter(watermark__lt=watermark, frozen=False, run=idle[0].run).update(watermark=watermark)


def are_current(idle: Iterable[PendingBatches], states: Mapping[int, ShardState]) -> bool:
    """Return whether `correct` and `advance_idle` have nothing to do for these shards.

    None of the shards may have pending batches.
    """
    idle = list(idle)
    return not any(_needs_correction(states[pending.shard], pending) for pending in idle) and all(
        states[shard].frozen or states[shard].watermark >= watermark
        for watermark, shards in _idle_watermarks(idle).items()
        for shard in shards
    )


def _idle_watermarks(idle: Iterable[PendingBatches]) -> dict[int, list[int]]:
    """Return the new watermarks of shards without pending batches, each with the shards that get this watermark."""
    idle = [pending for pending in idle if pending.sealed_at and pending.lead <= TOLERANCE]
    oldest = min((pending.sealed_at for pending in idle), default=0)
    shards_by_watermark: dict[int, list[int]] = {}
    for pending in idle:
        # One statement sets the watermark `oldest` for most shards. A shard that was sealed for the first time after
        # `oldest` gets its own watermark: a watermark before the shard's first seal would look as if the server had
        # lost the shard's data (see gaps.py).
        watermark = oldest if pending.first_sealed <= oldest else pending.sealed_at
        shards_by_watermark.setdefault(watermark, []).append(pending.shard)
    return shards_by_watermark


def complete_until(using: str, account: str = "") -> int | None:
    """Return the moment (µs since 1970 UTC) until which the ledger is complete; None if a shard was never drained.

    If `account` is not "", look only at the shard of this account.
    """
    shards = ShardState.objects.using(using)
    if account:
        shards = shards.filter(shard=account_shard(account, conf.SHARDS))
    oldest: int | None = shards.aggregate(oldest=Min("watermark"))["oldest"]
    return oldest or None


def completeness(using: str) -> str:
    """Return a sentence that says until when the ledger is complete, and how many batches wait in Redis."""
    shards = range(conf.SHARDS)
    drained = ShardState.objects.using(using).filter(shard__in=shards, watermark__gt=0)
    watermarks = list(drained.values_list("watermark", flat=True))
    if len(watermarks) == len(shards):
        until = f"Usage is complete until {when(min(watermarks))};"
    elif watermarks:
        missing = len(shards) - len(watermarks)
        until = f"Usage is not complete yet, since nothing was drained yet from {missing} of {len(shards)} shards;"
    else:
        until = (
            "No usage was drained to the ledger yet (a Celery worker with beat drains it every"
            f" {conf.SEAL_INTERVAL:g} seconds; to drain it now, run ratelimits_seal and then ratelimits_drain);"
        )
    return f"{until} {_waiting_batches()}."


def _waiting_batches() -> str:
    try:
        sealed, unsealed = _count_batches()
    except (RedisError, Unavailable, OSError) as error:
        return f"the number of batches in Redis is unknown, since {cause(error)}"
    return f"{_batches(sealed, 'sealed')} and {_batches(unsealed, 'open')} wait in Redis"


def _batches(count: int, kind: str) -> str:
    return f"{count} {kind} {'batch' if count == 1 else 'batches'}"


def _count_batches() -> tuple[int, int]:
    """Return how many sealed batches and how many open batches are in Redis."""
    server, sealed, unsealed = current_server(), 0, 0

    def count_on_server(client: redis.Redis, shards: list[int]) -> None:
        nonlocal sealed, unsealed
        with client.pipeline(transaction=False) as pipeline:
            for shard in shards:
                pipeline.llen(server.keyspace.sealed(shard))
                pipeline.exists(server.keyspace.open(shard))
            replies = pipeline.execute()
        # The replies to LLEN and to EXISTS alternate.
        sealed += sum(replies[::2])
        unsealed += sum(replies[1::2])

    on_each(server, range(server.keyspace.shards), count_on_server)
    return sealed, unsealed
