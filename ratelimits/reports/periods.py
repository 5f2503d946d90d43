"""Calculate billing periods: calendar months in an account's time zone, or months that start at its anchor day.

Moments are µs since 1970 UTC. A period includes its start and excludes its end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from functools import lru_cache

from ratelimits.algorithms import calendar
from ratelimits.algorithms.billing_periods import Span, period_name, periods_around

SECOND = 1_000_000
#: Maximum length of a billing period (µs): two months of 31 days and two more days.
MAX_LENGTH = 64 * 86_400 * SECOND
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
#: Matches a month like "2026-11": its year and its number.
_MONTH = re.compile(r"([0-9]{4})-(0[1-9]|1[0-2])")


@dataclass(frozen=True, slots=True, order=True)
class Period:
    """One billing period of one account; start and end in µs since 1970 UTC."""

    start: int
    end: int
    timezone: str

    @property
    def label(self) -> str:
        """Return the month of the period's last moment, like "2026-11", by the calendar of the period's time zone.

        A period belongs to the file, the manifest and the filter of this month. So each period of a month is over when
        the month is over in the westernmost time zone.
        """
        return month_of(self.end - 1, self.timezone)

    @property
    def name(self) -> str:
        """Return the name of the period for people, such as "2026-11" or "2026-02 (from 2026-01-31)"."""
        return period_name(self.label, self.start, self.timezone)

    def local_end(self) -> str:
        """Return the end of the period as a local time of its time zone, such as "2026-02-01 00:00"."""
        return f"{moment(self.end).astimezone(_zone(self.timezone)):%Y-%m-%d %H:%M}"


def _first_days(month: str) -> tuple[datetime, datetime]:
    """Return UTC midnight on the first day of a month and of the next month.

    Raise ValueError if the text is not a month.
    """
    match = _MONTH.fullmatch(month)
    if match is None:
        raise ValueError(f"{month!r} is not a month: write it like 2026-11")
    year, number = int(match[1]), int(match[2])
    first = datetime(year, number, 1, tzinfo=UTC)
    # After month 12 comes month 1 of the next year.
    return first, datetime(year + number // 12, number % 12 + 1, 1, tzinfo=UTC)


def month_window(month: str) -> tuple[int, int]:
    """Return the start of a month like "2026-11" in the easternmost zone, and its end in the westernmost zone (in µs).

    Raise ValueError if the text is not a month.
    """
    first, following = _first_days(month)
    # Local midnight is at most 14 hours before midnight in UTC, and at most 12 hours after it.
    return calendar.instant(first) - 14 * 3600 * SECOND, calendar.instant(following) + 12 * 3600 * SECOND


def span_of(month: str) -> tuple[int, int]:
    """Return a span (start and end, in µs) that contains all billing periods of a month like "2026-11".

    Raise ValueError if the text is not a month.
    """
    start, end = month_window(month)
    return start - MAX_LENGTH, end


def month_in(month: str, timezone: str) -> tuple[int, int]:
    """Return the start and end (µs) of a month like "2026-11" in a time zone; in UTC if the zone does not exist.

    Raise ValueError if the text is not a month.
    """
    first, following = (day.replace(tzinfo=_zone(timezone)) for day in _first_days(month))
    return calendar.instant(first), calendar.instant(following)


def _zone(timezone: str) -> tzinfo:
    """Return a time zone by its name; UTC if it no longer exists."""
    try:
        return calendar.zone(timezone)
    except ValueError:
        return UTC


def checked_month(month: str) -> str:
    """Return the text of a month like "2026-11". Raise ValueError if the text is not a month."""
    _first_days(month)
    return month


def utc_month_start(at: int) -> int:
    """Return the start (µs) of the month in UTC that contains a moment."""
    return month_in(month_of(at, "UTC"), "UTC")[0]


def month_of(at: int, timezone: str) -> str:
    """Return the month, like "2026-11", of a moment in a time zone; in UTC if the zone no longer exists."""
    return f"{moment(at).astimezone(_zone(timezone)):%Y-%m}"


def period_at(timezone: str, anchor: str | None, at: int, kept: Span | None = None) -> Period:
    """Return the billing period that contains the moment `at`. `kept` is the account's kept period, if it has one."""
    _previous, start, end, _next = periods_around(timezone, anchor or None, kept, at)
    return Period(start, end, timezone)


def period_from(timezone: str, anchor: str | None, start: int, kept: Span | None = None) -> Period:
    """Return the counted period that starts at `start`: usage was counted under this period.

    Its end is calculated from `timezone` and `anchor`, even if Redis counted the usage under another time zone or
    another anchor.
    """
    return Period(start, period_at(timezone, anchor, start, kept).end, timezone)


def moment(microseconds: int) -> datetime:
    """Return a moment (µs since 1970 UTC) as an aware datetime in UTC.

    Raise OverflowError if `datetime` has no such date.
    """
    return _EPOCH + timedelta(microseconds=microseconds)


# A report repeats the same small set of moments (bins, starts and ends of periods), so a cache helps.
@lru_cache(maxsize=16_384)
def iso(microseconds: int) -> str:
    """Return a moment as text in ISO 8601, in UTC. Microseconds are written only if they are not 0."""
    return moment(microseconds).isoformat().replace("+00:00", "Z")
