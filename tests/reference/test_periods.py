"""Test the model's calendar periods by dates that were looked up, and by properties of all periods."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference.amounts import SECOND
from tests.reference.periods import UNITS, Calendar
from tests.traces.rules import ANCHORS, ZONES


def moment(text: str) -> int:
    return int(datetime.fromisoformat(text + "+00:00").timestamp()) * SECOND


def told(us: int, zone: str) -> str:
    return datetime.fromtimestamp(us // SECOND, ZoneInfo(zone)).strftime("%y-%m-%d %H:%M%z")


# Unit, zone, anchor, a moment in UTC, and the local start and end of its period.
CASES: list[tuple[str, str, str | None, str, str, str]] = [
    ("hour", "UTC", None, "2026-05-05T10:59:59", "26-05-05 10:00+0000", "26-05-05 11:00+0000"),
    # Kathmandu is 5:45 ahead: its full hours are at a quarter past the hour of UTC.
    ("hour", "Asia/Kathmandu", None, "2026-05-05T10:10:00", "26-05-05 15:00+0545", "26-05-05 16:00+0545"),
    # The local hour from 2:00 to 3:00 comes twice, so this period lasts two hours.
    ("hour", "Europe/Berlin", None, "2026-10-25T00:30:00", "26-10-25 02:00+0200", "26-10-25 02:00+0100"),
    ("hour", "Europe/Berlin", None, "2026-10-25T01:30:00", "26-10-25 02:00+0100", "26-10-25 03:00+0100"),
    # Lord Howe's clocks change by half an hour.
    ("hour", "Australia/Lord_Howe", None, "2026-04-04T14:45:00", "26-04-05 01:00+1100", "26-04-05 01:30+1030"),
    ("hour", "UTC", "2026-01-01T00:20", "2026-05-05T10:10:00", "26-05-05 09:20+0000", "26-05-05 10:20+0000"),
    # Days of 23 and of 25 hours.
    ("day", "Europe/Berlin", None, "2026-03-29T12:00:00", "26-03-29 00:00+0100", "26-03-30 00:00+0200"),
    ("day", "Europe/Berlin", None, "2026-10-25T12:00:00", "26-10-25 00:00+0200", "26-10-26 00:00+0100"),
    # There is no 2:30 on the day on which summer time begins.
    ("day", "Europe/Berlin", "2026-01-01T02:30", "2026-03-29T12:00:00", "26-03-29 03:30+0200", "26-03-30 02:30+0200"),
    # Cairo skips midnight.
    ("day", "Africa/Cairo", None, "2026-04-24T12:00:00", "26-04-24 01:00+0300", "26-04-25 00:00+0300"),
    # Samoa had no 30 December 2011.
    ("day", "Pacific/Apia", None, "2011-12-30T12:00:00", "11-12-31 00:00+1400", "12-01-01 00:00+1400"),
    ("week", "UTC", None, "2026-11-22T23:59:59", "26-11-16 00:00+0000", "26-11-23 00:00+0000"),
    (
        "week",
        "America/New_York",
        "2026-01-07T09:00",
        "2026-03-09T00:00:00",
        "26-03-04 09:00-0500",
        "26-03-11 09:00-0400",
    ),
    ("month", "UTC", None, "2026-02-28T23:59:59", "26-02-01 00:00+0000", "26-03-01 00:00+0000"),
    ("month", "UTC", "2026-01-31T06:00", "2026-03-01T00:00:00", "26-02-28 06:00+0000", "26-03-31 06:00+0000"),
    ("month", "UTC", "2026-01-31T06:00", "2028-02-29T06:00:00", "28-02-29 06:00+0000", "28-03-31 06:00+0000"),
    ("month", "UTC", "2026-01-31T06:00", "2026-04-30T05:59:59", "26-03-31 06:00+0000", "26-04-30 06:00+0000"),
    ("year", "UTC", None, "2026-12-31T23:59:59", "26-01-01 00:00+0000", "27-01-01 00:00+0000"),
    ("year", "UTC", "2024-02-29T00:00", "2026-01-01T00:00:00", "25-02-28 00:00+0000", "26-02-28 00:00+0000"),
    ("year", "UTC", "2024-02-29T00:00", "2028-02-29T00:00:00", "28-02-29 00:00+0000", "29-02-28 00:00+0000"),
]


@pytest.mark.parametrize(("unit", "zone", "anchor", "now", "start", "end"), CASES)
def test_a_period_that_was_looked_up(unit: str, zone: str, anchor: str | None, now: str, start: str, end: str) -> None:
    span = Calendar(unit, zone, anchor).span(moment(now))
    assert (told(span[0], zone), told(span[1], zone)) == (start, end)


@settings(max_examples=300)
@given(
    unit=st.sampled_from(UNITS),
    zone=st.sampled_from(ZONES),
    anchor=st.one_of(st.none(), st.sampled_from(ANCHORS)),
    now=st.integers(0, 4_000_000_000 * SECOND),
)
def test_periods_follow_one_another_without_a_gap(unit: str, zone: str, anchor: Any, now: int) -> None:
    calendar = Calendar(unit, zone, anchor)
    start, end = calendar.span(now)
    assert start <= now < end
    assert calendar.span(end - 1) == (start, end)
    assert calendar.span(end)[0] == end or unit == "hour"
    assert calendar.span(end)[0] <= end < calendar.span(end)[1]


@settings(max_examples=300)
@given(
    unit=st.sampled_from(("day", "week", "month", "year")),
    zone=st.sampled_from(ZONES),
    anchor=st.sampled_from(ANCHORS),
    now=st.integers(0, 4_000_000_000 * SECOND),
)
def test_every_period_starts_at_the_anchors_wall_clock(unit: str, zone: str, anchor: str, now: int) -> None:
    start = datetime.fromtimestamp(Calendar(unit, zone, anchor).span(now)[0] // SECOND, ZoneInfo(zone))
    first = datetime.fromisoformat(anchor)
    skipped = start.utcoffset() != (start.astimezone(UTC) - timedelta(hours=25)).astimezone(ZoneInfo(zone)).utcoffset()
    if start.time() != first.time():
        assert skipped
        return
    if unit == "week":
        assert start.weekday() == first.weekday()
    if unit in ("month", "year"):
        assert start.day == first.day or (start + timedelta(days=1)).day == 1
    if unit == "year":
        assert start.month == first.month
