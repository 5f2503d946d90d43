"""Write numbers, times and amounts for people. The sentences that describe rules are made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal


def gettext_noop(text: str) -> str:
    """Return the text unchanged. The function's name marks the text for translators."""
    return text


def number(value: Decimal | int) -> str:
    """Return a number as text, without trailing zeros and with commas between thousands."""
    return f"{Decimal(value).normalize():,f}"


def amount(value: Decimal | int, unit: str) -> str:
    """Return a number with its unit as text: "1 request", "2 requests"."""
    if value == 1 and unit.endswith("s") and not unit.endswith("ss"):
        unit = unit[:-1]
    return f"{number(value)} {unit}"


@dataclass(frozen=True, slots=True)
class Wording:
    """The translation into one language, by functions like Django's `gettext` and `ngettext`."""

    gettext: Callable[[str], str]
    ngettext: Callable[[str, str, int], str]

    def span(self, seconds: Decimal, *, bare: bool = False) -> str:
        """Return a length of time as text: "30 days". With `bare`, a single unit has no number, as in "per day"."""
        for size, one, many in _SPANS:
            count = seconds / size
            if count == 1 and bare:
                return one(self)
            # Only a length of exactly one week is called a week: people say 14 days and 30 days.
            if count >= 1 and not count % 1 and (size < 604_800 or count == 1):
                return many(self, int(count)) % {"n": number(count)}
        return many(self, 2) % {"n": number(seconds)}

    def pace(self, rate: Decimal, period: Decimal, unit: str) -> str:
        """Return units per time: "5 requests per second"."""
        shown = {"amount": amount(rate, unit), "span": self.span(period, bare=True)}
        return self.gettext("%(amount)s per %(span)s") % shown


_SPANS: tuple[tuple[int, Callable[[Wording], str], Callable[[Wording, int], str]], ...] = (
    (604_800, lambda words: words.gettext("week"), lambda words, n: words.ngettext("%(n)s week", "%(n)s weeks", n)),
    (86_400, lambda words: words.gettext("day"), lambda words, n: words.ngettext("%(n)s day", "%(n)s days", n)),
    (3_600, lambda words: words.gettext("hour"), lambda words, n: words.ngettext("%(n)s hour", "%(n)s hours", n)),
    (60, lambda words: words.gettext("minute"), lambda words, n: words.ngettext("%(n)s minute", "%(n)s minutes", n)),
    (1, lambda words: words.gettext("second"), lambda words, n: words.ngettext("%(n)s second", "%(n)s seconds", n)),
)
