"""Which declared gaps a report of a period must print."""

from __future__ import annotations

from dataclasses import dataclass

from django.db.models import Q

from ratelimits.models import DurabilityGap
from ratelimits.models.ledger import ANONYMOUS
from ratelimits.reports.periods import iso

#: What the units of a gap are: those of lost replies may be in the ledger or not.
_UNITS = {"unknown": "at-most", "unmetered": "unmetered"}


@dataclass(frozen=True, slots=True)
class Gaps:
    """The gaps that touch a span of time, read once."""

    rows: tuple[DurabilityGap, ...]

    @classmethod
    def between(cls, using: str, start: int, end: int) -> Gaps:
        """Those that overlap the half-open interval, in µs since 1970 UTC."""
        rows = DurabilityGap.objects.using(using).filter(Q(since__lt=end), Q(until__gte=start))
        return cls(tuple(rows.order_by("since", "event")))

    def text(self, shard: int, account: str, start: int, end: int) -> str:
        """What a report line of that account, in that shard and period, says of them; "" where there is none."""
        return "; ".join(
            describe(gap)
            for gap in self.rows
            if gap.since < end
            and gap.until >= start
            and gap.shard in (None, shard)
            and gap.account in ("", account or ANONYMOUS)
        )


def describe(gap: DurabilityGap) -> str:
    """One gap, for a cell of a report."""
    parts = [gap.kind, f"{iso(gap.since)}/{iso(gap.until)}"]
    if gap.fsync:
        parts.append(f"appendfsync={gap.fsync}")
    if gap.units is not None:
        parts.append(f"{_UNITS.get(gap.kind, 'missing')}={gap.units}")
    if gap.recovered_at is not None:
        parts.append("recovered")
    return " ".join(parts)
