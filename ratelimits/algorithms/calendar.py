"""Find the start and the end of the hour, day, week, month or year around a moment.

An anchor is a local date and time at which one period starts. The other periods start at the same local time, even
after a change to daylight saving time. If a month does not have the anchor's day, the period starts on the month's last
day. Without an anchor, hours start at the full hour, days at midnight, weeks on Monday, months on the 1st, years on
1 January.
"""

from __future__ import annotations

from calendar import monthrange
from datetime import UTC, date, datetime, timedelta
from functools import cache, lru_cache
from importlib.resources import files
from zoneinfo import ZoneInfo

import tzdata

#: The units of the calendar.
UNITS = ("hour", "day", "week", "month", "year")

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
#: An hour in µs.
_HOUR = 3_600_000_000
_MICROSECOND = timedelta(microseconds=1)
#: Maximum number of characters of a wrong name that an error shows.
_LONGEST_SHOWN = 64
# The default anchor of every unit: this day is both a Monday and a 1 January.
_DEFAULT_ANCHOR = datetime(2001, 1, 1)  # noqa: DTZ001 (a local time in any time zone)


#: The version of the data about time zones from which all periods are calculated: that of the package `tzdata`.
ZONES_VERSION: str = tzdata.__version__
_DATA = files(tzdata)
_NAMES = frozenset((_DATA / "zones").read_text(encoding="utf-8").split())


def zone(name: str) -> ZoneInfo:
    """Return the time zone with an IANA name. Raise ValueError if there is none with this name.

    The data come from the package `tzdata`. `ZoneInfo(name)` would read the data of the operating system, and then two
    machines with different systems would calculate different billing periods.
    """
    try:
        return _read(name)
    except (KeyError, TypeError) as error:  # A rule in a file can have a list here.
        shown = repr(name)
        shown = shown if len(shown) <= _LONGEST_SHOWN + 2 else f"{shown[:_LONGEST_SHOWN]}…'"
        raise ValueError(f"unknown time zone {shown}: use an IANA name such as 'UTC' or 'Europe/Paris'") from error


def exists(name: str) -> bool:
    """Return whether there is a time zone with this IANA name."""
    return name in _NAMES


@cache
def _read(name: str) -> ZoneInfo:
    if name not in _NAMES:
        raise KeyError(name)
    with (_DATA / "zoneinfo" / name).open("rb") as file:
        return ZoneInfo.from_file(file, key=name)


def parse_anchor(text: str) -> datetime:
    """Return the anchor in a text such as '2026-01-31T06:00' (ISO 8601), as a naive datetime.

    Raise ValueError for any other text.
    """
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
    """Return local time minus UTC at a moment, in µs."""
    return ((_EPOCH + timedelta(microseconds=moment)).astimezone(tz).utcoffset() or timedelta()) // _MICROSECOND


def _hour(tz: ZoneInfo, now: int) -> tuple[int, int]:
    """Return start and end of the hour of local time that contains a moment.

    If the offset to UTC changes by half an hour within this hour, for example, the change divides the hour into two.
    """
    offset = _offset(tz, now)

    def change_between(low: int, high: int) -> int:
        """Return the first moment with the new offset. The offset changes after `low`, and at the latest at `high`."""
        later_offset = _offset(tz, high)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if _offset(tz, middle) == later_offset else (middle, high)
        return high

    start = now - (now + offset) % _HOUR
    end = start + _HOUR
    # The remainders below are not 0 if the offset has changed by a part of an hour.
    if (_offset(tz, end - 1) - offset) % _HOUR:
        end = change_between(now, end - 1)
    if (_offset(tz, start) - offset) % _HOUR:
        start = change_between(start, now)
    return start, end


def _number(unit: str, anchor: datetime, local: date) -> int:
    """Return the number of the period that contains a local date. Number 0 starts at the anchor.

    The result can be wrong by one. `boundaries` corrects it.
    """
    if unit == "day":
        return (local - anchor.date()).days
    if unit == "week":
        return (local - anchor.date()).days // 7
    years = local.year - anchor.year
    return years if unit == "year" else 12 * years + local.month - anchor.month


def boundaries(unit: str, timezone: str, anchor: str | None, now: int) -> tuple[int, int, int, int]:
    """Return the starts of the previous period, the period that contains `now`, and the next two.

    They are in µs since 1970 UTC. A period includes its start, but not its end. Raise ValueError for an unknown unit,
    time zone or anchor, and for a moment outside the years 1 to 9999.
    """
    if unit not in UNITS:
        raise ValueError(f"unknown calendar_unit {unit!r}: use one of {', '.join(UNITS)}")
    tz = zone(timezone)
    parsed_anchor = parse_anchor(anchor) if anchor else None
    try:
        local = (_EPOCH + timedelta(microseconds=now)).astimezone(tz)
        if unit == "hour":
            if parsed_anchor is None:
                current, following = _hour(tz, now)
                return _hour(tz, current - 1)[0], current, following, _hour(tz, following)[1]
            current = now - (now - instant(parsed_anchor.replace(tzinfo=tz))) % _HOUR
            return current - _HOUR, current, current + _HOUR, current + 2 * _HOUR
        used_anchor = parsed_anchor or _DEFAULT_ANCHOR
        number = _number(unit, used_anchor, local.date()) + 1  # at least the number of the period that contains `now`
        while _start(unit, tz, used_anchor, number) > now:
            number -= 1
        first, second, third, fourth = (_start(unit, tz, used_anchor, number + step) for step in (-1, 0, 1, 2))
        return first, second, third, fourth
    except OverflowError as error:
        raise ValueError("the moment is outside the years 1 to 9999") from error
