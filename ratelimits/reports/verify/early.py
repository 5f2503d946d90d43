"""Verifying that no period was closed early: its shards were complete by then, and what came since was counted since.

A shard is complete until its watermark: each batch that was opened before it is in the ledger. So one that came after
a report had been finalised, and was opened before the report's period ended, shows that the watermark was wrong.
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

#: Gaps that say that batches may come late, or from another time.
_EXPLAIN = (
    *(GapKind.RESTART, GapKind.INCARNATION, GapKind.MISSING, GapKind.ROLLBACK),
    *(GapKind.WIPE, GapKind.SUM, GapKind.FORK, GapKind.CLOCK),
)


class _End(NamedTuple):
    """A position of a shard's chain up to which a report was made, and the end of the report's period (µs)."""

    position: int
    end: int
    report: str


def verify_early(using: str, *sources: str) -> Iterator[str]:
    """Say which reports were finalised before their usage was complete, by what the ledger got since.

    `sources` are the databases that the ledger's batches are in, by default `using`. Periods that were closed by force
    say so themselves.
    """
    # Read in this order: a watermark moves before reports are made by it, and a gap is declared with what it explains.
    ends = _ends(using)
    marks = dict(ShardState.objects.using(using).values_list("shard", "watermark"))
    for shard, those in sorted(ends.items()):
        latest = max(those, key=lambda each: each.end)
        mark = marks.get(shard)
        if mark is not None and mark < latest.end and not _explained(using, shard, mark, latest.end):
            yield (
                f"shard {shard:02d} says that its usage is complete until {when(mark)}, but report {latest.report} was"
                f" finalised, whose period ends at {when(latest.end)}"
            )
        for source in sources or (using,):
            yield from _came_after(using, source, shard, sorted(those))


def _ends(using: str) -> dict[int, set[_End]]:
    """Return where reports end, by shard; of several that end at one position, that of the longest period."""
    gaps = DurabilityGap.objects.using(using).filter(kind=GapKind.FORCED)
    forced = set(gaps.values_list("account", "since"))
    found: dict[int, dict[int, _End]] = {}
    columns = ("account", "period_start", "period_end", "version", "chain", "since")
    for report in Report.objects.using(using).filter(version=1).only(*columns).order_by().iterator(CHUNK):
        if not readable(report) or (report.account or ANONYMOUS, report.period_start) in forced:
            continue
        for shard, position in report.chain.items():
            at = found.setdefault(int(shard), {})
            if position not in at or at[position].end < report.period_end:
                at[position] = _End(position, report.period_end, str(report))
    return {shard: set(at.values()) for shard, at in found.items()}


def _came_after(using: str, source: str, shard: int, ends: list[_End]) -> Iterator[str]:
    """Name the first batch of a shard that was opened before the end of a period that had been closed."""
    batches = Batch.objects.using(source).filter(shard=shard, first_position__gt=ends[0].position)
    # What was accepted out of quarantine is a batch that no server has opened.
    batches = batches.exclude(incarnation__startswith="quarantine-").order_by("first_position")
    columns = ("shard", "incarnation", "seq", "first_position", "opened_at", "sealed_at")
    first, more, passed, latest = "", 0, 0, ends[0]
    for batch in batches.only(*columns).iterator(CHUNK):
        while passed < len(ends) and ends[passed].position < batch.first_position:
            latest, passed = max(latest, ends[passed], key=lambda each: each.end), passed + 1
        if batch.opened_at >= latest.end - TOLERANCE or _explained(using, shard, batch.opened_at, batch.sealed_at):
            continue
        if first:
            more += 1
            continue
        first = (
            f"batch {batch}, opened at {when(batch.opened_at)}, came after report {latest.report} had been finalised,"
            f" whose period ends at {when(latest.end)}: its shard was said to be complete, and no gap says why"
        )
    if first:
        yield f"{first}; so did {more:,} others" if more else first


def _explained(using: str, shard: int, since: int, until: int) -> bool:
    """Return whether a declared gap of the shard touches a time (µs since 1970 UTC)."""
    gaps = DurabilityGap.objects.using(using).filter(Q(shard=shard) | Q(shard=None), kind__in=_EXPLAIN)
    return gaps.filter(since__lte=max(since, until), until__gte=min(since, until)).exists()
