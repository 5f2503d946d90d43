"""Verify that no period was closed before all its usage was in the ledger.

A period is closed when the watermarks of all shards of its account have passed its end. Each batch that was opened
before the watermark of its shard must be in the ledger. So if a batch was opened before the end of a report's period,
but arrived after the report was finalised, the watermark was wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ratelimits.billing.models import Report
from ratelimits.billing.reports.build import CHUNK
from ratelimits.billing.reports.gaps import forced_event
from ratelimits.billing.reports.verify.report import has_readable_positions
from ratelimits.moments import when
from ratelimits.usage.ledger.watermark import TOLERANCE
from ratelimits.usage.models import Batch, DurabilityGap, GapKind, ShardState
from ratelimits.usage.models.gaps import of_shard

#: If a gap of one of these kinds is declared, batches can be late or can have wrong times.
_EXPLAINING_KINDS = (
    *(GapKind.RESTART, GapKind.INCARNATION, GapKind.MISSING, GapKind.ROLLBACK),
    *(GapKind.WIPE, GapKind.SUM, GapKind.FORK, GapKind.CLOCK),
)


class _ReportEnd(NamedTuple):
    """The last batch of a shard that a report contains, and the end of this report's period.

    `position` is the position of this batch in the shard's chain. `period_end` is in µs since 1970 UTC. `report` is the
    name of the report.
    """

    position: int
    period_end: int
    report: str


def verify_early(using: str, *sources: str) -> Iterator[str]:
    """Yield an error for each shard whose usage was not complete when a report was finalised.

    `sources` are the aliases of the databases that contain the ledger's batches, by default `using`. Periods that were
    closed by force are left out: their reports say that usage may be missing.
    """
    # Read reports first, then watermarks, then gaps. In this order, each watermark is at least as new as the reports.
    ends = _ends(using)
    watermarks = dict(ShardState.objects.using(using).values_list("shard", "watermark"))
    for shard, shard_ends in sorted(ends.items()):
        latest = max(shard_ends, key=lambda end: end.period_end)
        watermark = watermarks.get(shard)
        if (
            watermark is not None
            and watermark < latest.period_end
            and not _is_explained(using, shard, watermark, latest.period_end)
        ):
            yield (
                f"shard {shard:02d} says that its usage is complete until {when(watermark)}. But report"
                f" {latest.report} is final, and its period ends later, at {when(latest.period_end)}"
            )
        for source in sources or (using,):
            yield from _late_batches(using, source, shard, sorted(shard_ends))


def _ends(using: str) -> dict[int, set[_ReportEnd]]:
    """Return the ends of reports, by shard.

    If several reports have the same last batch, return only the end with the latest `period_end`.
    """
    forced = set(DurabilityGap.objects.using(using).filter(kind=GapKind.FORCED).values_list("event", flat=True))
    by_shard: dict[int, dict[int, _ReportEnd]] = {}
    columns = ("account", "customer", "timezone", "label", "period_start", "period_end", "version", "chain", "since")
    for report in Report.objects.using(using).filter(version=1).only(*columns).order_by().iterator(CHUNK):
        if not has_readable_positions(report) or forced_event(report.customer_id, report.period_start) in forced:
            continue
        for shard, position in report.chain.items():
            by_position = by_shard.setdefault(int(shard), {})
            if position not in by_position or by_position[position].period_end < report.period_end:
                by_position[position] = _ReportEnd(position, report.period_end, str(report))
    return {shard: set(by_position.values()) for shard, by_position in by_shard.items()}


def _late_batches(using: str, source: str, shard: int, ends: list[_ReportEnd]) -> Iterator[str]:
    """Yield an error that names the first late batch of a shard and counts the others. `ends` is sorted by position.

    A batch is late if it was opened before the end of a period, but arrived after the period's report was finalised.
    """
    batches = Batch.objects.using(source).filter(shard=shard, first_position__gt=ends[0].position)
    # Leave out batches that were accepted from quarantine: their `opened_at` was set when they were accepted.
    batches = batches.exclude(incarnation__startswith="quarantine-").order_by("first_position")
    columns = ("shard", "incarnation", "seq", "first_position", "opened_at", "sealed_at")
    # `passed` is the number of ends before the current batch. Of these ends, `latest` has the latest `period_end`.
    passed, latest = 0, ends[0]
    first_error, more = "", 0
    for batch in batches.only(*columns).iterator(CHUNK):
        while passed < len(ends) and ends[passed].position < batch.first_position:
            latest = max(latest, ends[passed], key=lambda end: end.period_end)
            passed += 1
        # The clocks of two machines can differ by at most TOLERANCE.
        in_time = batch.opened_at >= latest.period_end - TOLERANCE
        if in_time or _is_explained(using, shard, batch.opened_at, batch.sealed_at):
            continue
        if first_error:
            more += 1
            continue
        first_error = (
            f"batch {batch}, opened at {when(batch.opened_at)}, arrived after report {latest.report} was finalised. The"
            f" report's period ends at {when(latest.period_end)}. So the watermark of the shard was wrong, and no gap"
            " explains why"
        )
    if first_error:
        yield f"{first_error}; {more:,} more batches arrived too late" if more else first_error


def _is_explained(using: str, shard: int, since: int, until: int) -> bool:
    """Return whether a gap of a kind in `_EXPLAINING_KINDS` is declared for the shard between two moments (µs)."""
    gaps = DurabilityGap.objects.using(using).filter(of_shard(shard), kind__in=_EXPLAINING_KINDS)
    return gaps.filter(since__lte=max(since, until), until__gte=min(since, until)).exists()
