"""Draw the permits that a rule admits under a load, as SVG, and return a table with the same numbers."""

from __future__ import annotations

from decimal import Decimal
from typing import Any, NamedTuple

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ratelimits.algorithms.wording import Wording, amount, number
from ratelimits.simulate.trial import Slot, Tried

#: Size of the drawing in SVG units, without its labels.
WIDTH, HEIGHT = 480, 96
#: Approximate number of rows of the table.
_ROWS = 8


class Bar(NamedTuple):
    """One bar of the drawing: a lower part for admitted permits, and an upper part for refused permits."""

    x: str
    width: str
    admitted_y: str
    admitted: str
    refused_y: str
    refused: str


class TableRow(NamedTuple):
    """A row of the table: the start of a part of the load, and its permits."""

    start: str
    asked: str
    admitted: str
    refused: str


def chart(tried: Tried, unit: str) -> dict[str, Any]:
    """Return the values of the chart's template. `unit` is the unit of the meter."""
    words = Wording(_, ngettext)
    highest = max(1, *(slot.admitted + slot.refused for slot in tried.slots))
    return {
        "title": _title(tried, unit, words),
        "said": _summary(tried, unit, words),
        "bars": [_bar(place, len(tried.slots), slot, highest) for place, slot in enumerate(tried.slots)],
        "width": WIDTH,
        "height": HEIGHT,
        "highest": number(highest),
        "end": words.span(_short(tried.length)),
        "rows": _rows(tried, words),
    }


def _title(tried: Tried, unit: str, words: Wording) -> str:
    shown = {"each": amount(tried.each, unit), "every": words.span(_short(tried.every), bare=True)}
    shown |= {"length": words.span(_short(tried.length)), "held": words.span(tried.held)}
    if tried.kind == "bursts":
        text = _("Bursts: %(each)s at once, every %(every)s")
    elif tried.kind == "recorded":
        text = _("Recorded requests: the newest %(length)s, %(each)s")
    else:
        text = _("Steady overload: %(each)s, spread evenly over %(length)s")
    if tried.held:
        text = _("%(load)s, each for %(held)s") % {"load": text, "held": "%(held)s"}
    return text % shown


def _summary(tried: Tried, unit: str, words: Wording) -> str:
    shown = {"admitted": number(tried.admitted), "asked": amount(tried.asked, unit)}
    said = _("%(admitted)s of %(asked)s admitted.") % shown
    if tried.longest_wait:
        said += " " + _("The longest wait is %(span)s.") % {"span": words.span(_short(tried.longest_wait))}
    return said


def _short(seconds: Decimal) -> Decimal:
    """Return seconds with at most three significant digits, if they are not whole."""
    return seconds if not seconds % 1 else Decimal(f"{seconds:.3g}")


def _bar(place: int, slots: int, slot: Slot, highest: int) -> Bar:
    width = Decimal(WIDTH) / slots
    admitted, refused = (Decimal(HEIGHT * count) / highest for count in (slot.admitted, slot.refused))
    # SVG needs a decimal point in every language, so do not use Django's localised numbers.
    numbers = (place * width, width - 1, HEIGHT - admitted, admitted, HEIGHT - admitted - refused, refused)
    return Bar(*(f"{value:.2f}" for value in numbers))


def _rows(tried: Tried, words: Wording) -> list[TableRow]:
    rows = []
    number_of_slots = len(tried.slots)
    per_row = max(number_of_slots // _ROWS, 1)
    for first in range(0, number_of_slots, per_row):
        sums = (sum(counts) for counts in zip(*tried.slots[first : first + per_row], strict=True))
        rows.append(TableRow(words.span(_short(tried.length * first / number_of_slots)), *map(number, sums)))
    return rows
