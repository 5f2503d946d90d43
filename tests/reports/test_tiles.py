"""Test to which billing period usage belongs if it was counted under a period that overlaps closed periods."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from ratelimits.reports.tiles import Tile, homes, reported_tiles, tiles

SECOND = 1_000_000
DAY = 86_400 * SECOND
HOUR = DAY // 24


def report(start: int, end: int, *carried: int, version: int = 1) -> Any:
    """Return a report of one shard's usage: of its own period, and of other periods that it includes."""
    since = {str(each // SECOND): {"0": 1} for each in (start, *carried)}
    return SimpleNamespace(period_start=start, period_end=end, version=version, since=since)


def never(members: Any) -> dict[int, int]:
    return {}


#: Two closed periods: from day 10 to 40, and from day 40 to 70.
CLOSED = [report(10 * DAY, 40 * DAY), report(40 * DAY, 70 * DAY)]


@pytest.mark.parametrize(
    ("start", "end", "home"),
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
def test_what_would_leave_less_than_the_shortest_period_belongs_to_a_closed_one(
    start: int, end: int, home: int | None
) -> None:
    found = tiles({start: end}, reported_tiles(CLOSED, {}), never)
    (mine,) = [tile for tile in found if start in tile.members]
    assert (mine.start if mine.closed else None) == home
    assert all(before.end <= after.start for before, after in pairwise(found))
    assert all(tile.end - tile.start >= 2 * DAY for tile in found)


@pytest.mark.parametrize("start", [15, 20, 10 - 0.75, 40 + 0.75])
def test_the_reports_tell_the_same_period_as_the_closing_that_wrote_them(start: float) -> None:
    counted, end = int(start * DAY), int(start * DAY) + 25 * DAY
    (closing,) = [t for t in tiles({counted: end}, reported_tiles(CLOSED, {}), never) if counted in t.members]
    carrier = report(70 * DAY, 100 * DAY, counted)
    assert homes([*CLOSED, carrier], {counted: end})[counted] == closing.start


def test_a_short_period_that_touches_no_closed_one_stays_a_period() -> None:
    assert tiles({0: DAY}, reported_tiles(CLOSED, {}), never)[0] == Tile(0, DAY, frozenset({0}))


def test_of_more_than_two_that_overlap_the_last_starts_where_the_others_end() -> None:
    counted = {0: 30 * DAY, 25 * DAY: 55 * DAY, 50 * DAY: 80 * DAY, 54 * DAY: 56 * DAY}
    found = tiles(counted, [], lambda members: {each: each for each in members})
    second = Tile(55 * DAY, 80 * DAY, frozenset({50 * DAY, 54 * DAY}))
    assert found == [Tile(0, 55 * DAY, frozenset({0, 25 * DAY})), second]
