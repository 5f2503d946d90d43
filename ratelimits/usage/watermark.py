"""Watermarks: until when all usage of a shard is in the ledger, by two clocks, the server's and this machine's.

A server whose clock is ahead counts usage at times that are yet to come, and says that it was sealed then. Such a
moment never becomes a watermark: later usage, counted at the right time, would lie before it. The watermark stays where
it was until both clocks agree again, and what was counted meanwhile is declared to stand at a wrong time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from django.db import transaction

from ratelimits.models.ledger import Batch, GapKind, ShardState, moment
from ratelimits.usage import crash, gaps
from ratelimits.usage.pending import Waiting

logger = logging.getLogger(__name__)

#: How far a moment may be ahead of this machine's clock (µs): clocks that are kept right differ by far less.
TOLERANCE = 60 * 1_000_000


def is_ahead(at: int, clock: int) -> bool:
    """Return whether a moment is further ahead of a machine's clock than clocks that are right can be."""
    return at > clock + TOLERANCE


def watch(using: str, found: Iterable[Waiting], states: Mapping[int, ShardState]) -> None:
    """Declare what was counted by a clock that was ahead, and put back watermarks that no clock has reached yet."""
    odd = [each for each in found if _is_odd(states[each.shard], each)]
    if not odd:
        return
    with transaction.atomic(using=using, durable=True):
        for each in odd:
            state = ShardState.lock(using, each.shard)
            if state is not None and _is_odd(state, each):
                _put_right(using, state, each)
                state.save(using=using, update_fields=["watermark", "ahead"])


def _is_odd(state: ShardState, each: Waiting) -> bool:
    return (each.lead > TOLERANCE) != bool(state.ahead) or is_ahead(state.watermark, each.clock)


def _put_right(using: str, state: ShardState, each: Waiting) -> None:
    if is_ahead(state.watermark, each.clock):
        # Both clocks were ahead when it was stored.
        lead, since = state.watermark - each.clock, _sealed_before(using, state.shard, each.clock)
        state.watermark = min(each.sealed_at, each.clock)
        _declare(using, state.shard, since, each.clock, lead)
    if each.lead <= TOLERANCE:
        if state.ahead:
            _declare(using, state.shard, state.watermark, each.clock, state.ahead)
            logger.warning("The clocks of shard %02d's server and of this machine agree again", state.shard)
        state.ahead = 0
    elif not state.ahead:
        state.ahead = each.lead
        _declare(using, state.shard, state.watermark, each.clock, each.lead)
        logger.error(
            "Shard %02d was sealed at %s by its server's clock, %s seconds ahead of the workers': no billing period is"
            " closed until they agree",
            state.shard,
            moment(each.sealed_at),
            f"{each.lead // 1_000_000:,}",
        )


def _sealed_before(using: str, shard: int, clock: int) -> int:
    """Return when the newest batch that was sealed before a moment was sealed; 0 if there is none."""
    rows = Batch.objects.using(using).filter(shard=shard, sealed_at__lte=clock).order_by("-position")
    return rows.values_list("sealed_at", flat=True).first() or 0


def _declare(using: str, shard: int, since: int, until: int, lead: int) -> None:
    """Declare usage since a watermark as counted `lead` µs late, at both times; once more, it lasts until then."""
    late = f"up to {lead // 1_000_000:,} seconds"
    for what, shift, detail in (
        ("used", 0, f"the server's clock was ahead: what was used then was counted {late} later"),
        ("counted", lead, f"the server's clock was ahead: what was counted then was used {late} before"),
    ):
        event, first, last = f"{shard}:{since}:{what}", min(since or until, until) + shift, until + shift
        if not gaps.declare(using, GapKind.CLOCK, event, shard=shard, since=first, until=last, detail=detail):
            gaps.prolong(using, GapKind.CLOCK, event, last)


def move(using: str, each: Waiting) -> None:
    """Move a shard's watermark up to the seal before all that waited was listed: that is in the ledger now."""
    with transaction.atomic(using=using, durable=True):
        state = ShardState.lock(using, each.shard)
        crash.reached("drain:watermark-locked")
        known = state is not None and state.run == each.run and each.lead <= TOLERANCE
        if state is not None and known and not state.frozen and each.sealed_at > state.watermark:
            state.watermark = each.sealed_at
            state.save(using=using, update_fields=["watermark"])
    crash.reached("drain:watermark-written")


def move_idle(using: str, idle: Iterable[Waiting]) -> None:
    """Move those of shards in which nothing waited: all that was counted before their last seal is in the ledger."""
    idle = [each for each in idle if each.sealed_at and each.lead <= TOLERANCE]
    if idle:
        mark = min(each.sealed_at for each in idle)
        rows = ShardState.objects.using(using).filter(shard__in=[each.shard for each in idle])
        rows.filter(watermark__lt=mark, frozen=False, run=idle[0].run).update(watermark=mark)
