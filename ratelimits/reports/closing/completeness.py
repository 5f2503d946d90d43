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
        return f"{name} is complete until {iso(state.watermark)}, which is in the future: the next drain corrects that"
    if state.watermark < end:
        known = f"{name} is complete until {iso(state.watermark)}" if state.watermark else f"{name} is not complete yet"
        known = f"{known}, but must be until {iso(end)}"
        if state.ahead:
            lead = f"{state.ahead // SECOND:,} seconds"
            return f"{known}: its server's clock is {lead} ahead of the worker's, correct the wrong one"
        if state.shard >= conf.SHARDS:
            return f"{known}: it is not drained any more, since SHARDS is {conf.SHARDS}"
        return f"{known}: is a worker sealing and draining?"
    if state.tallied != state.position:
        return f"{name} has batches that are not tallied yet: the next drain does that"
    return ""
