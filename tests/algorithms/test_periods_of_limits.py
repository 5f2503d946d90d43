"""Test the four periods that a limit per billing period gives to the script, by dates and by a second calculation."""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from random import Random

import pytest

from ratelimits.algorithms.billing_periods import PeriodTerms, Span
from ratelimits.algorithms.limits import Algorithm, CalendarWindow
from tests.reference.periods import DAY, Calendar
from tests.support.usage.traffic import at

MONTH = CalendarWindow(capacity=1, calendar_unit="month", timezone="Asia/Tokyo")
LIMIT = CalendarWindow(capacity=1, calendar_unit="billing_period")
ZONES = ("UTC", "Asia/Tokyo", "America/New_York", "Europe/Berlin", "Asia/Kathmandu", "Australia/Lord_Howe")
ANCHORS = (None, "2024-01-10T00:00", "2024-01-31T06:00", "2024-02-29T23:45", "2024-03-31T02:30", "2024-01-15T12:30")
FIRST, LAST = at("2024-01-01"), at("2027-01-01")


def with_used_period(timezone: str, anchor: str | None, used: Span) -> PeriodTerms:
    """Return the terms of an account that were edited after a period was used. This period keeps its start and end."""
    return PeriodTerms(timezone, anchor, (used,))


def four_starts(limit: Algorithm, now: int) -> tuple[int, ...]:
    """Return the starts of the previous period, the current one and the next two, as the script gets them."""
    starts = limit.params(now)[:4]
    assert limit.valid_span(now) == starts[1:3]
    return starts


def kept(anchor: str) -> PeriodTerms:
    """Return the terms of an account in UTC that has used its period from 10 November to 10 December 2026."""
    return with_used_period("UTC", anchor, (at("2026-11-10"), at("2026-12-10")))


TENTH, TWENTY_FIFTH = "2026-01-10T00:00", "2026-01-25T00:00"


@pytest.mark.parametrize(
    ("of_account", "now", "starts"),
    [
        (PeriodTerms(), "2026-11-20", ("2026-10-01", "2026-11-01", "2026-12-01", "2027-01-01")),
        (PeriodTerms("UTC", TENTH), "2026-11-20", ("2026-10-10", "2026-11-10", "2026-12-10", "2027-01-10")),
        (
            PeriodTerms("Asia/Tokyo", TENTH),
            "2026-11-20",
            ("2026-10-09T15:00", "2026-11-09T15:00", "2026-12-09T15:00", "2027-01-09T15:00"),
        ),
        # Long before the used period, two before, one before, in it, and one, two and three after it.
        (kept(TWENTY_FIFTH), "2026-09-01", ("2026-07-25", "2026-08-25", "2026-09-25", "2026-10-25")),
        (kept(TWENTY_FIFTH), "2026-10-01", ("2026-08-25", "2026-09-25", "2026-10-25", "2026-11-10")),
        (kept(TWENTY_FIFTH), "2026-11-01", ("2026-09-25", "2026-10-25", "2026-11-10", "2026-12-10")),
        (kept(TWENTY_FIFTH), "2026-11-20", ("2026-10-25", "2026-11-10", "2026-12-10", "2026-12-25")),
        (kept(TWENTY_FIFTH), "2026-12-15", ("2026-11-10", "2026-12-10", "2026-12-25", "2027-01-25")),
        (kept(TWENTY_FIFTH), "2026-12-26", ("2026-12-10", "2026-12-25", "2027-01-25", "2027-02-25")),
        (kept(TWENTY_FIFTH), "2027-01-26", ("2026-12-25", "2027-01-25", "2027-02-25", "2027-03-25")),
        # The months start where they did before the edit.
        (kept(TENTH), "2026-11-09T23:59", ("2026-09-10", "2026-10-10", "2026-11-10", "2026-12-10")),
        (kept(TENTH), "2026-12-11", ("2026-11-10", "2026-12-10", "2027-01-10", "2027-02-10")),
        # The first period after the used one has at least two days.
        (kept("2026-01-12T00:00"), "2026-11-20", ("2026-10-12", "2026-11-10", "2026-12-10", "2026-12-12")),
        (kept("2026-01-11T23:45"), "2026-12-11", ("2026-11-10", "2026-12-10", "2027-01-11T23:45", "2027-02-11T23:45")),
    ],
)
def test_the_starts_of_the_periods_around_a_moment(
    of_account: PeriodTerms, now: str, starts: tuple[str, str, str, str]
) -> None:
    assert four_starts(LIMIT.in_periods_of(of_account), at(now)) == tuple(map(at, starts))


@lru_cache
def months(timezone: str, anchor: str | None) -> list[int]:
    """Return the starts of all months from 250 days before FIRST until 250 days after LAST."""
    calendar = Calendar("month", timezone, anchor)
    starts = [calendar.span(FIRST - 250 * DAY)[0]]
    while starts[-1] < LAST + 250 * DAY:
        starts.append(calendar.span(starts[-1])[1])
    return starts


def test_periods_are_the_spans_between_the_months_and_the_used_period(long_run: bool) -> None:
    """Each month of the terms begins a period, except in the used period, and in the two days after it."""
    draw = Random("periods of limits")
    for _ in range(3_000 if long_run else 200):
        timezone, anchor = draw.choice(ZONES), draw.choice(ANCHORS)
        start, end = Calendar("month", draw.choice(ZONES), draw.choice(ANCHORS)).span(draw.randrange(FIRST, LAST))
        if any(0 < start - month < 2 * DAY for month in months(timezone, anchor)):
            continue
        limit = LIMIT.in_periods_of(with_used_period(timezone, anchor, (start, end)))
        begun = [month for month in months(timezone, anchor) if month < start or month >= end + 2 * DAY]
        starts = sorted({*begun, start, end})
        edges = [edge for edge in starts if start - 70 * DAY < edge < end + 100 * DAY]
        moments = [draw.randrange(FIRST, LAST), *edges, *(edge - 1 for edge in edges)]
        for moment in moments:
            place = bisect_right(starts, moment)
            assert four_starts(limit, moment) == tuple(starts[place - 2 : place + 2]), (timezone, anchor, start, moment)


def test_the_terms_of_an_account_are_nothing_to_other_limits() -> None:
    terms = PeriodTerms("Europe/Berlin", "2026-01-10T00:00")
    assert MONTH.in_periods_of(terms) is MONTH
    assert (MONTH.follows_billing, LIMIT.follows_billing) == (False, True)
    now = at("2026-11-20")
    assert MONTH.month_at(now) == (at("2026-11-01T00:00+09:00"), at("2026-12-01T00:00+09:00"))
    assert LIMIT.in_periods_of(terms).month_at(now) is None


@pytest.mark.parametrize(
    ("terms", "said"),
    [
        (PeriodTerms("Mars/Olympus"), "unknown time zone 'Mars/Olympus'"),
        (PeriodTerms("UTC", "the tenth"), "anchor 'the tenth' is not an ISO local date-time"),
    ],
)
def test_terms_that_are_not_valid_are_refused(terms: PeriodTerms, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        LIMIT.in_periods_of(terms)
