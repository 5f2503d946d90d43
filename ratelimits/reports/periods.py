"""Billing periods: months in an account's time zone, calendar or from its anchor; half-open, in µs since 1970 UTC."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from functools import lru_cache

from ratelimits.algorithms import calendar
from ratelimits.algorithms.billing_periods import Span, periods_around

SECOND = 1_000_000
#: No billing period is longer (µs): a month, and one that overlaps it, which two days may come before.
LONGEST = 64 * 86_400 * SECOND
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MONTH = re.compile(r"([0-9]{4})-(0[1-9]|1[0-2])")


@dataclass(frozen=True, slots=True, order=True)
class Period:
    """One billing period of one account; start and end in µs since 1970 UTC."""

    start: int
    end: int
    timezone: str


def _first_days(month: str) -> tuple[datetime, datetime]:
    """The UTC midnights on the first days of a month and of the next."""
    found = _MONTH.fullmatch(month)
    if found is None:
        raise ValueError(f"{month!r} is no month: write it like 2026-11")
    year, number = int(found[1]), int(found[2])
    first = datetime(year, number, 1, tzinfo=UTC)
    return first, datetime(year + number // 12, number % 12 + 1, 1, tzinfo=UTC)


def month_window(month: str) -> tuple[int, int]:
    """The µs between which a period that starts in a month like "2026-11" starts, in whatever time zone.

    Raises ValueError for what is no month.
    """
    first, following = _first_days(month)
    # The earliest local midnight is 14 hours before UTC's, the latest 12 hours after it.
    return calendar.instant(first) - 14 * 3600 * SECOND, calendar.instant(following) + 12 * 3600 * SECOND


def month_in(month: str, timezone: str) -> tuple[int, int]:
    """The µs between which a month like "2026-11" lies by a time zone's clocks, by UTC's if there is no such zone.

    Raises ValueError for what is no month.
    """
    first, following = (day.replace(tzinfo=_clocks(timezone)) for day in _first_days(month))
    return calendar.instant(first), calendar.instant(following)


def _clocks(timezone: str) -> tzinfo:
    """Return the clocks of a time zone, those of UTC if it is no more."""
    try:
        return calendar.zone(timezone)
    except ValueError:
        return UTC


def month_of(start: int, timezone: str) -> str:
    """Return the month, like "2026-11", of a moment by the clocks of a time zone; of one that is no more, by UTC."""
    return f"{moment(start).astimezone(_clocks(timezone)):%Y-%m}"


def starts_in(month: str, start: int, timezone: str) -> bool:
    """Return whether a moment lies in a month like "2026-11" by the clocks of a time zone, as `month_of` says."""
    return month_of(start, timezone) == month


def period_at(timezone: str, anchor: str | None, at: int, kept: Span | None = None) -> Period:
    """The billing period around a moment; `kept` is the one that the account's last change of terms left as it was."""
    _previous, start, end, _next = periods_around(timezone, anchor or None, kept, at)
    return Period(start, end, timezone)


def period_from(timezone: str, anchor: str | None, start: int, kept: Span | None = None) -> Period:
    """The period that usage was counted under as starting then.

    It ends where the account's next one starts, also when the account's terms were others when the usage was counted.
    """
    return Period(start, period_at(timezone, anchor, start, kept).end, timezone)


def moment(microseconds: int) -> datetime:
    """The aware UTC datetime of µs since 1970. Raises OverflowError for a moment of no calendar."""
    return _EPOCH + timedelta(microseconds=microseconds)


# Few moments come again and again in a report: bins, starts and ends of periods.
@lru_cache(maxsize=16_384)
def iso(microseconds: int) -> str:
    """ISO 8601 in UTC, to the second, or the microsecond where there is one."""
    return moment(microseconds).isoformat().replace("+00:00", "Z")
