"""The billing periods of one account, as its usage, its adjustments and its reports have them."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property

from django.db.models import Max

from ratelimits.models import Adjustment, Line
from ratelimits.reports.adjusting import start_of
from ratelimits.reports.closing.books import Books
from ratelimits.reports.periods import SECOND, Period, period_at, period_from
from ratelimits.reports.terms import Terms
from ratelimits.reports.tiles import Tile, reported_tiles, tiles

#: No whole billing month is shorter (µs).
SHORTEST = 27 * 86_400 * SECOND


class AccountPeriods:
    """An account's billing periods; `counted` are starts (µs) of periods of usage, beside those the books know of.

    What asks for the account's terms raises ValueError where its time zone is no more; with `lenient` it goes by UTC.
    """

    def __init__(self, books: Books, account: str, counted: Collection[int] = (), *, lenient: bool = False) -> None:
        self._books, self._account, self._counted, self._lenient = books, account, counted, lenient

    @cached_property
    def tiles(self) -> list[Tile]:
        """The billing periods that have usage, adjustments or a report, in their order."""
        used: dict[int, int] = {}
        for usage in self._books.usage(self._account):
            start = usage.period * SECOND
            end = self._end(start) if usage.period_end is None else usage.period_end * SECOND
            used[start] = max(end, used.get(start, 0))
        used |= {start: self._end(start) for start in self._counted if start not in used}
        reported = reported_tiles(self._books.reports(self._account), used)
        spans = [*used.items(), *((tile.start, tile.end) for tile in reported)]
        for start in map(start_of, self._books.adjustments(self._account)):
            if not any(begun <= start < end for begun, end in spans):
                used[start] = self._end(start)
        return tiles(used, reported, self._last_used)

    def open(self) -> list[Tile]:
        """Return those that have no report yet."""
        return [tile for tile in self.tiles if not tile.closed]

    def open_by_member(self) -> dict[int, tuple[Tile, Period]]:
        """Return those that have no report, by the starts (µs) of the periods that usage was counted under."""
        return {start: found for tile in self.open() for found in [(tile, self.period(tile))] for start in tile.members}

    def period(self, tile: Tile) -> Period:
        """Return a billing period with the time zone that it goes by."""
        return Period(tile.start, tile.end, self._months(max(tile.members), tile.end - 1).timezone)

    def next(self) -> Period:
        """Return the period that follows on the last one, by the terms of today."""
        last = max(tile.end for tile in self.tiles)
        return self._books.terms(self._account, None).period(last)

    def adjustments(self, tile: Tile) -> list[Adjustment]:
        """Return the adjustments of a billing period that no report has yet."""

        return [each for each in self._books.adjustments(self._account) if _is_of(start_of(each), tile)]

    def around(self, start: int) -> Tile | None:
        """Return the billing period that an adjustment of this start (µs) is of; None if that has nothing so far."""
        return next((tile for tile in self.tiles if _is_of(start, tile)), None)

    def oldest(self) -> int:
        """Return when the oldest period (µs since 1970 UTC) starts that has usage and no report."""
        usage = self._books.usage(self._account)
        return min((row.period * SECOND for row in usage if row.covered is None), default=0)

    def _end(self, start: int) -> int:
        """Return when a period ends whose usage does not say so: where the next one starts by the terms that held."""
        terms = self._months(start, None)
        return period_from(terms.timezone, terms.anchor, start, self._books.terms(self._account, None).kept).end

    def _months(self, start: int, otherwise: int | None) -> Terms:
        """Return the terms by which a month starts then; where none of the account's do, those of another moment."""
        held = [self._books.terms(self._account, at) for at in (start, start + SHORTEST, None)]
        known = (terms for terms in held if period_at(terms.timezone, terms.anchor, start).start == start)
        try:
            return next(known, None) or self._books.terms(self._account, otherwise)
        except ValueError:
            if self._lenient:
                return Terms()
            raise

    def _last_used(self, starts: Collection[int]) -> dict[int, int]:
        lines = Line.objects.using(self._books.using).filter(account=self._account)
        lines = lines.filter(period__in=[start // SECOND for start in starts])
        bins = lines.values_list("period").order_by().annotate(Max("bin"))
        return {period * SECOND: newest for period, newest in bins}


def _is_of(start: int, tile: Tile) -> bool:
    return start in tile.members or tile.start <= start < tile.end
