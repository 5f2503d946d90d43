"""Find the billing periods of an account.

A billing period is a month in the account's time zone. It begins at the account's anchor, a day and time of the month.
If the time zone or the anchor changes, the account's latest billing period with usage keeps its start and end. This
period is called the *kept period*.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime, tzinfo

from ratelimits.algorithms import calendar
from ratelimits.algorithms.calendar import boundaries

#: Minimum length (µs) of the first period after a kept period. If this first period would be shorter, it is joined with
#: the next month. Clocks of two time zones differ by at most 26 hours. So if only the time zone changes, the hours
#: between the end of the kept period and the next start of a month never become a billing period.
SHORTEST = 2 * 86_400_000_000

#: Start and end, in µs since 1970 UTC.
Span = tuple[int, int]
#: The starts of four periods, in µs since 1970 UTC.
FourStarts = tuple[int, int, int, int]


def period_name(label: str, start: int, timezone: str) -> str:
    """Return the name of a period for people: its month, and its first day if this is not the first of the month.

    `label` is the month of the period's last moment, such as "2026-02". An account can have two periods of a month, so
    the name "2026-02 (from 2026-01-31)" says which one it is. `start` is in µs since 1970 UTC. If the time zone no
    longer exists, UTC is used.
    """
    zone: tzinfo = UTC
    with suppress(ValueError):
        zone = calendar.zone(timezone)
    day = datetime.fromtimestamp(start // 1_000_000, zone).date().isoformat()
    return label if day == f"{label}-01" else f"{label} (from {day})"


def periods_around(timezone: str, anchor: str | None, kept: Span | None, now: int) -> FourStarts:
    """Return the starts of the previous billing period, the billing period that contains `now`, and the next two.

    The starts and `now` are in µs since 1970 UTC. Periods are months of `timezone` that begin at `anchor`. If there is
    a `kept` period, the next period starts at the end of the kept period. Raise ValueError as `boundaries` does.
    """
    if kept is None:
        return boundaries("month", timezone, anchor, now)
    start, end = kept
    if now < start:
        # The last month before the kept period ends at the start of the kept period.
        first, second, third, fourth = boundaries("month", timezone, anchor, now)
        if third >= start:
            return first, second, start, end
        return first, second, third, min(fourth, start)
    # `following` is the end of the first period after the kept period. It is the first start of a month which is at
    # least SHORTEST after `end`.
    _previous, _current, following, _later = boundaries("month", timezone, anchor, end + SHORTEST - 1)
    if now < end:
        _earlier, previous, _start, _next = boundaries("month", timezone, anchor, start - 1)
        return previous, start, end, following
    if now < following:
        _previous, _current, next_start, _later = boundaries("month", timezone, anchor, following)
        return start, end, following, next_start
    first, second, third, fourth = boundaries("month", timezone, anchor, now)
    # The period that ends at `following` starts at the end of the kept period.
    previous = end if second == following else first
    return previous, second, third, fourth
