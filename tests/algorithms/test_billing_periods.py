"""Test the billing periods between frozen ones, against a model that lists the starts of all months."""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from itertools import pairwise
from random import Random

import pytest

from ratelimits.algorithms.billing_periods import (
    QUARTER,
    SHORTEST,
    Period,
    Timeline,
    check_terms,
    month_of,
    periods_around,
)
from tests.reference.periods import DAY, Calendar
from tests.support.usage.traffic import at

ZONES = (
    *("UTC", "Europe/Berlin", "America/New_York", "America/Santiago", "Pacific/Kiritimati", "Pacific/Pago_Pago"),
    *("Asia/Kolkata", "Asia/Kathmandu", "Australia/Lord_Howe", "Africa/Cairo"),
)
ANCHORS = (
    *(None, None, "2026-01-31T06:00", "2026-01-02T00:00", "2026-01-15T12:30", "2024-02-29T23:45"),
    "2024-03-31T02:30",
)
FIRST, LAST = at("2023-01-01"), at("2027-01-01")
Span = tuple[int, int]


@lru_cache
def starts(zone: str, anchor: str | None) -> list[int]:
    """Return the starts of all months from three months before FIRST until after LAST."""
    calendar = Calendar("month", zone, anchor)
    found = [calendar.span(FIRST - 90 * DAY)[0]]
    while found[-1] < LAST + 90 * DAY:
        found.append(calendar.span(found[-1])[1])
    return found


def cuts(zone: str, anchor: str | None, frozen: list[Span]) -> list[int]:
    """Return every moment at which a period begins: the edges of frozen ones, and the months far enough from them."""
    edges = sorted({edge for span in frozen for edge in span})
    months = [
        start
        for start in starts(zone, anchor)
        if not any(begun <= start < end for begun, end in frozen)
        and all(abs(start - edge) >= 2 * DAY for edge in edges)
    ]
    return sorted({*edges, *months})


def drawn(draw: Random) -> tuple[str, str | None, list[Span]]:
    """Draw terms and frozen periods, which may touch each other. They are months of other terms, or of any length."""
    frozen: list[Span] = []
    moment = FIRST + draw.randrange(200) * DAY
    for _ in range(draw.randrange(5)):
        moment += draw.choice((0, 0, 17 * 3600 * 10**6, draw.randrange(100) * DAY))
        length = draw.choice((31 * DAY, 30 * DAY + QUARTER, draw.randrange(1, 60) * DAY // 2))
        frozen.append((moment, moment + length))
        moment += length
    return draw.choice(ZONES), draw.choice(ANCHORS), frozen


def test_periods_are_the_spans_between_the_cuts(long_run: bool) -> None:
    draw = Random(37)
    for _history in range(3_000 if long_run else 150):
        zone, anchor, frozen = drawn(draw)
        timeline = Timeline(zone, anchor, [Period(*span, "UTC", "2024-01") for span in frozen])
        edges = cuts(zone, anchor, frozen)
        moments = [draw.randrange(FIRST, LAST) for _ in range(20)]
        moments += [edge + step for edge in edges if FIRST < edge < LAST for step in (-1, 0)]
        for moment in moments:
            place = bisect_right(edges, moment)
            period = timeline.at(moment)
            assert (period.start, period.end) == (edges[place - 1], edges[place])
            if (period.start, period.end) not in frozen:
                assert period.label == month_of(period.end - 1, zone)
                assert period.timezone == zone


def test_freezing_a_period_moves_no_other_period() -> None:
    draw = Random(3737)
    for _history in range(100):
        zone, anchor, frozen = drawn(draw)
        timeline = Timeline(zone, anchor, [Period(*span, "UTC", "2024-01") for span in frozen])
        before = timeline.between(FIRST, LAST)
        assert all(one.end == other.start for one, other in pairwise(before))
        for period in draw.sample(before, len(before) // 2):
            if not timeline.is_frozen(period):
                timeline.freeze(period)
        assert timeline.between(FIRST, LAST) == before


def test_limits_get_the_same_periods_from_terms_and_a_few_frozen_ones() -> None:
    """Freeze some periods, change the terms, and freeze again: the terms give the newest periods and the one before."""
    draw = Random(373737)
    for _history in range(150):
        timeline = Timeline(draw.choice(ZONES), draw.choice(ANCHORS))
        now = FIRST + draw.randrange(900) * DAY
        for _edit in range(draw.randrange(1, 4)):
            for _use in range(draw.randrange(4)):
                period = timeline.at(now)
                if not timeline.is_frozen(period):
                    timeline.freeze(period)
                now += draw.randrange(40 * DAY)
            present = timeline.at(now)
            if timeline.frozen and not timeline.is_frozen(present):
                for period in timeline.between(timeline.frozen[0].start, present.end):
                    if not timeline.is_frozen(period):
                        timeline.freeze(period)
            timeline = Timeline(draw.choice(ZONES), draw.choice(ANCHORS), timeline.frozen)
            recent = [period for period in timeline.frozen if period.end > now - 80 * DAY]
            terms = Timeline(timeline.timezone, timeline.anchor, recent).terms()
            current = timeline.at(now)
            previous, following = timeline.at(current.start - 1), timeline.at(current.end)
            assert periods_around(*terms, now) == (previous.start, current.start, current.end, following.end)
            assert len(terms.frozen) <= len(recent)


def test_an_account_without_terms_has_months_in_utc() -> None:
    for timeline in (Timeline(), Timeline("Mars/Olympus"), Timeline("Europe/Berlin", "the tenth")):
        period = timeline.at(at("2026-11-10"))
        assert (period.start, period.end) == (at("2026-11-01"), at("2026-12-01"))
        assert (period.timezone, period.label) == ("UTC", "2026-11")


@pytest.mark.parametrize(
    ("zone", "anchor", "problem"),
    [
        ("UTC", "2026-01-10T06:07", "not at a quarter of an hour"),
        ("UTC", "2026-01-10T06:00:01", "not at a quarter of an hour"),
        ("Asia/Kathmandu", "2026-01-10T06:20", "not at a quarter of an hour"),
        ("Mars/Olympus", "", "unknown time zone"),
        ("UTC", "the tenth", "not an ISO local date-time"),
    ],
)
def test_terms_whose_months_start_within_a_quarter_of_an_hour_are_refused(zone: str, anchor: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check_terms(zone, anchor, at("2026-11-10"))


@pytest.mark.parametrize("zone", ZONES)
def test_all_months_start_at_quarters_of_an_hour(zone: str) -> None:
    for anchor in ANCHORS:
        check_terms(zone, anchor, at("2026-11-10"))


def test_months_that_raw_sql_lets_start_within_a_quarter_start_with_the_quarter() -> None:
    timeline = Timeline("UTC", "2026-01-10T06:07")
    assert [period.start for period in timeline.between(at("2026-11-01"), at("2026-12-11"))] == [
        at(f"2026-{month}-10T06:00") for month in (10, 11, 12)
    ]
    assert timeline.at(at("2026-11-10T06:00")).start == at("2026-11-10T06:00")
    assert timeline.at(at("2026-11-10T06:00") - 1).end == at("2026-11-10T06:00")
    assert SHORTEST == 2 * DAY
