"""Read sums of ledger lines for each window of time: 15 minutes, an hour, a day or a billing period.

Hours and days follow the local time of a time zone. The database makes the sums, and only the sums of one page are
read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

from django.db.models import BigIntegerField, Case, F, IntegerField, OuterRef, Q, Subquery, Value, When

from ratelimits.algorithms import calendar
from ratelimits.engine.keys import BIN_SECONDS
from ratelimits.models import FrozenPeriod
from ratelimits.models.customers import NameSpan
from ratelimits.moments import moment
from ratelimits.usage.ledger.terms import Terms
from ratelimits.usage.models import Line
from ratelimits.usage.models.sums import ExactSum
from ratelimits.usage.periods import MAX_LENGTH, SECOND, within

#: Lengths in seconds.
HOUR, DAY = 3600, 86_400
#: Maximum number of days between `from` and `to`, by window.
MAX_DAYS = {"15m": 32, "hour": 93, "day": 400, "period": 1100}
#: The columns that are summed up.
_SUMS = ("admitted_requests", "admitted_units", "denied_requests", "denied_units", "refunded_units")


class PagePosition(NamedTuple):
    """The position of a row in the sorted result.

    `window` is the start of the row's window, in seconds since 1970 UTC. For a day, `window` is the local midnight,
    counted as if the local time were UTC.
    """

    window: int
    account: str
    key: str
    meter: str


@dataclass(frozen=True, slots=True)
class WindowQuery:
    """A query for usage.

    window               "15m", "hour", "day" or "period"
    start, end           the start of the first window and the end of the last window, in µs since 1970 UTC
    timezone             the time zone of hours and days
    terms                the account's terms, which say when its billing periods start and end
    spans                the names of the customer whose usage is wanted; None stands for all accounts
    key, meter           None stands for all keys or meters
    """

    window: str
    start: int
    end: int
    timezone: str
    terms: Terms
    spans: Sequence[NameSpan] | None = None
    key: str | None = None
    meter: str | None = None


def edges(window: str, timezone: str, terms: Terms, at: int) -> tuple[int, int]:
    """Return the start and the end of the window that contains the moment `at`. All three are in µs since 1970 UTC."""
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
    """Return at most `count` rows after the position `after`, and the position of the last of these rows.

    If no further rows follow, return None instead of the position.
    """
    lines = Line.objects.using(using).filter(_condition(query)).annotate(window=_window(query))
    if query.window == "period" and query.spans is None:
        lines = lines.filter(window__gte=query.start // SECOND, window__lt=query.end // SECOND)
    if after is not None:
        lines = lines.filter(_is_after(query, after))
    columns = ("window", "account", "key", "meter")
    sums = lines.values(*columns).annotate(**{name: ExactSum(name) for name in _SUMS}).order_by(*columns)
    page: list[dict[str, Any]] = list(sums[: count + 1])
    last = PagePosition(*(page[count - 1][name] for name in columns)) if len(page) > count else None
    return list(_with_spans(using, query, page[:count])), last


def _is_after(query: WindowQuery, after: PagePosition) -> Q:
    """Return the condition for ledger lines whose row comes after a position."""
    window, account, key, meter = after
    # The wide condition lets the database use an index. It also finds earlier rows, which the second condition leaves
    # out. `DAY` is subtracted, because the window of a day is a local midnight, not a moment in UTC.
    return Q(bin__gte=window - DAY) & (
        Q(window__gt=window)
        | Q(window=window)
        & (Q(account__gt=account) | Q(account=account) & (Q(key__gt=key) | Q(key=key, meter__gt=meter)))
    )


def _condition(query: WindowQuery) -> Q:
    end = query.end
    if query.window == "period" and query.spans is None:
        end += MAX_LENGTH  # `rows` leaves out the periods that start later than `query.end`
    condition = within(query.start, end)
    for name in ("key", "meter"):
        value = getattr(query, name)
        if value is not None:
            condition &= Q(**{name: value})
    return condition if query.spans is None else condition & reduce(or_, map(_within, query.spans), Q(pk__in=()))


def _within(span: NameSpan) -> Q:
    """Return the condition for lines of a text while it named the customer."""
    condition = Q(account=span.text)
    if span.since:
        condition &= Q(bin__gte=span.since)
    return condition if span.until is None else condition & Q(bin__lt=span.until)


def _window(query: WindowQuery) -> Any:
    """Return an expression for the start of a line's window, in seconds since 1970 UTC.

    For a day it is the local midnight instead, counted as if the local time were UTC.
    """
    if query.window == "period":
        return _period_start(query)
    if query.window == "15m":
        return F("bin")
    size = HOUR if query.window == "hour" else DAY
    cases = []
    for until, offset in _offsets(query):
        local = F("bin") + Value(offset)
        start = local - local % Value(size)
        cases.append(When(bin__lt=until, then=start if size == DAY else start - Value(offset)))
    return Case(*cases, output_field=IntegerField())


def _period_start(query: WindowQuery) -> Any:
    """Return an expression for the start of a line's billing period, in seconds since 1970 UTC.

    Without an account, lines that are not tallied yet have no period: the expression is NULL.
    """
    if query.spans is not None:
        periods = query.terms.timeline.between(query.start, query.end)
        cases = [When(bin__lt=period.end // SECOND, then=Value(period.start // SECOND)) for period in periods]
        return Case(*cases, output_field=IntegerField())
    rows = FrozenPeriod.objects.filter(
        Q(customer__names__until=None) | Q(customer__names__until__gt=OuterRef("bin")),
        customer__names__identifier=OuterRef("account"),
        customer__names__since__lte=OuterRef("bin"),
        start__lte=OuterRef("bin") * SECOND,
        end__gt=OuterRef("bin") * SECOND,
    )
    return Subquery(rows.annotate(second=F("start") / SECOND).values("second")[:1], output_field=BigIntegerField())


def _offsets(query: WindowQuery) -> Iterator[tuple[int, int]]:
    """Yield the UTC offsets of the time zone in the span, with the moment at which each offset ends.

    Each item is (end in s since 1970 UTC, offset in s).
    """
    start, end = query.start // SECOND, query.end // SECOND
    tz = calendar.zone(query.timezone)

    def offset(second: int) -> int:
        difference = moment(second * SECOND).astimezone(tz).utcoffset() or timedelta()
        return int(difference.total_seconds())

    at, current_offset = start, offset(start)
    while at < end:
        next_at = min(at + DAY, end)
        if offset(next_at) != current_offset:
            # Find the bin in which the offset changes: halve the span until it has one bin.
            low, high = at, next_at
            while high - low > BIN_SECONDS:
                middle = low + (high - low) // (2 * BIN_SECONDS) * BIN_SECONDS
                low, high = (middle, high) if offset(middle) == current_offset else (low, middle)
            yield high, current_offset
            current_offset = offset(high)
        at = next_at
    yield end, current_offset


def _with_spans(using: str, query: WindowQuery, page: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the rows, each with the start and the end of its window."""
    ends = _period_ends(using, page) if query.window == "period" and query.spans is None else {}
    for row in page:
        window = row.pop("window")
        start, end = ends.get((row["account"], window)) or _span(query, window)
        yield {"start": moment(start), "end": moment(end), **row}


def _period_ends(using: str, page: list[dict[str, Any]]) -> dict[tuple[str, int], tuple[int, int]]:
    """Return the start and the end of the billing period of each row (µs since 1970 UTC), by account and window.

    Only usage of frozen periods has a window. If an account has named two customers whose periods start together, the
    row has the usage of both, and the end of the later one.
    """
    texts, starts = {row["account"] for row in page}, {row["window"] * SECOND for row in page}
    rows = FrozenPeriod.objects.using(using).filter(customer__names__identifier__in=texts, start__in=starts)
    spans = rows.order_by("end").values_list("customer__names__identifier", "start", "end")
    return {(text, start // SECOND): (start, end) for text, start, end in spans}


def _span(query: WindowQuery, window: int) -> tuple[int, int]:
    if query.window == "period":
        period = query.terms.period(window * SECOND)
        return period.start, period.end
    if query.window == "day":
        # If the clocks change at midnight, local midnight can be missing, or can come twice. Noon comes once a day.
        noon = moment((window + 12 * HOUR) * SECOND).replace(tzinfo=calendar.zone(query.timezone))
        at = calendar.instant(noon)
        return edges("day", query.timezone, query.terms, at)
    size = HOUR if query.window == "hour" else BIN_SECONDS
    return window * SECOND, (window + size) * SECOND
