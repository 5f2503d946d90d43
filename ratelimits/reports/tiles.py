"""Which billing periods an account's usage belongs to: they never overlap, and all usage is in one of them.

Usage was counted under periods that do not overlap either, but for some of before an edit that it did not know of: it
was not in the ledger yet when the account's terms changed, or raw SQL changed them. Such periods are billed as one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from ratelimits.models import Report
from ratelimits.reports.periods import SECOND

#: When (s since 1970 UTC) usage of periods, given by their starts in µs, last came.
LastUsed = Callable[[Collection[int]], Mapping[int, int]]


@dataclass(frozen=True, slots=True)
class Tile:
    """A billing period, from `start` to `end`, and the starts of the periods that its usage was counted under.

    All in µs since 1970 UTC. `closed`: it has a report.
    """

    start: int
    end: int
    members: frozenset[int]
    closed: bool = False

    def holds(self, start: int, end: int) -> bool:
        """Return whether a span lies within it."""
        return self.start <= start and end <= self.end


def homes(reports: Iterable[Report], ends: Mapping[int, int]) -> dict[int, int]:
    """Return the start of the reported period that the usage of each counted period belongs to, by that one's start.

    All in µs since 1970 UTC; `reports` are an account's, oldest first, `ends` the ends of counted periods. Usage
    belongs to the period that reported it first, or, carried by a later one's report, to the one that lies around it.
    """
    found: dict[int, int] = {}
    spans: dict[int, int] = {}
    for report in reports:
        for start in (int(period) * SECOND for period in report.since):
            around = (
                begun
                for begun, end in spans.items()
                if report.version == 1 and begun <= start and ends.get(start, start) <= end
            )
            if start not in found:
                found[start] = (
                    report.period_start if start == report.period_start else next(around, report.period_start)
                )
        spans[report.period_start] = report.period_end
    return found


def reported_tiles(reports: Collection[Report], ends: Mapping[int, int]) -> list[Tile]:
    """Return the billing periods that an account has reports of, these being oldest first."""
    home = homes(reports, ends)
    spans = {report.period_start: report.period_end for report in reports}
    return [
        Tile(start, end, frozenset({start} | {each for each, its in home.items() if its == start}), closed=True)
        for start, end in spans.items()
    ]


def tiles(used: Mapping[int, int], reported: Iterable[Tile], last_used: LastUsed) -> list[Tile]:
    """Return an account's billing periods in their order.

    `used` are the periods that usage was counted under, end by start; `reported` the periods that have a report. One
    that overlaps a reported one starts where that ends. Several that overlap are one: from the start of the first to
    the end of the one that was used last.
    """
    closed = {tile.start: tile for tile in reported}
    open_: list[Tile] = []
    for start, end in sorted(used.items()):
        home = _home(closed.values(), start, end)
        if home is not None:
            closed[home.start] = Tile(home.start, home.end, home.members | {start}, closed=True)
            continue
        begin = max([start, *(tile.end for tile in closed.values() if tile.start <= start)])
        until = min([end, *(tile.start for tile in closed.values() if tile.start >= begin)])
        if until <= begin:  # nothing of it is left between reported ones
            before = max((tile for tile in closed.values() if tile.start <= start), key=lambda tile: tile.end)
            closed[before.start] = Tile(before.start, before.end, before.members | {start}, closed=True)
            continue
        last = open_[-1] if open_ else None
        if last is None or last.end <= begin:
            open_.append(Tile(begin, until, frozenset({start})))
            continue
        members = last.members | {start}
        used_at = last_used(members)
        newest = max(members, key=lambda member: (used_at.get(member, 0), member))
        open_[-1] = Tile(last.start, until if newest == start else last.end, members)
    return sorted([*closed.values(), *open_], key=lambda tile: tile.start)


def _home(closed: Iterable[Tile], start: int, end: int) -> Tile | None:
    """Return the reported period that a counted one belongs to: that has had its usage, or lies around it."""
    found = list(closed)
    having = (tile for tile in found if start in tile.members)
    around = (tile for tile in found if tile.holds(start, end))
    return next(having, None) or next(around, None)
