"""Which declared gaps a report of a period must print."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import lru_cache
from itertools import chain

from django.db.models import Q, QuerySet

from ratelimits.engine.keys import ANONYMOUS
from ratelimits.models import DurabilityGap
from ratelimits.reports.periods import iso

#: What the units of a gap are: those of lost replies may be in the ledger or not.
_UNITS = {"unknown": "at-most", "unmetered": "unmetered"}


#: A shard, and an account: None and "" for all of them.
_Place = tuple[int | None, str]


class Gaps:
    """The gaps that touch a span of time, read once and kept by the shard and the account that they are of."""

    def __init__(self, rows: Iterable[DurabilityGap]) -> None:
        self._by_place: dict[_Place, list[tuple[int, DurabilityGap]]] = {}
        for number, gap in enumerate(rows):
            self._by_place.setdefault((gap.shard, gap.account), []).append((number, gap))
        # Most accounts have no gap of their own: those of a shard have one text.
        self._text = lru_cache(maxsize=100)(self._text_of)

    @classmethod
    def between(
        cls, using: str, start: int, end: int, *, shards: Collection[int] | None = None, accounts: Collection[str] = ()
    ) -> Gaps:
        """Read those that overlap the half-open interval, in µs since 1970 UTC.

        With `shards` only those that concern these accounts in these shards.
        """
        rows = cls.rows(using, start, end)
        if shards is not None:
            names = {"", *(name or ANONYMOUS for name in accounts)}
            rows = rows.filter(Q(shard__in=shards) | Q(shard=None), account__in=names)
        return cls(rows)

    @staticmethod
    def rows(using: str, start: int, end: int) -> QuerySet[DurabilityGap]:
        """Return the rows of those that overlap the half-open interval, in the order in which they are printed."""
        rows = DurabilityGap.objects.using(using).filter(Q(since__lt=end), Q(until__gte=start))
        return rows.order_by("since", "event")

    def text(self, shard: int, account: str, start: int, end: int) -> str:
        """Return what a report line of that account, in that shard and period, says of them; "" for nothing."""
        places = [(place, name) for place in (None, shard) for name in ("", account or ANONYMOUS)]
        return self._text(tuple(place for place in places if place in self._by_place), start, end)

    def _text_of(self, places: tuple[_Place, ...], start: int, end: int) -> str:
        # By number, so in the order in which they were read.
        found = sorted(chain.from_iterable(self._by_place[place] for place in places), key=lambda each: each[0])
        return "; ".join(describe(gap) for _number, gap in found if gap.since < end and gap.until >= start)


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
