"""Test to which billing period usage belongs if it was counted under a period that overlaps closed periods."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from ratelimits.reports.billing_periods import BillingPeriod, billing_periods, billing_starts, reported_periods

SECOND = 1_000_000
DAY = 86_400 * SECOND
HOUR = DAY // 24


def report(start: int, end: int, *carried: int, version: int = 1) -> Any:
    """Return a report of one shard's usage: of its own period, and of other periods that it includes."""
    since = {str(period // SECOND): {"0": 1} for period in (start, *carried)}
    return SimpleNamespace(period_start=start, period_end=end, version=version, since=since)


def never(members: Any) -> dict[int, int]:
    return {}


#: Two closed periods: from day 10 to 40, and from day 40 to 70.
CLOSED = [report(10 * DAY, 40 * DAY), report(40 * DAY, 70 * DAY)]


@pytest.mark.parametrize(
    ("start", "end", "billing_start"),
    [
        pytest.param(10 * DAY, 40 * DAY, 10 * DAY, id="a closed period itself"),
        pytest.param(15 * DAY, 30 * DAY, 10 * DAY, id="within one"),
        pytest.param(20 * DAY, 50 * DAY, 10 * DAY, id="within two: the one it begins in"),
        pytest.param(10 * DAY - 18 * HOUR, 40 * DAY - 18 * HOUR, 10 * DAY, id="hours before the first"),
        pytest.param(40 * DAY + 18 * HOUR, 70 * DAY + 18 * HOUR, 40 * DAY, id="hours after the last"),
        pytest.param(5 * DAY, 35 * DAY, None, id="days before the first"),
        pytest.param(60 * DAY, 90 * DAY, None, id="days after the last"),
        pytest.param(70 * DAY, 100 * DAY, None, id="beside them"),
    ],
)
def test_a_period_with_less_than_the_shortest_period_outside_closed_ones_belongs_to_one_of_them(
    start: int, end: int, billing_start: int | None
) -> None:
    periods = billing_periods({start: end}, reported_periods(CLOSED, {}), never)
    (own,) = [period for period in periods if start in period.members]
    assert (own.start if own.closed else None) == billing_start
    assert all(before.end <= after.start for before, after in pairwise(periods))
    assert all(period.end - period.start >= 2 * DAY for period in periods)


@pytest.mark.parametrize("start", [15, 20, 10 - 0.75, 40 + 0.75])
def test_reports_yield_the_same_period_as_the_closing_that_wrote_them(start: float) -> None:
    counted, end = int(start * DAY), int(start * DAY) + 25 * DAY
    (closing,) = [
        period
        for period in billing_periods({counted: end}, reported_periods(CLOSED, {}), never)
        if counted in period.members
    ]
    carrier = report(70 * DAY, 100 * DAY, counted)
    assert billing_starts([*CLOSED, carrier], {counted: end})[counted] == closing.start


def test_a_short_period_that_touches_no_closed_one_stays_a_period() -> None:
    assert billing_periods({0: DAY}, reported_periods(CLOSED, {}), never)[0] == BillingPeriod(0, DAY, frozenset({0}))


def test_of_more_than_two_that_overlap_the_last_starts_where_the_others_end() -> None:
    counted = {0: 30 * DAY, 25 * DAY: 55 * DAY, 50 * DAY: 80 * DAY, 54 * DAY: 56 * DAY}
    periods = billing_periods(counted, [], lambda members: {member: member for member in members})
    second = BillingPeriod(55 * DAY, 80 * DAY, frozenset({50 * DAY, 54 * DAY}))
    assert periods == [BillingPeriod(0, 55 * DAY, frozenset({0, 25 * DAY})), second]


def test_of_periods_used_in_the_same_quarter_of_an_hour_the_next_one_says_which_was_the_last() -> None:
    """Three edits in a minute, a request under each, and a period that follows on the second."""
    counted = {0: 31 * DAY, 10 * DAY: 41 * DAY, 20 * DAY: 51 * DAY, 41 * DAY: 71 * DAY}
    first, second = billing_periods(counted, [], lambda members: dict.fromkeys(members, 25 * DAY // SECOND))
    assert (first.start, first.end, first.members) == (0, 41 * DAY, frozenset({0, 10 * DAY, 20 * DAY}))
    assert (second.start, second.end) == (41 * DAY, 71 * DAY)


def test_of_periods_used_at_different_times_the_one_used_last_says_where_the_billing_period_ends() -> None:
    """The period that follows on another one was counted late; nobody used it after the billing period's last use."""
    counted = {0: 31 * DAY, 10 * DAY: 41 * DAY, 41 * DAY: 71 * DAY}
    used_at = {0: 12 * DAY // SECOND, 10 * DAY: 11 * DAY // SECOND}
    first, second = billing_periods(counted, [], lambda members: used_at)
    assert (first.start, first.end) == (0, 31 * DAY)
    assert (second.start, second.end) == (41 * DAY, 71 * DAY)


def test_overlapping_periods_end_before_a_closed_one_begins() -> None:
    counted = {0: 5 * DAY, 3 * DAY: 20 * DAY}
    first, *_closed = billing_periods(counted, reported_periods(CLOSED, {}), lambda members: {3 * DAY: 1})
    assert (first.start, first.end, first.members) == (0, 10 * DAY, frozenset({0, 3 * DAY}))
