"""Find the start and the end of the hour, day, week, month or year around a moment.

An anchor is a local date and time at which one period starts. The other periods start at the same local time, also
after a change to daylight saving time. If a month does not have the anchor's day, its period starts on its last day.
Without an anchor, hours start at the full hour, days at midnight, weeks on Monday, months on the 1st, years on 1
January.
"""

from __future__ import annotations

from calendar import monthrange
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

UNITS = ("hour", "day", "week", "month", "year")

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_HOUR = 3_600_000_000
_MICROSECOND = timedelta(microseconds=1)
# A Monday and the 1st of January: the default anchor of every unit.
_DEFAULT_ANCHOR = datetime(2001, 1, 1)  # noqa: DTZ001 (local to whichever zone is asked)


def zone(name: str) -> ZoneInfo:
    """Return the time zone with an IANA name. Raise ValueError if there is none with this name."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError, TypeError) as error:
        raise ValueError(f"unknown time zone {name!r}: use an IANA name such as 'UTC' or 'Europe/Paris'") from error


def parse_anchor(text: str) -> datetime:
    """Return an anchor as a naive local date-time, from ISO 8601 text such as '2026-01-31T06:00'. Raise ValueError."""
    try:
        anchor = datetime.fromisoformat(text)
    except (ValueError, TypeError) as error:
        raise ValueError(f"anchor {text!r} is not an ISO local date-time: write it like '2026-01-31T06:00'") from error
    if anchor.tzinfo is not None:
        raise ValueError(f"anchor {text!r} has an offset: write it in the rule's own time zone, without an offset")
    if anchor.microsecond:
        raise ValueError(f"anchor {text!r} has a fraction of a second: periods start at whole seconds")
    return anchor


def instant(moment: datetime) -> int:
    """Return an aware moment as µs since 1970 UTC."""
    return (moment - _EPOCH) // _MICROSECOND


@lru_cache(maxsize=4096)
def _start(unit: str, tz: ZoneInfo, anchor: datetime, number: int) -> int:
    """Return the start in µs of the day, week, month or year with this number. Number 0 starts at the anchor."""
    day = anchor.date()
    if unit == "day":
        day += timedelta(days=number)
    elif unit == "week":
        day += timedelta(weeks=number)
    else:
        months = day.month - 1 + (number if unit == "month" else 12 * number)
        year, month = day.year + months // 12, months % 12 + 1
        day = date(year, month, min(day.day, monthrange(year, month)[1]))
    return instant(datetime.combine(day, anchor.time(), tzinfo=tz))


def _offset(tz: ZoneInfo, moment: int) -> int:
    """Return by how many µs the local clock is ahead of UTC."""
    return ((_EPOCH + timedelta(microseconds=moment)).astimezone(tz).utcoffset() or timedelta()) // _MICROSECOND


def _hour(tz: ZoneInfo, now: int) -> tuple[int, int]:
    """Return start and end of the local clock's hour around a moment.

    The hour ends early if the clock changes by a part of an hour.
    """
    offset = _offset(tz, now)

    def edge(other: int, near: int) -> int:
        # Return the moment between the two at which the offset changes.
        low, high = sorted((other, near))
        after = _offset(tz, high)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if _offset(tz, middle) == after else (middle, high)
        return high

    start = now - (now + offset) % _HOUR
    end = start + _HOUR
    if (_offset(tz, end - 1) - offset) % _HOUR:
        end = edge(end - 1, now)
    if (_offset(tz, start) - offset) % _HOUR:
        start = edge(start, now)
    return start, end


def _number(unit: str, anchor: datetime, local: date) -> int:
    """Return the number of the period with a local date, counted from the anchor. It may be wrong by one."""
    if unit == "day":
        return (local - anchor.date()).days
    if unit == "week":
        return (local - anchor.date()).days // 7
    years = local.year - anchor.year
    return years if unit == "year" else 12 * years + local.month - anchor.month


def boundaries(unit: str, timezone: str, anchor: str | None, now: int) -> tuple[int, int, int, int]:
    """Return the starts of the previous period, the period around `now`, and the next two, in µs since 1970 UTC.

    A period includes its start and excludes its end. Raise ValueError for an unknown unit, time zone or anchor, and for
    a moment outside the years 1 to 9999.
    """
    if unit not in UNITS:
        raise ValueError(f"unknown calendar_unit {unit!r}: use one of {', '.join(UNITS)}")
    tz = zone(timezone)
    fixed = parse_anchor(anchor) if anchor else None
    try:
        local = (_EPOCH + timedelta(microseconds=now)).astimezone(tz)
        if unit == "hour":
            if fixed is None:
                current, following = _hour(tz, now)
                return _hour(tz, current - 1)[0], current, following, _hour(tz, following)[1]
            current = now - (now - instant(fixed.replace(tzinfo=tz))) % _HOUR
            return current - _HOUR, current, current + _HOUR, current + 2 * _HOUR
        start = fixed or _DEFAULT_ANCHOR
        number = _number(unit, start, local.date()) + 1
        while _start(unit, tz, start, number) > now:
            number -= 1
        first, second, third, fourth = (_start(unit, tz, start, number + step) for step in (-1, 0, 1, 2))
        return first, second, third, fourth
    except OverflowError as error:
        raise ValueError("the moment is outside the years 1 to 9999") from error
