"""Test where calendar periods start and end, in zones with and without daylight saving time."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from ratelimits.algorithms import calendar
from ratelimits.algorithms.calendar import UNITS, boundaries, instant, parse_anchor, zone
from tests.support.engine.asking import SECOND, ask, limit

ZONES = ("Europe/Berlin", "America/New_York", "Asia/Kathmandu", "Australia/Lord_Howe", "UTC")
HOUR = 3600 * SECOND


def test_the_data_are_those_of_the_package_and_not_of_the_machine(tmp_path: Path) -> None:
    """On this machine, the system says that Paris has the time of Tokyo."""
    (tmp_path / "Europe").mkdir()
    data = files("tzdata") / "zoneinfo" / "Asia" / "Tokyo"
    (tmp_path / "Europe" / "Paris").write_bytes(data.read_bytes())
    script = (
        "import zoneinfo; from datetime import datetime, timedelta; from ratelimits.algorithms import calendar;"
        "assert datetime(2026, 11, 1, tzinfo=zoneinfo.ZoneInfo('Europe/Paris')).utcoffset() == timedelta(hours=9);"
        "print(calendar.boundaries('month', 'Europe/Paris', None, 1_793_534_400_000_000)[1])"
    )
    here = {**os.environ, "PYTHONTZPATH": str(tmp_path)}
    printed = subprocess.run(
        [sys.executable, "-c", script], env=here, capture_output=True, text=True, check=True
    ).stdout
    assert int(printed) == calendar.instant(datetime(2026, 10, 31, 23, tzinfo=UTC))


@pytest.mark.parametrize("name", ["", "Mars", "../Paris", "europe/paris", "localtime", None, 7, [], {}])
def test_what_is_no_zone_of_the_package_is_refused(name: Any) -> None:
    with pytest.raises(ValueError, match="unknown time zone"):
        calendar.zone(name)


def at(text: str) -> int:
    """Return the µs since 1970 of an ISO time with an offset."""
    return instant(datetime.fromisoformat(text))


def current(unit: str, zone_name: str, anchor: str | None, moment: str) -> tuple[int, int]:
    _previous, start, end, _after = boundaries(unit, zone_name, anchor, at(moment))
    return start, end


@pytest.mark.parametrize(
    ("unit", "moment", "start", "end"),
    [
        # An ordinary day.
        ("hour", "2026-07-15T15:20:00+02:00", "2026-07-15T15:00:00+02:00", "2026-07-15T16:00:00+02:00"),
        ("day", "2026-07-15T15:20:00+02:00", "2026-07-15T00:00:00+02:00", "2026-07-16T00:00:00+02:00"),
        ("week", "2026-07-15T15:20:00+02:00", "2026-07-13T00:00:00+02:00", "2026-07-20T00:00:00+02:00"),
        ("month", "2026-07-15T15:20:00+02:00", "2026-07-01T00:00:00+02:00", "2026-08-01T00:00:00+02:00"),
        ("year", "2026-07-15T15:20:00+02:00", "2026-01-01T00:00:00+01:00", "2027-01-01T00:00:00+01:00"),
        # The day that has 23 hours, and the one that has 25.
        ("day", "2026-03-29T12:00:00+02:00", "2026-03-29T00:00:00+01:00", "2026-03-30T00:00:00+02:00"),
        ("day", "2026-10-25T12:00:00+01:00", "2026-10-25T00:00:00+02:00", "2026-10-26T00:00:00+01:00"),
        ("week", "2026-03-29T12:00:00+02:00", "2026-03-23T00:00:00+01:00", "2026-03-30T00:00:00+02:00"),
        ("month", "2026-10-31T12:00:00+01:00", "2026-10-01T00:00:00+02:00", "2026-11-01T00:00:00+01:00"),
        # The hour that comes twice lasts two hours.
        ("hour", "2026-10-25T02:30:00+02:00", "2026-10-25T02:00:00+02:00", "2026-10-25T02:00:00+01:00"),
        ("hour", "2026-10-25T02:30:00+01:00", "2026-10-25T02:00:00+01:00", "2026-10-25T03:00:00+01:00"),
        # The start and the end of a period.
        ("month", "2026-07-01T00:00:00+02:00", "2026-07-01T00:00:00+02:00", "2026-08-01T00:00:00+02:00"),
        ("month", "2026-06-30T23:59:59.999999+02:00", "2026-06-01T00:00:00+02:00", "2026-07-01T00:00:00+02:00"),
    ],
)
def test_a_period_without_an_anchor(unit: str, moment: str, start: str, end: str) -> None:
    assert current(unit, "Europe/Berlin", None, moment) == (at(start), at(end))


@pytest.mark.parametrize(
    ("zone_name", "unit", "moment", "starts"),
    [
        ("America/New_York", "day", "2026-03-08T12:00-04:00", "2026-03-08T00:00-05:00 2026-03-09T00:00-04:00"),
        ("America/New_York", "day", "2026-11-01T12:00-05:00", "2026-11-01T00:00-04:00 2026-11-02T00:00-05:00"),
        ("America/New_York", "month", "2026-11-30T23:00-05:00", "2026-11-01T00:00-04:00 2026-12-01T00:00-05:00"),
        ("Asia/Kathmandu", "hour", "2026-07-15T15:20+05:45", "2026-07-15T15:00+05:45 2026-07-15T16:00+05:45"),
        ("Asia/Kathmandu", "day", "2026-07-15T00:10+05:45", "2026-07-15T00:00+05:45 2026-07-16T00:00+05:45"),
        ("Australia/Lord_Howe", "day", "2026-04-05T12:00+10:30", "2026-04-05T00:00+11:00 2026-04-06T00:00+10:30"),
        # On Lord Howe Island the clocks go back by half an hour at two, so half past one comes twice ...
        ("Australia/Lord_Howe", "hour", "2026-04-05T01:40+11:00", "2026-04-05T01:00+11:00 2026-04-05T02:00+11:00"),
        ("Australia/Lord_Howe", "hour", "2026-04-05T01:40+10:30", "2026-04-05T01:30+10:30 2026-04-05T02:00+10:30"),
        # ... and forward by half an hour, so two o'clock is skipped.
        ("Australia/Lord_Howe", "hour", "2026-10-04T01:40+10:30", "2026-10-04T01:00+10:30 2026-10-04T02:30+11:00"),
        ("Australia/Lord_Howe", "hour", "2026-10-04T02:40+11:00", "2026-10-04T02:30+11:00 2026-10-04T03:00+11:00"),
        ("UTC", "year", "2026-12-31T23:59+00:00", "2026-01-01T00:00+00:00 2027-01-01T00:00+00:00"),
    ],
)
def test_a_period_in_other_zones(zone_name: str, unit: str, moment: str, starts: str) -> None:
    assert current(unit, zone_name, None, moment) == tuple(map(at, starts.split()))


class TestAnchors:
    @pytest.mark.parametrize(
        ("moment", "start", "end"),
        [
            ("2026-01-31T06:00:00+01:00", "2026-01-31T06:00:00+01:00", "2026-02-28T06:00:00+01:00"),
            ("2026-02-28T05:59:59+01:00", "2026-01-31T06:00:00+01:00", "2026-02-28T06:00:00+01:00"),
            ("2026-03-15T00:00:00+01:00", "2026-02-28T06:00:00+01:00", "2026-03-31T06:00:00+02:00"),
            ("2026-04-30T06:00:00+02:00", "2026-04-30T06:00:00+02:00", "2026-05-31T06:00:00+02:00"),
            ("2028-02-29T06:00:00+01:00", "2028-02-29T06:00:00+01:00", "2028-03-31T06:00:00+02:00"),
            ("2025-11-30T07:00:00+01:00", "2025-11-30T06:00:00+01:00", "2025-12-31T06:00:00+01:00"),
        ],
    )
    def test_a_month_without_the_31st_starts_on_its_last_day(self, moment: str, start: str, end: str) -> None:
        assert current("month", "Europe/Berlin", "2026-01-31T06:00", moment) == (at(start), at(end))

    @pytest.mark.parametrize(
        ("moment", "start", "end"),
        [
            ("2026-06-01T00:00:00+00:00", "2026-02-28T00:00:00+00:00", "2027-02-28T00:00:00+00:00"),
            ("2028-02-28T12:00:00+00:00", "2027-02-28T00:00:00+00:00", "2028-02-29T00:00:00+00:00"),
            ("2028-03-01T00:00:00+00:00", "2028-02-29T00:00:00+00:00", "2029-02-28T00:00:00+00:00"),
        ],
    )
    def test_a_year_from_a_leap_day_starts_on_the_28th_in_others(self, moment: str, start: str, end: str) -> None:
        assert current("year", "UTC", "2024-02-29", moment) == (at(start), at(end))

    def test_a_week_and_a_day_keep_the_wall_clock_of_their_anchor(self) -> None:
        # A Wednesday at half past six.
        assert current("week", "Europe/Berlin", "2026-01-07T06:30", "2026-03-31T00:00:00+02:00") == (
            at("2026-03-25T06:30:00+01:00"),
            at("2026-04-01T06:30:00+02:00"),
        )
        assert current("day", "Europe/Berlin", "2026-01-07T06:30", "2026-03-29T06:29:00+02:00") == (
            at("2026-03-28T06:30:00+01:00"),
            at("2026-03-29T06:30:00+02:00"),
        )

    def test_an_hour_is_counted_from_the_anchors_moment(self) -> None:
        assert current("hour", "Asia/Kathmandu", "2026-01-01T00:20", "2026-07-15T15:19:59+05:45") == (
            at("2026-07-15T14:20:00+05:45"),
            at("2026-07-15T15:20:00+05:45"),
        )

    def test_a_wall_clock_that_is_skipped_is_an_hour_later_and_one_that_comes_twice_its_first(self) -> None:
        assert current("day", "Europe/Berlin", "2026-01-01T02:30", "2026-03-29T12:00:00+02:00")[0] == at(
            "2026-03-29T03:30:00+02:00"
        )
        assert current("day", "Europe/Berlin", "2026-01-01T02:30", "2026-10-25T02:30:00+01:00")[0] == at(
            "2026-10-25T02:30:00+02:00"
        )

    def test_an_anchor_may_lie_in_the_future(self) -> None:
        assert current("month", "UTC", "2030-05-15T00:00", "2026-01-20T00:00:00+00:00") == (
            at("2026-01-15T00:00:00+00:00"),
            at("2026-02-15T00:00:00+00:00"),
        )


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("zone_name", ZONES)
@pytest.mark.parametrize("anchor", [None, "2026-01-31T06:00", "2024-02-29T00:00", "2025-12-31T23:59:59"])
def test_periods_follow_one_another_without_gap_or_overlap(unit: str, zone_name: str, anchor: str | None) -> None:
    step = {"hour": timedelta(minutes=29), "day": timedelta(hours=7), "week": timedelta(days=2)}.get(
        unit, timedelta(days=9)
    )
    moment, end = datetime(2026, 2, 20, tzinfo=ZoneInfo("UTC")), datetime(2026, 4, 10, tzinfo=ZoneInfo("UTC"))
    seen = []
    while moment < end:
        four = boundaries(unit, zone_name, anchor, instant(moment))
        assert four[1] <= instant(moment) < four[2]
        assert list(four) == sorted(set(four))
        seen.append(four)
        moment += step
    for one, other in pairwise(seen):
        assert other == one or one[2] <= other[1]
        if other[1] == one[2]:
            assert (other[0], other[2]) == (one[1], one[3])


@pytest.mark.parametrize("offset", [0, -1, HOUR - 1])
def test_the_boundaries_of_a_moment_are_those_of_its_whole_period(offset: int) -> None:
    start = at("2026-10-25T02:00:00+01:00")
    assert boundaries("hour", "Europe/Berlin", None, start + offset)[1] == (start if offset >= 0 else start - HOUR)


@pytest.mark.parametrize("moment", [-(2**62), 2**62, at("9999-12-31T23:59:59+00:00")])
def test_a_moment_that_no_calendar_knows_is_refused(moment: int) -> None:
    with pytest.raises(ValueError):
        boundaries("year", "UTC", None, moment)


def test_a_zone_and_an_anchor_are_read_as_they_are_written() -> None:
    assert zone("Europe/Berlin").key == "Europe/Berlin"
    assert parse_anchor("2026-01-31T06:00") == datetime(2026, 1, 31, 6)
    assert parse_anchor("2026-01-31") == datetime(2026, 1, 31)


class TestWindows:
    """The script chooses the window by the current time, whichever periods it receives."""

    def test_a_month_starts_anew_at_its_local_midnight(self) -> None:
        month = limit("calendar_window", timezone="America/New_York", capacity=2)
        edge = at("2026-12-01T00:00:00-05:00")
        for _ in range(2):
            assert ask(month, now=edge - 1).allowed
        refused = ask(month, now=edge - 1)
        assert (refused.allowed, refused.retry_after) == (False, 0.000001)
        assert [ask(month, now=edge).allowed for _ in range(3)] == [True, True, False]

    def test_a_day_of_25_hours_is_one_day(self) -> None:
        day = limit("calendar_window", calendar_unit="day", timezone="Europe/Berlin", capacity=1)
        start, end = at("2026-10-25T00:00:00+02:00"), at("2026-10-26T00:00:00+01:00")
        assert end - start == 25 * HOUR
        assert ask(day, now=start).allowed
        refused = ask(day, now=start + 24 * HOUR)
        assert (refused.allowed, refused.retry_after) == (False, 3600.0)
        assert ask(day, now=end).allowed

    def test_a_request_of_a_minute_ago_counts_in_the_window_of_the_newest(self) -> None:
        month = limit("calendar_window", capacity=2)
        edge = at("2026-12-01T00:00:00+00:00")
        assert ask(month, now=edge).remaining == 1
        assert ask(month, now=edge - 30 * SECOND).remaining == 0
        assert not ask(month, now=edge + SECOND).allowed
