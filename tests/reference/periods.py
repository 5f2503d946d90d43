"""Calendar periods, computed from day numbers of the Gregorian calendar. Only the UTC offsets come from zoneinfo."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from tests.reference.amounts import SECOND

HOUR = 3600 * SECOND
DAY = 24 * HOUR
UNITS = ("hour", "day", "week", "month", "year")
EPOCH = datetime(1970, 1, 1)
MONDAY = -3  # 1969-12-29
ISO = re.compile(r"(\d{4})-(\d\d)-(\d\d)(?:[T ](\d\d):(\d\d)(?::(\d\d)(?:\.(\d{1,6}))?)?)?")


def is_leap(year: int) -> bool:
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def month_length(year: int, month: int) -> int:
    return 29 if month == 2 and is_leap(year) else (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)[month - 1]


def day_number(year: int, month: int, day: int) -> int:
    """Return the days since 1970-01-01."""
    years = year - 1
    days = 365 * years + years // 4 - years // 100 + years // 400 - 719162
    return days + sum(month_length(year, m) for m in range(1, month)) + day - 1


def date_of(number: int) -> tuple[int, int]:
    """Return year and month of a day number."""
    year = 1970 + number // 365
    while day_number(year, 1, 1) > number:
        year -= 1
    month = 12
    while day_number(year, month, 1) > number:
        month -= 1
    return year, month


class Calendar:
    """Periods of one unit in one time zone. `anchor` is the local time at which some period starts."""

    def __init__(self, unit: Any, zone: Any, anchor: Any) -> None:
        if unit not in UNITS:
            raise ValueError(f"calendar_unit must be one of {', '.join(UNITS)}, not {unit!r}")
        try:
            self.zone = ZoneInfo(zone)
        except (ZoneInfoNotFoundError, TypeError, ValueError, OSError):
            raise ValueError(f"timezone {zone!r} is not known") from None
        self.unit = unit
        self.anchored = anchor is not None
        self.year, self.month, self.day, self.clock = 1970, 1, 1, 0
        if anchor is not None:
            match = ISO.fullmatch(anchor) if isinstance(anchor, str) else None
            if match is None:
                raise ValueError(f"anchor must be a local date and time such as 2026-01-31T06:00, not {anchor!r}")
            self.year, self.month, self.day, hour, minute, second = (int(g or 0) for g in match.groups()[:6])
            if not (1 <= self.month <= 12 and 1 <= self.day <= month_length(self.year, self.month)):
                raise ValueError(f"anchor has no such day: {anchor!r}")
            if hour > 23 or minute > 59 or second > 59:
                raise ValueError(f"anchor has no such time: {anchor!r}")
            self.clock = ((hour * 60 + minute) * 60 + second) * SECOND + int((match[7] or "").ljust(6, "0"))
        self.weekday = day_number(self.year, self.month, self.day) if self.anchored else MONDAY
        self.span = lru_cache(maxsize=4096)(self._span)

    def offset(self, now: int) -> int:
        """Return the UTC offset (µs) at a moment."""
        here = datetime.fromtimestamp(now // SECOND, UTC).astimezone(self.zone).utcoffset()
        assert here is not None
        return here // timedelta(microseconds=1)

    def moment(self, day: int) -> int:
        """Return the moment at which local clocks show the anchor's time on a day."""
        wall = EPOCH + timedelta(days=day, microseconds=self.clock)
        here = wall.replace(tzinfo=self.zone, fold=0).utcoffset()
        assert here is not None
        return day * DAY + self.clock - here // timedelta(microseconds=1)

    def start(self, index: int) -> int:
        """Return the start of the period with this number."""
        if self.unit == "day":
            return self.moment(index)
        if self.unit == "week":
            return self.moment(self.weekday + 7 * index)
        year, month = (index // 12, index % 12 + 1) if self.unit == "month" else (index, self.month)
        return self.moment(day_number(year, month, min(self.day, month_length(year, month))))

    def _span(self, now: int) -> tuple[int, int]:
        """Return start and end of the period around `now`."""
        if self.unit == "hour":
            return self.hour(now)
        today = (now + self.offset(now)) // DAY
        year, month = date_of(today)
        index = {"day": today, "week": (today - self.weekday) // 7, "month": year * 12 + month - 1, "year": year}
        at = index[self.unit]
        while self.start(at) > now:
            at -= 1
        while self.start(at + 1) <= now:
            at += 1
        return self.start(at), self.start(at + 1)

    def hour(self, now: int) -> tuple[int, int]:
        if self.anchored:
            start = now - (now - self.moment(day_number(self.year, self.month, self.day))) % HOUR
            return start, start + HOUR
        here = self.offset(now)
        start = now - (now + here) % HOUR
        end = start + HOUR
        if (self.offset(end - 1) - here) % HOUR:
            low, end = now, end - 1
            while end - low > 1:
                middle = (low + end) // 2
                low, end = (low, middle) if (self.offset(middle) - here) % HOUR else (middle, end)
        return start, end
