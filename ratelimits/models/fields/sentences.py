"""A rule as a sentence: "5 requests per second, bursts to 10, per API key"."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ratelimits.algorithms.limits import (
    Algorithm,
    CalendarWindow,
    Concurrency,
    FixedWindow,
    Gcra,
    LeakyBucket,
    LeakyBucketQueue,
    SlidingLog,
    SlidingWindow,
    SmoothBursty,
    SmoothWarmingUp,
    TokenBucket,
)

_SPANS: tuple[tuple[int, Callable[[], str], Callable[[int], str]], ...] = (
    (604_800, lambda: _("week"), lambda n: ngettext("%(n)s week", "%(n)s weeks", n)),
    (86_400, lambda: _("day"), lambda n: ngettext("%(n)s day", "%(n)s days", n)),
    (3_600, lambda: _("hour"), lambda n: ngettext("%(n)s hour", "%(n)s hours", n)),
    (60, lambda: _("minute"), lambda n: ngettext("%(n)s minute", "%(n)s minutes", n)),
    (1, lambda: _("second"), lambda n: ngettext("%(n)s second", "%(n)s seconds", n)),
)
_UNITS: dict[str, Callable[[], str]] = {
    "hour": lambda: _("calendar hour"),
    "day": lambda: _("calendar day"),
    "week": lambda: _("calendar week"),
    "month": lambda: _("calendar month"),
    "year": lambda: _("calendar year"),
}


def number(value: Decimal | int) -> str:
    """Return a number as text, without trailing zeros and with commas between thousands."""
    return f"{Decimal(value).normalize():,f}"


def span(seconds: Decimal, *, bare: bool = False) -> str:
    """Return a length of time as text: "30 days". With `bare`, a single unit has no number, as in "per day"."""
    for size, singular, plural in _SPANS:
        count = seconds / size
        if count == 1 and bare:
            return singular()
        # Only a single week is called a week: people say 14 days and 30 days.
        if count >= 1 and not count % 1 and (size < 604_800 or count == 1):
            return plural(int(count)) % {"n": number(count)}
    return plural(2) % {"n": number(seconds)}


def amount(value: Decimal | int, unit: str) -> str:
    """Return a number with its unit as text: "1 request", "2 requests"."""
    if value == 1 and unit.endswith("s") and not unit.endswith("ss"):
        unit = unit[:-1]
    return f"{number(value)} {unit}"


def _pace(rate: Decimal, period: Decimal, unit: str) -> str:
    return _("%(amount)s per %(span)s") % {"amount": amount(rate, unit), "span": span(period, bare=True)}


def _waiting(max_wait: Decimal | None) -> str:
    return _("waiting up to %(span)s") % {"span": span(max_wait)} if max_wait else ""


def _level(algorithm: TokenBucket | Gcra, unit: str, max_wait: Decimal | None) -> list[str]:
    parts = [_pace(algorithm.rate, algorithm.period, unit)]
    parts.append(_("bursts to %(capacity)s") % {"capacity": number(algorithm.capacity)})
    initial = getattr(algorithm, "initial", "full")
    if initial == "empty":
        parts.append(_("empty at the start"))
    elif initial != "full":
        parts.append(_("%(initial)s at the start") % {"initial": number(int(initial))})
    return [*parts, _waiting(max_wait)]


def _fixed(algorithm: FixedWindow, unit: str, max_wait: Decimal | None) -> list[str]:
    start = _("from the first one on") if algorithm.window_start == "first_hit" else _("in fixed windows")
    return [_pace(Decimal(algorithm.capacity), algorithm.period, unit), start]


def _calendar(algorithm: CalendarWindow, unit: str, max_wait: Decimal | None) -> list[str]:
    shown = {"amount": amount(algorithm.capacity, unit), "unit": _UNITS[algorithm.calendar_unit]()}
    parts = [_("%(amount)s per %(unit)s") % shown + f" ({algorithm.timezone})"]
    if algorithm.anchor:
        parts.append(_("counted from %(anchor)s") % {"anchor": algorithm.anchor.replace("T", " ")})
    return parts


def _sliding(algorithm: SlidingWindow, unit: str, max_wait: Decimal | None) -> list[str]:
    steps = ngettext("sliding in %(n)s step", "sliding in %(n)s steps", algorithm.sub_windows)
    parts = [_pace(Decimal(algorithm.capacity), algorithm.period, unit), steps % {"n": algorithm.sub_windows}]
    return [*parts, _("the oldest weighted")] if algorithm.weighted else parts


def _log(algorithm: SlidingLog, unit: str, max_wait: Decimal | None) -> list[str]:
    shown = {"amount": amount(algorithm.capacity, unit), "span": span(algorithm.period, bare=True)}
    return [_("%(amount)s in any %(span)s") % shown]


def _leaky(algorithm: LeakyBucket, unit: str, max_wait: Decimal | None) -> list[str]:
    bucket = _("from a leaky bucket of %(capacity)s") % {"capacity": number(algorithm.capacity)}
    return [_pace(algorithm.rate, algorithm.period, unit), bucket]


def _queue(algorithm: LeakyBucketQueue, unit: str, max_wait: Decimal | None) -> list[str]:
    parts = [_pace(algorithm.rate, algorithm.period, unit), _("evenly spaced")]
    if algorithm.delay_after:
        parts.append(_("the first %(n)s unspaced") % {"n": number(algorithm.delay_after)})
    parts.append(_("at most %(capacity)s queued") % {"capacity": number(algorithm.capacity)})
    return [*parts, _waiting(max_wait)]


def _bursty(algorithm: SmoothBursty, unit: str, max_wait: Decimal | None) -> list[str]:
    saved = _("saving up to %(span)s of it") % {"span": span(algorithm.max_burst_seconds)}
    return [_pace(algorithm.rate, algorithm.period, unit), saved, _waiting(max_wait)]


def _warming(algorithm: SmoothWarmingUp, unit: str, max_wait: Decimal | None) -> list[str]:
    shown = {"span": span(algorithm.warm_up), "factor": number(algorithm.cold_factor)}
    warming = _("warming up over %(span)s from 1/%(factor)s of it") % shown
    return [_pace(algorithm.rate, algorithm.period, unit), warming, _waiting(max_wait)]


def _concurrent(algorithm: Concurrency, unit: str, max_wait: Decimal | None) -> list[str]:
    return [
        _("%(amount)s at once") % {"amount": amount(algorithm.capacity, unit)},
        _("each for up to %(span)s") % {"span": span(algorithm.lease_ttl)},
    ]


_SENTENCES: dict[type[Algorithm], Callable[..., list[str]]] = {
    FixedWindow: _fixed,
    CalendarWindow: _calendar,
    SlidingWindow: _sliding,
    SlidingLog: _log,
    TokenBucket: _level,
    Gcra: _level,
    LeakyBucket: _leaky,
    LeakyBucketQueue: _queue,
    SmoothBursty: _bursty,
    SmoothWarmingUp: _warming,
    Concurrency: _concurrent,
}
#: What a rule counts by, for each kind of key.
COUNTED_PER: dict[str, Callable[[], str]] = {
    "user": lambda: _("per user"),
    "api_key": lambda: _("per API key"),
    "account": lambda: _("per account"),
    "ip": lambda: _("per address"),
    "global": lambda: _("for everyone together"),
    "key": lambda: _("per key"),
}


def sentence(algorithm: Algorithm, unit: str, key_kind: str, scope: str = "*", max_wait: Decimal | None = None) -> str:
    """Return a limit as a sentence for people; `unit` is what its meter counts, such as "requests"."""
    limit = [_("nothing passes")] if algorithm.closed else _SENTENCES[type(algorithm)](algorithm, unit, max_wait)
    parts = [*limit, COUNTED_PER[key_kind]()]
    if scope != "*":
        parts.append(_("on %(scope)s") % {"scope": scope})
    return ", ".join(part for part in parts if part)
