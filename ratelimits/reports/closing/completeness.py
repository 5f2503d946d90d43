"""Check whether the ledger has all usage of a shard until a moment.

The watermark of a shard is the moment before which all its usage is in the ledger. Later, this usage is tallied: it is
added to the totals of accounts.
"""

from __future__ import annotations

from ratelimits.conf import conf
from ratelimits.models import ShardState
from ratelimits.reports.periods import SECOND, iso
from ratelimits.usage.watermark import is_ahead


def incomplete_because(state: ShardState, end: int, now: int) -> str:
    """Return why a shard's usage until `end` (µs since 1970 UTC) is not complete, as a sentence; "" if it is."""
    name = f"shard {state.shard:02d}"
    if state.frozen:
        return f"{name} has a quarantined batch: accept or discard it"
    if is_ahead(state.watermark, now):
        return f"{name} is complete until {iso(state.watermark)}, a future moment: the next drain corrects this moment"
    if state.watermark < end:
        state_now = f"is complete until {iso(state.watermark)}" if state.watermark else "is not complete yet"
        sentence = f"{name} {state_now}, but must be until {iso(end)}"
        if state.ahead:
            lead = f"{state.ahead // SECOND:,} seconds"
            return f"{sentence}: its server's clock is {lead} ahead of the worker's clock. Correct the wrong clock"
        if state.shard >= conf.SHARDS:
            return f"{sentence}: the shard is no longer drained, since SHARDS is {conf.SHARDS}"
        return f"{sentence}: is a worker sealing and draining?"
    if state.tallied != state.position:
        return f"{name} has batches that are not tallied yet: the next drain tallies them"
    return ""
