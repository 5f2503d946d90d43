"""Usage by windows of 15 minutes, hours, days or billing periods, from ledger lines.

Hours and days are local to a time zone. The database adds the lines up, and only the sums of one page are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

from django.db.models import Case, F, IntegerField, Max, Q, Sum, Value, When

from ratelimits.algorithms import calendar
from ratelimits.engine.keys import BIN_SECONDS
from ratelimits.models import Line, PeriodUsage
from ratelimits.reports.periods import SECOND, moment
from ratelimits.reports.terms import Terms, TermsBook

HOUR, DAY = 3600, 86_400
#: Maximum number of days between `from` and `to`, by window.
MAX_DAYS = {"15m": 32, "hour": 93, "day": 400, "period": 1100}
_SUMS = ("admitted_requests", "admitted_units", "denied_requests", "denied_units", "refunded_units")


class PagePosition(NamedTuple):
    """The position of a row in the sorted result: its account, key and meter, and the start of its window (s)."""

    window: int
    account: str
    key: str
    meter: str


@dataclass(frozen=True, slots=True)
class WindowQuery:
    """A query for usage.

    `start` and `end` are µs since 1970 UTC, at the edges of windows. If `account`, `key` or `meter` is None, all are
    queried. Billing periods follow from the account's `terms`. Hours and days are local to `timezone`.
    """

    window: str
    start: int
    end: int
    timezone: str
    terms: Terms
    account: str | None = None
    key: str | None = None
    meter: str | None = None


def edges(window: str, timezone: str, terms: Terms, at: int) -> tuple[int, int]:
    """Return the start and end, in µs since 1970 UTC, of the window that contains a moment."""
    if window == "15m":
        start = at - at % (BIN_SECONDS * SECOND)
        return start, start + BIN_SECONDS * SECOND
    if window == "period":
        period = terms.period(at)
        return period.start, period.end
    _previous, start, end, _next = calendar.boundaries(window, timezone, None, at)
    return start, end


def rows(
    using: str, query: WindowQuery, after: PagePosition | None, count: int
) -> tuple[list[dict[str, Any]], PagePosition | None]:
    """Return at most `count` rows after a position, and the position of the last one if there are more."""
    lines = Line.objects.using(using).filter(_condition(using, query)).annotate(window=_window(query))
    if after is not None:
        lines = lines.filter(_is_after(query, after))
    columns = ("window", "account", "key", "meter")
    sums = lines.values(*columns).annotate(**{name: Sum(name) for name in _SUMS}).order_by(*columns)
    page: list[dict[str, Any]] = list(sums[: count + 1])
    last = PagePosition(*(page[count - 1][name] for name in columns)) if len(page) > count else None
    return list(_with_spans(using, query, page[:count])), last


def _is_after(query: WindowQuery, after: PagePosition) -> Q:
    window, account, key, meter = after
    first = Q(period__gte=window) if query.window == "period" else Q(bin__gte=window - DAY)
    return first & (
        Q(window__gt=window)
        | Q(window=window)
        & (Q(account__gt=account) | Q(account=account) & (Q(key__gt=key) | Q(key=key, meter__gt=meter)))
    )


def _condition(using: str, query: WindowQuery) -> Q:
    start, end = query.start // SECOND, query.end // SECOND
    condition = Q(period__gte=start, period__lt=end) if query.window == "period" else Q(bin__gte=start, bin__lt=end)
    for name in ("account", "key", "meter"):
        value = getattr(query, name)
        if value is not None:
            condition &= Q(**{name: value})
    if query.account is not None:
        # The index of lines is by period and account.
        condition &= Q(period__in=sorted(_periods(using, query.account, query)))
    return condition


def _periods(using: str, account: str, query: WindowQuery) -> set[int]:
    """Return the starts (s since 1970 UTC) of the billing periods that usage in the span can belong to.

    They follow from the account's current terms. Periods with usage in the ledger are added.
    """
    terms, oldest = query.terms, query.start - 32 * DAY * SECOND
    period = terms.period(oldest)
    starts = {0, period.start // SECOND}
    while period.end < query.end:
        period = terms.period(period.end)
        starts.add(period.start // SECOND)
    counted = PeriodUsage.objects.using(using).filter(account=account, period__lt=query.end // SECOND)
    starts.update(counted.filter(period__gt=oldest // SECOND).order_by().values_list("period", flat=True).distinct())
    return starts


def _window(query: WindowQuery) -> Any:
    """Return the expression for the number of a line's window: its start in seconds.

    For days it is the local start, in seconds since 1970 as if the local time were UTC.
    """
    if query.window == "period":
        return F("period")
    if query.window == "15m":
        return F("bin")
    size = HOUR if query.window == "hour" else DAY
    whens = []
    for until, offset in _offsets(query):
        local = F("bin") + Value(offset)
        start = local - local % Value(size)
        whens.append(When(bin__lt=until, then=start if size == DAY else start - Value(offset)))
    return Case(*whens, output_field=IntegerField())


def _offsets(query: WindowQuery) -> Iterator[tuple[int, int]]:
    """Yield the time zone's offsets from UTC within the span, each as (moment until which it applies, offset), in s."""
    start, end = query.start // SECOND, query.end // SECOND
    tz = calendar.zone(query.timezone)

    def offset(second: int) -> int:
        ahead = moment(second * SECOND).astimezone(tz).utcoffset() or timedelta()
        return int(ahead.total_seconds())

    at, current = start, offset(start)
    while at < end:
        step = min(at + DAY, end)
        if offset(step) != current:
            low, high = at, step
            while high - low > BIN_SECONDS:
                middle = low + (high - low) // (2 * BIN_SECONDS) * BIN_SECONDS
                low, high = (middle, high) if offset(middle) == current else (low, middle)
            yield high, current
            current = offset(high)
        at = step
    yield end, current


def _with_spans(using: str, query: WindowQuery, page: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the rows with the start and end of their windows."""
    ends = _period_ends(using, page) if query.window == "period" else {}
    for row in page:
        window = row.pop("window")
        end = ends.get((row["account"], window))
        span = _span(query, window) if end is None else (window * SECOND, end)
        yield {"start": moment(span[0]), "end": moment(span[1]), **row}


def _period_ends(using: str, page: list[dict[str, Any]]) -> dict[tuple[str, int], int]:
    """Return when the billing periods of the rows end (µs since 1970 UTC), by account and start (s)."""
    names, windows = {row["account"] for row in page}, {row["window"] for row in page}
    rows = PeriodUsage.objects.using(using).filter(account__in=names, period__in=windows).order_by()
    stored = {
        (name, start): end for name, start, end in rows.values_list("account", "period").annotate(Max("period_end"))
    }
    ends = {period: end * SECOND for period, end in stored.items() if end is not None}
    rest = {(row["account"], row["window"]) for row in page} - ends.keys()
    terms = TermsBook(using).of({name for name, _start in rest}) if rest else {}
    for name, start in rest:
        ends[name, start] = terms[name].period_from(start * SECOND).end
    return ends


def _span(query: WindowQuery, window: int) -> tuple[int, int]:
    if query.window == "day":
        # Noon is always in the day, even if the clocks change at midnight.
        noon = moment((window + 12 * HOUR) * SECOND).replace(tzinfo=calendar.zone(query.timezone))
        at = calendar.instant(noon)
        return edges("day", query.timezone, query.terms, at)
    size = HOUR if query.window == "hour" else BIN_SECONDS
    return window * SECOND, (window + size) * SECOND
