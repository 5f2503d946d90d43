"""The billing periods that an account's usage belongs to: they never overlap, and all usage is in one of them.

Usage is counted under a period, its counted period. Counted periods overlap only if some usage was not in the ledger
yet when the account's terms changed, or if raw SQL changed the terms. Such overlapping periods are billed as one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from ratelimits.algorithms.billing_periods import SHORTEST
from ratelimits.models import Report
from ratelimits.reports.periods import MAX_LENGTH, SECOND

#: Receives the starts (µs) of counted periods, and returns for each start when its usage was last counted (s since
#: 1970 UTC).
LastUsed = Callable[[Collection[int]], Mapping[int, int]]


@dataclass(frozen=True, slots=True)
class BillingPeriod:
    """A billing period from `start` to `end`; `members` are the starts of the counted periods that belong to it.

    All moments are µs since 1970 UTC. `closed` says whether it has a report.
    """

    start: int
    end: int
    members: frozenset[int]
    closed: bool = False


def billing_starts(reports: Iterable[Report], ends: Mapping[int, int]) -> dict[int, int]:
    """Return, for the start of each counted period, the start of the reported period that its usage belongs to.

    All moments are µs since 1970 UTC. `reports` are the account's, oldest first; `ends` are the ends of the counted
    periods. Usage belongs to the period that reported it first. But if that was the first report of another period than
    the counted one, and closed periods overlap almost all of the counted period, the usage belongs to one of these.
    """
    starts: dict[int, int] = {}
    closed: dict[int, BillingPeriod] = {}
    for report in reports:
        for start in (int(period) * SECOND for period in report.since):
            if start in starts:
                continue
            earlier = None
            if report.version == 1 and start != report.period_start:
                earlier = _around(closed.values(), start, ends.get(start, start))
            starts[start] = report.period_start if earlier is None else earlier.start
        closed[report.period_start] = BillingPeriod(report.period_start, report.period_end, frozenset(), closed=True)
    return starts


def reported_periods(reports: Collection[Report], ends: Mapping[int, int]) -> list[BillingPeriod]:
    """Return the billing periods of an account that have reports; the reports must be sorted oldest first."""
    starts = billing_starts(reports, ends)
    spans = {report.period_start: report.period_end for report in reports}
    return [
        BillingPeriod(
            start, end, frozenset({start} | {counted for counted, own in starts.items() if own == start}), closed=True
        )
        for start, end in spans.items()
    ]


def billing_periods(
    used: Mapping[int, int], reported: Iterable[BillingPeriod], last_used: LastUsed
) -> list[BillingPeriod]:
    """Return an account's billing periods, sorted by their starts.

    `used` has the end of each counted period, by its start. `reported` are the billing periods that have a report. A
    counted period that overlaps reported ones is shortened to the time between them, or, if that is too short, belongs
    to one of them. Counted periods that overlap each other are one billing period, from the start of the first to the
    end of the one that was used last. If this would be longer than MAX_LENGTH, the one that starts last becomes a
    billing period of its own, which starts where the others end.
    """
    closed = {period.start: period for period in reported}
    open_: list[BillingPeriod] = []
    for start, end in sorted(used.items()):
        having = (period for period in closed.values() if start in period.members)
        overlapped = next(having, None) or _around(closed.values(), start, end)
        if overlapped is not None:
            closed[overlapped.start] = BillingPeriod(
                overlapped.start, overlapped.end, overlapped.members | {start}, closed=True
            )
            continue
        begin, until = _between(closed.values(), start, end)
        last = open_[-1] if open_ else None
        if last is None or last.end <= begin:
            open_.append(BillingPeriod(begin, until, frozenset({start})))
            continue
        members = last.members | {start}
        _, ended = _between(closed.values(), last.start, _last_end(members, used, last_used(members)))
        joined = BillingPeriod(last.start, ended if ended - last.start >= SHORTEST else max(until, last.end), members)
        if joined.end - joined.start <= MAX_LENGTH:
            open_[-1] = joined
        elif until - last.end >= SHORTEST:
            open_.append(BillingPeriod(last.end, until, frozenset({start})))
        else:
            open_[-1] = BillingPeriod(last.start, last.end, members)
    return sorted([*closed.values(), *open_], key=lambda billing_period: billing_period.start)


def _last_end(members: Collection[int], ends: Mapping[int, int], used_at: Mapping[int, int]) -> int:
    """Return the end of the counted period, among `members`, that was used last.

    The time of a use is known only to the quarter of an hour. If several periods were used in the last quarter, prefer
    those at whose end another counted period starts. If there are still several, take the one that starts last.
    """
    newest = max(used_at.get(member, 0) for member in members)
    latest = sorted(member for member in members if used_at.get(member, 0) == newest)
    followed = [ends[member] for member in latest if ends[member] in ends]
    return followed[-1] if followed else ends[latest[-1]]


def _between(closed: Iterable[BillingPeriod], start: int, end: int) -> tuple[int, int]:
    """Return start and end of what reported periods leave of a counted one; if they leave nothing, end <= start."""
    reported = list(closed)
    begin = max([start, *(period.end for period in reported if period.start <= start)])
    return begin, min([end, *(period.start for period in reported if period.start >= begin)])


def _around(closed: Iterable[BillingPeriod], start: int, end: int) -> BillingPeriod | None:
    """Return the reported period that a counted period belongs to, or None.

    It belongs to one if reported periods leave less of it than SHORTEST. If several reported periods overlap it, it
    belongs to the one that contains its start, otherwise to the first that starts within it.
    """
    reported = list(closed)
    begin, until = _between(reported, start, end)
    if until - begin >= SHORTEST:
        return None
    before = (period for period in reported if period.start <= start < period.end)
    after = (period for period in reported if begin <= period.start < end)
    return next(before, None) or min(after, key=lambda billing_period: billing_period.start, default=None)
