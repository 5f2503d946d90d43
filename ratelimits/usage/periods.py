"""Calculate with months and moments.

Moments are µs since 1970 UTC. A period includes its start and excludes its end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import lru_cache, reduce
from operator import or_
from typing import TYPE_CHECKING

from django.db.models import Q

from ratelimits.algorithms import calendar
from ratelimits.algorithms.billing_periods import month_of, zone_or_utc
from ratelimits.moments import moment

if TYPE_CHECKING:
    from ratelimits.models.accounts.named import TextSpan

SECOND = 1_000_000
#: Maximum length of a billing period (µs): a month of 31 days, two more days at each end, and a change of the clocks.
MAX_LENGTH = 36 * 86_400 * SECOND
#: Matches a month like "2026-11": its year and its number.
_MONTH = re.compile(r"([0-9]{4})-(0[1-9]|1[0-2])")


def _first_days(month: str) -> tuple[datetime, datetime]:
    """Return UTC midnight on the first day of a month and of the next month.

    Raise ValueError if the text is not a month.
    """
    match = _MONTH.fullmatch(month)
    if match is None:
        raise ValueError(f"{month!r} is not a month: write it like 2026-11")
    year, number = int(match[1]), int(match[2])
    first = datetime(year, number, 1, tzinfo=UTC)
    # After month 12 comes month 1 of the next year.
    return first, datetime(year + number // 12, number % 12 + 1, 1, tzinfo=UTC)


def month_window(month: str) -> tuple[int, int]:
    """Return the start of a month like "2026-11" in the easternmost zone, and its end in the westernmost zone (in µs).

    Raise ValueError if the text is not a month.
    """
    first, following = _first_days(month)
    # Local midnight is at most 14 hours before midnight in UTC, and at most 12 hours after it.
    return calendar.instant(first) - 14 * 3600 * SECOND, calendar.instant(following) + 12 * 3600 * SECOND


def span_of(month: str) -> tuple[int, int]:
    """Return a span (start and end, in µs) that contains all billing periods of a month like "2026-11".

    Raise ValueError if the text is not a month.
    """
    start, end = month_window(month)
    return start - MAX_LENGTH, end


def month_in(month: str, timezone: str) -> tuple[int, int]:
    """Return the start and end (µs) of a month like "2026-11" in a time zone; in UTC if the zone does not exist.

    Raise ValueError if the text is not a month.
    """
    first, following = (day.replace(tzinfo=zone_or_utc(timezone)) for day in _first_days(month))
    return calendar.instant(first), calendar.instant(following)


def checked_month(month: str) -> str:
    """Return the text of a month like "2026-11". Raise ValueError if the text is not a month."""
    _first_days(month)
    return month


def utc_month_start(at: int) -> int:
    """Return the start (µs) of the month in UTC that contains a moment."""
    return month_in(month_of(at, "UTC"), "UTC")[0]


# A report repeats the same small set of moments (bins, starts and ends of periods), so a cache helps.
@lru_cache(maxsize=16_384)
def iso(microseconds: int) -> str:
    """Return a moment as text in ISO 8601, in UTC. Microseconds are written only if they are not 0."""
    return moment(microseconds).isoformat().replace("+00:00", "Z")


def within(start: int, end: int) -> Q:
    """Return the condition for the ledger lines of a billing period from `start` to `end` (µs since 1970 UTC)."""
    return Q(bin__gte=start // SECOND, bin__lt=end // SECOND)


def in_spans(spans: Iterable[TextSpan]) -> Q:
    """Return the condition for the rows, such as ledger lines, of an account text and a bin in one of these spans."""
    no_rows = Q(pk__in=())  # the result if there is no span
    return reduce(or_, (Q(account=span.text) & within(span.start, span.end) for span in spans), no_rows)
