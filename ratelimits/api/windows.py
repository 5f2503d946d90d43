"""Ledger lines to usage by windows of 15 minutes, hours, days or billing periods.

Hours and days are those of a time zone's clocks. Only what the database has added up comes here, a page at a time.
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
#: The longest span of each window, in days.
SPANS = {"15m": 32, "hour": 93, "day": 400, "period": 1100}
_SUMS = ("admitted_requests", "admitted_units", "denied_requests", "denied_units", "refunded_units")


class PagePosition(NamedTuple):
    """Where a row stands among all: its window's number, account, key and meter."""

    window: int
    account: str
    key: str
    meter: str


@dataclass(frozen=True, slots=True)
class WindowQuery:
    """What is asked: `start` and `end` are µs since 1970 UTC, at windows' edges; `account`, `key`, `meter` None is any.

    `terms` are the account's, by which its billing periods go; `timezone` has the hours and days.
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
    """The window around a moment: its start and end in µs since 1970 UTC."""
    if window == "15m":
        start = at - at % (BIN_SECONDS * SECOND)
        return start, start + BIN_SECONDS * SECOND
    if window == "period":
        period = terms.period(at)
        return period.start, period.end
    _previous, start, end, _next = calendar.boundaries(window, timezone, None, at)
    return start, end


def rows(
    using: str, question: WindowQuery, after: PagePosition | None, count: int
) -> tuple[list[dict[str, Any]], PagePosition | None]:
    """The rows behind a place, at most `count`, and the place of the last one if there are more."""
    lines = Line.objects.using(using).filter(_condition(using, question)).annotate(window=_window(question))
    if after is not None:
        lines = lines.filter(_behind(question, after))
    place = ("window", "account", "key", "meter")
    sums = lines.values(*place).annotate(**{name: Sum(name) for name in _SUMS}).order_by(*place)
    found: list[dict[str, Any]] = list(sums[: count + 1])
    last = PagePosition(*(found[count - 1][name] for name in place)) if len(found) > count else None
    return list(_with_spans(using, question, found[:count])), last


def _behind(question: WindowQuery, after: PagePosition) -> Q:
    window, account, key, meter = after
    first = Q(period__gte=window) if question.window == "period" else Q(bin__gte=window - DAY)
    return first & (
        Q(window__gt=window)
        | Q(window=window)
        & (Q(account__gt=account) | Q(account=account) & (Q(key__gt=key) | Q(key=key, meter__gt=meter)))
    )


def _condition(using: str, question: WindowQuery) -> Q:
    start, end = question.start // SECOND, question.end // SECOND
    condition = Q(period__gte=start, period__lt=end) if question.window == "period" else Q(bin__gte=start, bin__lt=end)
    for name in ("account", "key", "meter"):
        value = getattr(question, name)
        if value is not None:
            condition &= Q(**{name: value})
    if question.account is not None:
        # Lines are found by period and account.
        condition &= Q(period__in=sorted(_periods(using, question.account, question)))
    return condition


def _periods(using: str, account: str, question: WindowQuery) -> set[int]:
    """The billing periods (s) that an account's usage in a span can belong to: by its terms now, and as counted."""
    terms, oldest = question.terms, question.start - 32 * DAY * SECOND
    period = terms.period(oldest)
    found = {0, period.start // SECOND}
    while period.end < question.end:
        period = terms.period(period.end)
        found.add(period.start // SECOND)
    counted = PeriodUsage.objects.using(using).filter(account=account, period__lt=question.end // SECOND)
    found.update(counted.filter(period__gt=oldest // SECOND).order_by().values_list("period", flat=True).distinct())
    return found


def _window(question: WindowQuery) -> Any:
    """The number of a line's window: its start in seconds; for days, as if the clocks were UTC's."""
    if question.window == "period":
        return F("period")
    if question.window == "15m":
        return F("bin")
    size = HOUR if question.window == "hour" else DAY
    whens = []
    for until, offset in _offsets(question):
        local = F("bin") + Value(offset)
        start = local - local % Value(size)
        whens.append(When(bin__lt=until, then=start if size == DAY else start - Value(offset)))
    return Case(*whens, output_field=IntegerField())


def _offsets(question: WindowQuery) -> Iterator[tuple[int, int]]:
    """How far the clocks are ahead of UTC, in seconds, each up to a moment (s): the changes within the span."""
    start, end = question.start // SECOND, question.end // SECOND
    tz = calendar.zone(question.timezone)

    def offset(second: int) -> int:
        ahead = moment(second * SECOND).astimezone(tz).utcoffset() or timedelta()
        return int(ahead.total_seconds())

    at, held = start, offset(start)
    while at < end:
        step = min(at + DAY, end)
        if offset(step) != held:
            low, high = at, step
            while high - low > BIN_SECONDS:
                middle = low + (high - low) // (2 * BIN_SECONDS) * BIN_SECONDS
                low, high = (middle, high) if offset(middle) == held else (low, middle)
            yield high, held
            held = offset(high)
        at = step
    yield end, held


def _with_spans(using: str, question: WindowQuery, found: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows with the start and end of their windows."""
    ends = _ends(using, found) if question.window == "period" else {}
    for row in found:
        window = row.pop("window")
        end = ends.get((row["account"], window))
        span = _span(question, window) if end is None else (window * SECOND, end)
        yield {"start": moment(span[0]), "end": moment(span[1]), **row}


def _ends(using: str, found: list[dict[str, Any]]) -> dict[tuple[str, int], int]:
    """When billing periods end (µs since 1970 UTC), by account and start (s)."""
    names, windows = {row["account"] for row in found}, {row["window"] for row in found}
    rows = PeriodUsage.objects.using(using).filter(account__in=names, period__in=windows).order_by()
    known = {
        (name, start): end for name, start, end in rows.values_list("account", "period").annotate(Max("period_end"))
    }
    ends = {place: end * SECOND for place, end in known.items() if end is not None}
    rest = {(row["account"], row["window"]) for row in found} - ends.keys()
    terms = TermsBook(using).of({name for name, _start in rest}) if rest else {}
    for name, start in rest:
        ends[name, start] = terms[name].period_from(start * SECOND).end
    return ends


def _span(question: WindowQuery, window: int) -> tuple[int, int]:
    if question.window == "day":
        # Noon is of that day, whatever the clocks do at midnight.
        noon = moment((window + 12 * HOUR) * SECOND).replace(tzinfo=calendar.zone(question.timezone))
        at = calendar.instant(noon)
        return edges("day", question.timezone, question.terms, at)
    size = HOUR if question.window == "hour" else BIN_SECONDS
    return window * SECOND, (window + size) * SECOND
