"""Algorithms that count: the permits in a window of time, or the requests that run at once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from decimal import Decimal

from ratelimits.algorithms import calendar
from ratelimits.algorithms.base import (
    MICROSECONDS,
    Algorithm,
    Bounded,
    Params,
    Storage,
    Wording,
    amount,
    choice,
    gettext_noop,
    length,
    micros,
    whole,
)
from ratelimits.algorithms.billing_periods import FourStarts, Frozen, PeriodTerms, periods_around

# Lengths in µs. Months and years have no fixed length.
_LENGTHS = {"hour": 3_600 * MICROSECONDS, "day": 86_400 * MICROSECONDS, "week": 604_800 * MICROSECONDS}
#: The unit of windows that are the billing periods of the account that makes the request.
BILLING_PERIOD = "billing_period"
#: The units of calendar windows.
CALENDAR_UNITS = (*calendar.UNITS, BILLING_PERIOD)
#: The metadata of a field that no rule has: the app itself sets it (see `fields_of`).
NO_FIELD_OF_RULES = "no field of rules"
#: What people read for each calendar unit.
UNIT_NAMES = {
    "hour": gettext_noop("calendar hour"),
    "day": gettext_noop("calendar day"),
    "week": gettext_noop("calendar week"),
    "month": gettext_noop("calendar month"),
    "year": gettext_noop("calendar year"),
    BILLING_PERIOD: gettext_noop("billing period"),
}


@dataclass(frozen=True, slots=True)
class FixedWindow(Bounded):
    """At most `capacity` permits can be taken in each window of `period` seconds.

    If `window_start` is "epoch", windows follow one another, beginning in 1970. If it is "first_hit", a window begins
    with the first request after the previous window has ended.
    """

    id = "fixed_window"
    label = gettext_noop("fixed window")
    explanation = gettext_noop(
        "Counts requests in windows of a fixed length. Each window starts from 0. So in a short time around the end of"
        " a window, up to twice the capacity can pass."
    )
    code = 5
    script = "window"
    prefetch_where = {"window_start": ("epoch",)}
    period: Decimal
    window_start: str = "epoch"

    def _check(self) -> None:
        Bounded._check(self)
        self._set("period", length("period", self.period))
        choice("window_start", self.window_start, ("epoch", "first_hit"))

    @property
    def quota(self) -> tuple[int, int | None]:
        return self.capacity, micros(self.period)

    def sentence(self, words: Wording, unit: str) -> list[str]:
        _ = words.gettext
        first_hit = self.window_start == "first_hit"
        windows = _("in windows that the first request opens") if first_hit else _("in fixed windows")
        return [words.pace(Decimal(self.capacity), self.period, unit), windows]

    @property
    def can_be_undone(self) -> bool:
        # With `first_hit`, a request that is refunded can have opened a window, which stays open.
        return self.window_start == "epoch"

    def record_form(self, params: Params) -> str:
        return "window"

    def params(self, now: int) -> Params:
        return micros(self.period), int(self.window_start == "first_hit"), 0, 0, 0, self.capacity


@dataclass(frozen=True, slots=True)
class CalendarWindow(Bounded):
    """At most `capacity` permits can be taken in each hour, day, week, month or year of the calendar in a time zone.

    `anchor` is a local date and time at which one of these periods starts. If it is None, the periods start as in the
    calendar.

    With the unit "billing_period", the windows are the billing periods of the account that makes the request. Then
    `timezone`, `anchor` and `frozen` are the terms of this account, which `in_periods_of` sets. A rule has none of
    them.
    """

    id = "calendar_window"
    label = gettext_noop("calendar window")
    explanation = gettext_noop(
        "Counts requests in each hour, day, week, month or year of the calendar, in a time zone, or in each billing"
        " period of the account. Choose it for quotas such as 100,000 per month."
    )
    code = 6
    script = "window"
    prefetch_where = {}  # permits can always be prefetched
    calendar_unit: str
    timezone: str = "UTC"
    anchor: str | None = None
    frozen: Frozen = field(default=(), metadata={NO_FIELD_OF_RULES: True})

    def _check(self) -> None:
        Bounded._check(self)
        if self.calendar_unit not in CALENDAR_UNITS:
            raise ValueError(f"unknown calendar_unit {self.calendar_unit!r}: use one of {', '.join(CALENDAR_UNITS)}")
        self._set("anchor", self.anchor or None)
        any_moment = 10**15  # µs since 1970: a moment in 2001
        self._starts(any_moment)  # This raises ValueError if the time zone or the anchor is wrong.

    def _starts(self, now: int) -> FourStarts:
        """Return the starts of the previous window, the window that contains `now`, and the next two."""
        if self.follows_billing:
            return periods_around(self.timezone, self.anchor, self.frozen, now)
        return calendar.boundaries(self.calendar_unit, self.timezone, self.anchor, now)

    @property
    def follows_billing(self) -> bool:
        return self.calendar_unit == BILLING_PERIOD

    def in_periods_of(self, terms: PeriodTerms) -> Algorithm:
        return replace(self, **terms._asdict()) if self.follows_billing else self

    def sentence(self, words: Wording, unit: str) -> list[str]:
        _ = words.gettext
        shown = {"amount": amount(self.capacity, unit), "unit": _(UNIT_NAMES[self.calendar_unit])}
        text = _("%(amount)s per %(unit)s") % shown
        if self.follows_billing:
            return [text]
        parts = [f"{text} ({self.timezone})"]
        if self.anchor:
            parts.append(_("counted from %(anchor)s") % {"anchor": self.anchor.replace("T", " ")})
        return parts

    @property
    def quota(self) -> tuple[int, int | None]:
        return self.capacity, _LENGTHS.get(self.calendar_unit)

    def params(self, now: int) -> Params:
        return *self._starts(now), 0, self.capacity

    def record_form(self, params: Params) -> str:
        return "window"

    def valid_span(self, now: int) -> tuple[int, int]:
        _before, start, end, _after = self._starts(now)
        return start, end

    def month_at(self, moment: int) -> tuple[int, int] | None:
        return self.valid_span(moment) if self.calendar_unit == "month" else None


@dataclass(frozen=True, slots=True)
class SlidingWindow(Bounded):
    """At most `capacity` permits can be taken in a window of `period` seconds, which moves in steps.

    The window is divided into `sub_windows` sub-windows, and each of them has one count, as in LeapArray of Alibaba's
    Sentinel. When a new sub-window begins, the oldest sub-window leaves the window. Without `weighted`, its count is
    then no longer used.

    With `weighted`, a share of the oldest count is used until the next sub-window begins. This share falls from 1 to 0.
    With `weighted` and one sub-window, this is the well-known approximation with two counters.
    """

    id = "sliding_window"
    label = gettext_noop("sliding window")
    explanation = gettext_noop(
        "Counts the requests of the last period. The period moves in small steps, so permits come back a few at a time."
        " The counts need little memory."
    )
    code = 7
    script = "sliding_window"
    storage = Storage(packed=False, own="w")
    period: Decimal
    sub_windows: int = 10
    weighted: bool = False

    def _check(self) -> None:
        Bounded._check(self)
        self._set("period", length("period", self.period))
        self._set("sub_windows", whole("sub_windows", self.sub_windows, 1, 1000))
        if not isinstance(self.weighted, bool):
            raise ValueError(f"weighted must be true or false, not {self.weighted!r}")
        if micros(self.period) % self.sub_windows:
            raise ValueError(
                f"period {self.period} does not divide into {self.sub_windows} sub_windows of whole microseconds"
            )

    def sentence(self, words: Wording, unit: str) -> list[str]:
        steps = words.ngettext("sliding in %(n)s step", "sliding in %(n)s steps", self.sub_windows)
        parts = [words.pace(Decimal(self.capacity), self.period, unit), steps % {"n": self.sub_windows}]
        return [*parts, words.gettext("counting a share of the oldest step")] if self.weighted else parts

    @property
    def quota(self) -> tuple[int, int | None]:
        return self.capacity, micros(self.period)

    def params(self, now: int) -> Params:
        return (
            micros(self.period) // self.sub_windows,
            self.sub_windows,
            int(self.weighted),
            0,
            0,
            self.capacity,
        )

    def record_form(self, params: Params) -> str:
        counts = self.sub_windows + 1  # one more, for the sub-window that has just left the window
        return f"counts:{6 * counts}"  # a count has six bytes


@dataclass(frozen=True, slots=True)
class SlidingLog(Bounded):
    """At most `capacity` permits can be taken in any interval of `period` seconds.

    This is exact, but it needs memory for the moment of each request.
    """

    id = "sliding_log"
    label = gettext_noop("sliding log")
    explanation = gettext_noop(
        "In any interval with the length of the period, at most the capacity passes. This is exact, but the time of"
        " every request is stored."
    )
    code = 8
    script = "sliding_log"
    # The newest requests are in the limit's own key, and the older requests in a second Redis key, the "tree".
    storage = Storage(own="l", endings={"tree": ":b"})
    period: Decimal

    def _check(self) -> None:
        Bounded._check(self)
        self._set("period", length("period", self.period))

    def sentence(self, words: Wording, unit: str) -> list[str]:
        shown = {"amount": amount(self.capacity, unit), "span": words.span(self.period, bare=True)}
        return [words.gettext("%(amount)s in any %(span)s") % shown]

    @property
    def quota(self) -> tuple[int, int | None]:
        return self.capacity, micros(self.period)

    def params(self, now: int) -> Params:
        return micros(self.period), 0, 0, 0, 0, self.capacity

    def record_form(self, params: Params) -> str:
        return "log"


@dataclass(frozen=True, slots=True)
class Concurrency(Bounded):
    """At most `capacity` requests run at once.

    The lease of a request ends with the request. If the request takes longer than `lease_ttl` seconds, its lease ends
    after this time.
    """

    id = "concurrency"
    label = gettext_noop("concurrency")
    explanation = gettext_noop(
        "Limits how many requests run at the same moment. A request gives its place back when it ends."
    )
    code = 11
    script = "concurrency"
    # lua/algorithms/concurrency.lua describes these Redis keys.
    storage = Storage(
        own="c",
        endings={"details": ":x"},
        optional={"announced": ":a", "freed": ":f"},
    )
    leases = True
    #: A lease can be released at any moment, so a process must not repeat a refusal from memory.
    refusals_stand = False
    lease_ttl: Decimal = Decimal(60)

    def _check(self) -> None:
        Bounded._check(self)
        self._set("lease_ttl", length("lease_ttl", self.lease_ttl))

    def sentence(self, words: Wording, unit: str) -> list[str]:
        _ = words.gettext
        return [
            _("%(amount)s at once") % {"amount": amount(self.capacity, unit)},
            _("each for up to %(span)s") % {"span": words.span(self.lease_ttl)},
        ]

    def params(self, now: int) -> Params:
        return micros(self.lease_ttl), 0, 0, 0, 0, self.capacity

    def record_form(self, params: Params) -> str:
        return "leases"
