"""Find billing periods: months, after the last period that a change of an account's terms left as it was."""

from __future__ import annotations

from ratelimits.algorithms.calendar import boundaries

#: If the first period under new terms would be shorter than this (µs), it is joined with the month after it. Clocks of
#: two time zones are at most 26 hours apart, so a new time zone alone never makes a short period.
SHORTEST = 2 * 86_400_000_000

#: Start and end, in µs since 1970 UTC.
Span = tuple[int, int]
Four = tuple[int, int, int, int]


def periods_around(timezone: str, anchor: str | None, kept: Span | None, now: int) -> Four:
    """Return the starts of the billing period around `now`, the one before and the two after it, in order, in µs.

    Periods are the months of `timezone` from `anchor`. The period `kept` stays as it is: the next period starts where
    it ends, and ends with a month. Raise ValueError as `boundaries` does.
    """
    if kept is None:
        return boundaries("month", timezone, anchor, now)
    start, end = kept
    if now < start:
        first, second, third, fourth = boundaries("month", timezone, anchor, now)
        return first, second, min(third, start), end if third >= start else min(fourth, start)
    following = boundaries("month", timezone, anchor, end + SHORTEST - 1)[2]
    if now < end:
        return boundaries("month", timezone, anchor, start - 1)[1], start, end, following
    if now < following:
        return start, end, following, boundaries("month", timezone, anchor, following)[2]
    first, second, third, fourth = boundaries("month", timezone, anchor, now)
    return end if second == following else first, second, third, fourth
