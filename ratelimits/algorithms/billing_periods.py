"""Find the billing periods of an account.

A billing period is a month in the account's time zone, from the account's anchor (its day and time of the month) on. If
the time zone or the anchor changes, the billing period of that moment keeps its start and end. It is the kept period.
"""

from __future__ import annotations

from ratelimits.algorithms.calendar import boundaries

#: If the first period after a kept period would be shorter than this (µs), it is joined with the next month. Clocks of
#: two time zones differ by at most 26 hours, so a new time zone alone does not make an extra short period.
SHORTEST = 2 * 86_400_000_000

#: Start and end, in µs since 1970 UTC.
Span = tuple[int, int]
Four = tuple[int, int, int, int]


def periods_around(timezone: str, anchor: str | None, kept: Span | None, now: int) -> Four:
    """Return the starts of the previous billing period, the one around `now`, and the next two, in µs since 1970 UTC.

    Periods are the months of `timezone` from `anchor`. If there is a `kept` period, the next period starts at its end.
    Raise the errors of `boundaries`.
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
