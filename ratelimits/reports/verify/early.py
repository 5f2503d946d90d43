"""Verification that no period was closed before its usage was complete.

Each batch that was opened before a shard's watermark must be in the ledger. So if a batch was opened before the end of
a report's period, but arrived after the report was finalised, the watermark was wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from django.db.models import Q

from ratelimits.engine.keys import ANONYMOUS
from ratelimits.models import Batch, DurabilityGap, GapKind, Report, ShardState
from ratelimits.models.ledger import when
from ratelimits.reports.build import CHUNK
from ratelimits.reports.verify.report import readable
from ratelimits.usage.watermark import TOLERANCE

#: Kinds of gaps that declare that batches may be late or have wrong times.
_EXPLAIN = (
    *(GapKind.RESTART, GapKind.INCARNATION, GapKind.MISSING, GapKind.ROLLBACK),
    *(GapKind.WIPE, GapKind.SUM, GapKind.FORK, GapKind.CLOCK),
)


class _End(NamedTuple):
    """A position of a shard's chain at which a report ends, and the end of the report's period (µs)."""

    position: int
    end: int
    report: str


def verify_early(using: str, *sources: str) -> Iterator[str]:
    """Yield an error for each shard with a report that was finalised before its usage was complete.

    `sources` are the aliases of the databases that contain the ledger's batches, by default `using`. Periods that were
    closed by force are left out: their reports say that usage may be missing.
    """
    # Read the reports first, then the watermarks, then the gaps: a watermark advances before a report depends on it.
    ends = _ends(using)
    marks = dict(ShardState.objects.using(using).values_list("shard", "watermark"))
    for shard, shard_ends in sorted(ends.items()):
        latest = max(shard_ends, key=lambda end: end.end)
        mark = marks.get(shard)
        if mark is not None and mark < latest.end and not _explained(using, shard, mark, latest.end):
            yield (
                f"shard {shard:02d} says that its usage is complete until {when(mark)}, but report {latest.report},"
                f" whose period ends at {when(latest.end)}, was finalised"
            )
        for source in sources or (using,):
            yield from _late_batches(using, source, shard, sorted(shard_ends))


def _ends(using: str) -> dict[int, set[_End]]:
    """Return the ends of reports, by shard. If several reports end at one position, take the one that ends last."""
    gaps = DurabilityGap.objects.using(using).filter(kind=GapKind.FORCED)
    forced = set(gaps.values_list("account", "since"))
    by_shard: dict[int, dict[int, _End]] = {}
    columns = ("account", "period_start", "period_end", "version", "chain", "since")
    for report in Report.objects.using(using).filter(version=1).only(*columns).order_by().iterator(CHUNK):
        if not readable(report) or (report.account or ANONYMOUS, report.period_start) in forced:
            continue
        for shard, position in report.chain.items():
            at = by_shard.setdefault(int(shard), {})
            if position not in at or at[position].end < report.period_end:
                at[position] = _End(position, report.period_end, str(report))
    return {shard: set(at.values()) for shard, at in by_shard.items()}


def _late_batches(using: str, source: str, shard: int, ends: list[_End]) -> Iterator[str]:
    """Yield an error with the first batch of a shard that was opened before the end of a period but came too late."""
    batches = Batch.objects.using(source).filter(shard=shard, first_position__gt=ends[0].position)
    # Leave out batches that were accepted from quarantine: no server opened them.
    batches = batches.exclude(incarnation__startswith="quarantine-").order_by("first_position")
    columns = ("shard", "incarnation", "seq", "first_position", "opened_at", "sealed_at")
    first, more, passed, latest = "", 0, 0, ends[0]
    for batch in batches.only(*columns).iterator(CHUNK):
        while passed < len(ends) and ends[passed].position < batch.first_position:
            latest, passed = max(latest, ends[passed], key=lambda end: end.end), passed + 1
        if batch.opened_at >= latest.end - TOLERANCE or _explained(using, shard, batch.opened_at, batch.sealed_at):
            continue
        if first:
            more += 1
            continue
        first = (
            f"batch {batch}, opened at {when(batch.opened_at)}, arrived after report {latest.report} was finalised,"
            f" whose period ends at {when(latest.end)}: its shard was marked as complete, and no gap explains it"
        )
    if first:
        yield f"{first}; {more:,} more batches arrived too late" if more else first


def _explained(using: str, shard: int, since: int, until: int) -> bool:
    """Return whether a declared gap of the shard overlaps the time between two moments (µs since 1970 UTC)."""
    gaps = DurabilityGap.objects.using(using).filter(Q(shard=shard) | Q(shard=None), kind__in=_EXPLAIN)
    return gaps.filter(since__lte=max(since, until), until__gte=min(since, until)).exists()
