"""Check whether the ledger has all usage of a shard until a moment, and whether this usage is tallied."""

from __future__ import annotations

from typing import Any

from django.utils.translation import gettext as _

from ratelimits.conf import conf
from ratelimits.usage.ledger.watermark import is_ahead
from ratelimits.usage.models import ShardState
from ratelimits.usage.periods import SECOND, iso


def incomplete_because(state: ShardState, end: int, now: int) -> str:
    """Return, as a sentence, why a shard's usage until `end` (µs since 1970 UTC) is incomplete; "" if it is not."""
    values: dict[str, Any] = {"shard": f"{state.shard:02d}", "until": iso(state.watermark), "end": iso(end)}
    if state.frozen:
        return _("shard %(shard)s has a quarantined batch: accept or discard it") % values
    if is_ahead(state.watermark, now):
        text = _(
            "shard %(shard)s is marked complete until %(until)s, which is in the future: the next drain corrects this"
        )
        return text % values
    if state.watermark < end:
        text = _("shard %(shard)s is not complete yet, but must be complete until %(end)s")
        if state.watermark:  # 0 if the shard has no watermark yet
            text = _("shard %(shard)s is complete until %(until)s, but must be complete until %(end)s")
        return f"{text % values}{_cause(state)}"
    if state.tallied != state.position:
        return _("shard %(shard)s has batches that are not tallied yet: the next drain tallies them") % values
    return ""


def _cause(state: ShardState) -> str:
    """Return the likely cause of a late watermark, as the end of a sentence."""
    if state.ahead:
        text = _(": its server's clock is %(n)s seconds ahead of the worker's clock. Correct the wrong clock")
        return text % {"n": f"{state.ahead // SECOND:,}"}
    if state.shard >= conf.SHARDS:
        return _(": the shard is no longer drained, because SHARDS is %(shards)s") % {"shards": conf.SHARDS}
    return _(": is a worker sealing and draining?")
