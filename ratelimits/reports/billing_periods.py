"""Find the billing periods of an account. They never overlap, and all usage belongs to one of them.

Each ledger line stores under which period its usage was counted: this is the line's *counted period*. Most counted
periods are billing periods. But counted periods can overlap. They overlap if raw SQL changed the account's time zone or
anchor day (the day of the month on which its periods start). They also overlap if an edit changed the time zone or the
anchor day while some usage was not in the ledger yet. Counted periods that overlap are one billing period.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from ratelimits.algorithms.billing_periods import SHORTEST
from ratelimits.models import Report
from ratelimits.reports.periods import MAX_LENGTH, SECOND

#: A function that takes the starts (µs) of counted periods. For each of these periods, it returns the moment (s since
#: 1970 UTC) of the last usage that was counted under this period.
LastUsed = Callable[[Collection[int]], Mapping[int, int]]


@dataclass(frozen=True, slots=True)
class BillingPeriod:
    """A billing period from `start` to `end`, both in µs since 1970 UTC.

    `members` are the starts (µs) of its counted periods. `closed` is true if the billing period has a report.
    """

    start: int
    end: int
    members: frozenset[int]
    closed: bool = False


def billing_starts(reports: Iterable[Report], ends: Mapping[int, int]) -> dict[int, int]:
    """Return the billing period of each counted period that has usage on reports.

    The keys are the starts of counted periods, and the values are the starts of billing periods. All moments are µs
    since 1970 UTC. `reports` are the account's reports, oldest first. `ends` has the end of each counted period, by its
    start.

    Usage belongs to the period of the report on which it first appeared. There is one exception: the first report of a
    period can also contain late usage of an earlier counted period. If closed periods contain almost all of this
    counted period, its usage belongs to one of these closed periods.
    """
    starts: dict[int, int] = {}
    closed: dict[int, BillingPeriod] = {}
    for report in reports:
        # The keys of `report.since` are the starts of the report's counted periods, in seconds.
        for start in (int(seconds) * SECOND for seconds in report.since):
            if start in starts:
                continue
            earlier = None
            if report.version == 1 and start != report.period_start:
                earlier = _closed_period_of(closed.values(), start, ends.get(start, start))
            starts[start] = report.period_start if earlier is None else earlier.start
        closed[report.period_start] = BillingPeriod(report.period_start, report.period_end, frozenset(), closed=True)
    return starts


def reported_periods(reports: Collection[Report], ends: Mapping[int, int]) -> list[BillingPeriod]:
    """Return the billing periods of an account that have reports. `reports` must be sorted, oldest first."""
    starts = billing_starts(reports, ends)
    spans = {report.period_start: report.period_end for report in reports}
    return [
        BillingPeriod(
            start,
            end,
            frozenset({start} | {counted for counted, billed in starts.items() if billed == start}),
            closed=True,
        )
        for start, end in spans.items()
    ]


def billing_periods(
    used: Mapping[int, int], reported: Iterable[BillingPeriod], last_used: LastUsed
) -> list[BillingPeriod]:
    """Return an account's billing periods, sorted by their starts.

    `used` has the end of each counted period, by its start. `reported` are the billing periods that have a report.

    A counted period with usage on reports belongs to a reported period. Any other counted period that overlaps reported
    periods is shortened to its free part, which no reported period contains. If the free part is too short, the counted
    period belongs to one of the reported periods.

    Counted periods that overlap each other are joined to one billing period. It starts with the first of these counted
    periods, and ends with the counted period that was used last. If a counted period would make this billing period
    longer than MAX_LENGTH, the part of the counted period after this billing period becomes the next billing period.
    If this part is too short, the counted period belongs to this billing period, which keeps its end.
    """
    closed = {period.start: period for period in reported}
    open_: list[BillingPeriod] = []
    for start, end in sorted(used.items()):
        with_member = (period for period in closed.values() if start in period.members)
        closed_period = next(with_member, None) or _closed_period_of(closed.values(), start, end)
        if closed_period is not None:
            members = closed_period.members | {start}
            closed[closed_period.start] = BillingPeriod(closed_period.start, closed_period.end, members, closed=True)
            continue
        free_start, free_end = _free_span(closed.values(), start, end)
        previous = open_[-1] if open_ else None
        if previous is None or previous.end <= free_start:
            open_.append(BillingPeriod(free_start, free_end, frozenset({start})))
            continue
        members = previous.members | {start}
        # The billing period ends with the member that was used last, or earlier: at the start of a reported period.
        _, joined_end = _free_span(closed.values(), previous.start, _last_end(members, used, last_used(members)))
        if joined_end - previous.start < SHORTEST:
            # A billing period must not be shorter than SHORTEST. So end it with the member that ends last.
            joined_end = max(free_end, previous.end)
        if joined_end - previous.start <= MAX_LENGTH:
            open_[-1] = BillingPeriod(previous.start, joined_end, members)
        elif free_end - previous.end >= SHORTEST:
            # The part of the counted period after the previous billing period is long enough for a billing period.
            open_.append(BillingPeriod(previous.end, free_end, frozenset({start})))
        else:
            # This part is too short. So the counted period belongs to the previous billing period, which keeps its end.
            open_[-1] = BillingPeriod(previous.start, previous.end, members)
    return sorted([*closed.values(), *open_], key=lambda billing_period: billing_period.start)


def _last_end(members: Collection[int], ends: Mapping[int, int], used_at: Mapping[int, int]) -> int:
    """Return the end of the member that was used last. The members are counted periods, given by their starts.

    The ledger stores only the bin of usage, so perhaps several members were used in the last bin. Then prefer members
    at whose end another counted period starts, because the next counted period follows the member that was used last.
    If several members remain, take the member that starts last.
    """
    last_use = max(used_at.get(member, 0) for member in members)
    used_last = sorted(member for member in members if used_at.get(member, 0) == last_use)
    adjacent_ends = [ends[member] for member in used_last if ends[member] in ends]
    return adjacent_ends[-1] if adjacent_ends else ends[used_last[-1]]


def _free_span(closed: Iterable[BillingPeriod], start: int, end: int) -> tuple[int, int]:
    """Return the start and the end of the free part of a counted period: no reported period overlaps this part.

    If there is no free part, the end is not after the start.
    """
    reported = list(closed)
    free_start = max([start, *(period.end for period in reported if period.start <= start)])
    return free_start, min([end, *(period.start for period in reported if period.start >= free_start)])


def _closed_period_of(closed: Iterable[BillingPeriod], start: int, end: int) -> BillingPeriod | None:
    """Return the reported period that a counted period belongs to; None if there is no such period.

    A counted period belongs to a reported period if the free part of the counted period (see `_free_span`) is shorter
    than SHORTEST. If several reported periods overlap the counted period, take the reported period that contains the
    start of the counted period. If there is none, take the first reported period that starts within the counted period.
    """
    reported = list(closed)
    free_start, free_end = _free_span(reported, start, end)
    if free_end - free_start >= SHORTEST:
        return None
    containing_start = (period for period in reported if period.start <= start < period.end)
    starting_within = (period for period in reported if free_start <= period.start < end)
    return next(containing_start, None) or min(
        starting_within, key=lambda billing_period: billing_period.start, default=None
    )
