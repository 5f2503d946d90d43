"""Which billing periods an account's usage belongs to: they never overlap, and all usage is in one of them.

Usage was counted under periods that do not overlap either, but for some of before an edit that it did not know of: it
was not in the ledger yet when the account's terms changed, or raw SQL changed them. Such periods are billed as one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from ratelimits.algorithms.billing_periods import SHORTEST
from ratelimits.models import Report
from ratelimits.reports.periods import LONGEST, SECOND

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


def homes(reports: Iterable[Report], ends: Mapping[int, int]) -> dict[int, int]:
    """Return the start of the reported period that the usage of each counted period belongs to, by that one's start.

    All in µs since 1970 UTC; `reports` are an account's, oldest first, `ends` the ends of counted periods. Usage
    belongs to the period that reported it first, or, carried by a later one's report, to the one that had closed
    around it.
    """
    found: dict[int, int] = {}
    closed: dict[int, Tile] = {}
    for report in reports:
        for start in (int(period) * SECOND for period in report.since):
            if start in found:
                continue
            home = None
            if report.version == 1 and start != report.period_start:
                home = _around(closed.values(), start, ends.get(start, start))
            found[start] = home.start if home is not None else report.period_start
        closed[report.period_start] = Tile(report.period_start, report.period_end, frozenset(), closed=True)
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
    that overlaps reported ones is what lies between them, or, where that is short, belongs to one of them. Several that
    overlap are one: from the start of the first to the end of the one that was used last. If that were longer than a
    billing period can be, the last of them starts where the others end.
    """
    closed = {tile.start: tile for tile in reported}
    open_: list[Tile] = []
    for start, end in sorted(used.items()):
        having = (tile for tile in closed.values() if start in tile.members)
        home = next(having, None) or _around(closed.values(), start, end)
        if home is not None:
            closed[home.start] = Tile(home.start, home.end, home.members | {start}, closed=True)
            continue
        begin, until = _between(closed.values(), start, end)
        last = open_[-1] if open_ else None
        if last is None or last.end <= begin:
            open_.append(Tile(begin, until, frozenset({start})))
            continue
        members = last.members | {start}
        used_at = last_used(members)
        newest = max(members, key=lambda member: (used_at.get(member, 0), member))
        ended = until if newest == start else last.end
        joined = Tile(last.start, ended if ended - last.start >= SHORTEST else max(until, last.end), members)
        if joined.end - joined.start <= LONGEST:
            open_[-1] = joined
        elif until - last.end >= SHORTEST:
            open_.append(Tile(last.end, until, frozenset({start})))
        else:
            open_[-1] = Tile(last.start, last.end, members)
    return sorted([*closed.values(), *open_], key=lambda tile: tile.start)


def _between(closed: Iterable[Tile], start: int, end: int) -> tuple[int, int]:
    """Return the part of a counted period that lies between reported ones; it begins after its end if there is none."""
    found = list(closed)
    begin = max([start, *(tile.end for tile in found if tile.start <= start)])
    return begin, min([end, *(tile.start for tile in found if tile.start >= begin)])


def _around(closed: Iterable[Tile], start: int, end: int) -> Tile | None:
    """Return the reported period that a counted one belongs to: one overlaps it and leaves nothing, or little, of it.

    Little is less than the shortest billing period. The one that it begins in goes before the one that it ends in.
    """
    found = list(closed)
    begin, until = _between(found, start, end)
    if until - begin >= SHORTEST:
        return None
    before = (tile for tile in found if tile.start <= start < tile.end)
    after = (tile for tile in found if begin <= tile.start < end)
    return next(before, None) or min(after, key=lambda tile: tile.start, default=None)
