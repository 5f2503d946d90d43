"""Find the billing periods of an account.

A billing period is a month in the account's time zone. It begins at the account's anchor, a day and time of the month.
Once a period is used, it is *frozen*: it keeps its start and its end, even if the time zone or the anchor changes.
Between frozen periods, the account's present time zone and anchor say where periods begin.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from functools import lru_cache
from typing import NamedTuple

from ratelimits.algorithms import calendar
from ratelimits.algorithms.calendar import boundaries

_SECOND = 1_000_000
#: Usage is counted in bins of this length (µs), so periods start and end at quarters of an hour.
QUARTER = 900 * _SECOND
_DAY = 86_400 * _SECOND
#: Minimum distance (µs) of a month's start from a frozen period. Nearer starts are left out. Clocks of two time zones
#: differ by at most 26 hours. So if only the time zone changes, the hours between the end of a frozen period and the
#: next start of a month never become a period.
SHORTEST = 2 * _DAY
#: Number of months of which the starts must be at quarters of an hour (see `check_terms`).
_CHECKED_MONTHS = 24
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

#: Start and end, in µs since 1970 UTC.
Span = tuple[int, int]
#: Frozen periods, sorted.
Frozen = tuple[Span, ...]
#: The starts of four periods, in µs since 1970 UTC.
FourStarts = tuple[int, int, int, int]


class PeriodTerms(NamedTuple):
    """What the billing periods of an account depend on. The default values are those of a request without an account.

    timezone  the account's time zone
    anchor    a local date and time (ISO) at which one period starts; None for calendar months
    frozen    the newest frozen periods that these terms alone do not give
    """

    timezone: str = "UTC"
    anchor: str | None = None
    frozen: Frozen = ()


def zone_or_utc(timezone: str) -> tzinfo:
    """Return a time zone by its name; UTC if it no longer exists."""
    with suppress(ValueError):
        return calendar.zone(timezone)
    return UTC


def month_of(at: int, timezone: str) -> str:
    """Return the month, like "2026-11", of a moment (µs) in a time zone; in UTC if the zone no longer exists."""
    return f"{(_EPOCH + timedelta(microseconds=at)).astimezone(zone_or_utc(timezone)):%Y-%m}"


def period_name(label: str, start: int, timezone: str) -> str:
    """Return the name of a period for people: its month, and its first day if this is not the first of the month.

    `label` is the month of the period's last moment, such as "2026-02". An account can have two periods of a month, so
    the name "2026-02 (from 2026-01-31)" says which one it is. `start` is in µs since 1970 UTC. If the time zone no
    longer exists, UTC is used.
    """
    day = datetime.fromtimestamp(start // _SECOND, zone_or_utc(timezone)).date().isoformat()
    return label if day == f"{label}-01" else f"{label} (from {day})"


@dataclass(frozen=True, slots=True, order=True)
class Period:
    """One billing period of one account; start and end in µs since 1970 UTC.

    `label` is the month of the period's last moment, like "2026-11", by the calendar of the period's time zone. A
    period belongs to the file, the manifest and the filter of this month. So each period of a month is over when the
    month is over in the westernmost time zone.
    """

    start: int
    end: int
    timezone: str
    label: str

    @property
    def name(self) -> str:
        """Return the name of the period for people, such as "2026-11" or "2026-02 (from 2026-01-31)"."""
        return period_name(self.label, self.start, self.timezone)

    def local_start(self) -> str:
        """Return the start of the period as a local time of its time zone, such as "2026-01-01 00:00"."""
        return self._local(self.start)

    def local_end(self) -> str:
        """Return the end of the period as a local time of its time zone, such as "2026-02-01 00:00"."""
        return self._local(self.end)

    def _local(self, at: int) -> str:
        return f"{(_EPOCH + timedelta(microseconds=at)).astimezone(zone_or_utc(self.timezone)):%Y-%m-%d %H:%M}"


def check_terms(timezone: str, anchor: str | None, now: int) -> None:
    """Raise ValueError if the months of a time zone and an anchor cannot be billing periods.

    The time zone and the anchor must be valid, and the next months must start at quarters of an hour. `now` is in µs
    since 1970 UTC.
    """
    if not _starts_at_quarters(timezone, anchor or None, now // _DAY * _DAY):
        what = f"the anchor {anchor!r} is" if anchor else f"the months of {timezone} start"
        raise ValueError(f"{what} not at a quarter of an hour, but usage is counted in quarters of an hour")


@lru_cache(maxsize=1024)  # imports check many accounts
def _starts_at_quarters(timezone: str, anchor: str | None, now: int) -> bool:
    starts = [now]
    for _month in range(_CHECKED_MONTHS):
        starts.append(boundaries("month", timezone, anchor, starts[-1])[2])
    return not any(start % QUARTER for start in starts[1:])


def _months(timezone: str, anchor: str | None, at: int) -> FourStarts:
    """Return the starts of the months around `at`, as `boundaries` does. A start within a quarter is its beginning."""
    starts = boundaries("month", timezone, anchor or None, at - at % QUARTER + QUARTER - 1)
    first, second, third, fourth = (start - start % QUARTER for start in starts)
    return first, second, third, fourth


def span_between(timezone: str, anchor: str | None, low: int | None, high: int | None, at: int) -> Span:
    """Return the period that contains `at`, between a frozen period that ends at `low` and one that starts at `high`.

    Periods begin at `low`, at `high`, and at each start of a month that is at least SHORTEST from both. None stands for
    no frozen period. Raise ValueError as `boundaries` does.
    """
    start = _months(timezone, anchor, at if high is None else min(at, high - SHORTEST))[1]
    if low is not None and start < low + SHORTEST:
        start = low
    end = _months(timezone, anchor, at if low is None else max(at, low + SHORTEST - 1))[2]
    if high is not None and end > high - SHORTEST:
        end = high
    return start, end


def _span_at(timezone: str, anchor: str | None, frozen: Iterable[Span], at: int) -> Span:
    """Return the period that contains a moment. `frozen` are frozen periods, sorted."""
    low = high = None
    for start, end in frozen:
        if start <= at < end:
            return start, end
        if end <= at:
            low = end
        elif high is None:
            high = start
    return span_between(timezone, anchor, low, high, at)


def periods_around(timezone: str, anchor: str | None, frozen: Frozen, now: int) -> FourStarts:
    """Return the starts of the previous billing period, the billing period that contains `now`, and the next two.

    The starts and `now` are in µs since 1970 UTC. `frozen` is as in PeriodTerms. Raise ValueError as `boundaries` does.
    """
    if not frozen:
        return _months(timezone, anchor, now)
    start, end = _span_at(timezone, anchor, frozen, now)
    previous, _start = _span_at(timezone, anchor, frozen, start - 1)
    _start, later = _span_at(timezone, anchor, frozen, end)
    return previous, start, end, later


@lru_cache(maxsize=1024)
def valid_terms(timezone: str, anchor: str | None) -> tuple[str, str | None]:
    """Return the time zone and the anchor; calendar months in UTC if one of them is not valid."""
    try:
        boundaries("month", timezone, anchor or None, 10**15)
    except ValueError:
        return "UTC", None
    return timezone, anchor or None


class Timeline:
    """All billing periods of an account: its frozen periods, and the periods that its present terms give between them.

    If the time zone or the anchor is not valid, months are those of the calendar in UTC.
    """

    def __init__(self, timezone: str = "UTC", anchor: str | None = None, frozen: Iterable[Period] = ()) -> None:
        self.timezone, self.anchor = valid_terms(timezone, anchor)
        #: The frozen periods, sorted.
        self.frozen = sorted(frozen)

    def at(self, moment: int) -> Period:
        """Return the billing period that contains a moment (µs since 1970 UTC)."""
        following = bisect_right(self.frozen, moment, key=_start)
        before = self.frozen[following - 1] if following else None
        if before is not None and moment < before.end:
            return before
        low = None if before is None else before.end
        high = self.frozen[following].start if following < len(self.frozen) else None
        start, end = span_between(self.timezone, self.anchor, low, high, moment)
        return Period(start, end, self.timezone, month_of(end - 1, self.timezone))

    def frozen_at(self, moment: int) -> Period | None:
        """Return the frozen period that contains a moment (µs since 1970 UTC); None if there is none."""
        following = bisect_right(self.frozen, moment, key=_start)
        before = self.frozen[following - 1] if following else None
        return before if before is not None and moment < before.end else None

    def is_frozen(self, period: Period) -> bool:
        """Return whether a period is one of the frozen periods."""
        place = bisect_left(self.frozen, period.start, key=_start)
        return self.frozen[place : place + 1] == [period]

    def freeze(self, period: Period) -> None:
        """Add a period to the frozen periods."""
        insort(self.frozen, period)

    def freeze_until(self, now: int) -> list[Period]:
        """Freeze all periods from the first frozen one to the one at `now` (µs since 1970 UTC). Return the new ones.

        An edit of the time zone or of the anchor does this, so that it changes only later periods.
        """
        new = []
        start = self.frozen[0].start if self.frozen else now + 1
        while start <= now:
            period = self.at(start)
            if not self.is_frozen(period):
                self.freeze(period)
                new.append(period)
            start = period.end
        return new

    def between(self, start: int, end: int) -> list[Period]:
        """Return the billing periods that overlap a span (µs since 1970 UTC)."""
        periods = []
        while start < end:
            periods.append(self.at(start))
            start = periods[-1].end
        return periods

    def terms(self) -> PeriodTerms:
        """Return the terms with which `periods_around` gives the newest periods of this timeline."""
        needed: list[Span] = []
        for period in self.frozen:
            span = period.start, period.end
            if _span_at(self.timezone, self.anchor, needed, period.start) != span:
                needed.append(span)
        return PeriodTerms(self.timezone, self.anchor, tuple(needed))


def _start(period: Period) -> int:
    return period.start
