"""Write numbers, lengths of time and amounts for people. These texts are parts of the sentences that describe rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal


def gettext_noop(text: str) -> str:
    """Return the text unchanged. Django's `makemessages` collects the texts in calls of a function with this name."""
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
    """Writes texts in one language. `gettext` and `ngettext` translate texts, as Django's functions do."""

    gettext: Callable[[str], str]
    ngettext: Callable[[str, str, int], str]

    def span(self, seconds: Decimal, *, bare: bool = False) -> str:
        """Return a length of time as text: "30 days". If `bare` is true, return "day" for one day, as in "per day"."""
        for size, unit_of, number_of in _SPANS:
            count = seconds / size
            if count == 1 and bare:
                return unit_of(self)
            # Write weeks only for exactly one week, because people say "14 days" and not "2 weeks".
            if count >= 1 and not count % 1 and (size < 604_800 or count == 1):
                return number_of(self, int(count)) % {"n": number(count)}
        plural = 2  # "0.5 seconds" has the plural, as "2 seconds" has
        return number_of(self, plural) % {"n": number(seconds)}

    def pace(self, rate: Decimal, period: Decimal, unit: str) -> str:
        """Return a rate as text: "5 requests per second"."""
        shown = {"amount": amount(rate, unit), "span": self.span(period, bare=True)}
        return self.gettext("%(amount)s per %(span)s") % shown


#: For each unit of time: its length in seconds, a function that returns its name, and a function that returns the text
#: for a number of these units.
_SPANS: tuple[tuple[int, Callable[[Wording], str], Callable[[Wording, int], str]], ...] = (
    (604_800, lambda words: words.gettext("week"), lambda words, n: words.ngettext("%(n)s week", "%(n)s weeks", n)),
    (86_400, lambda words: words.gettext("day"), lambda words, n: words.ngettext("%(n)s day", "%(n)s days", n)),
    (3_600, lambda words: words.gettext("hour"), lambda words, n: words.ngettext("%(n)s hour", "%(n)s hours", n)),
    (60, lambda words: words.gettext("minute"), lambda words, n: words.ngettext("%(n)s minute", "%(n)s minutes", n)),
    (1, lambda words: words.gettext("second"), lambda words, n: words.ngettext("%(n)s second", "%(n)s seconds", n)),
)
