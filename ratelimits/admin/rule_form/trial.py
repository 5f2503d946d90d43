"""Try a rule before it is saved: show what it would admit, as charts and tables, and what it would do to keys."""

from __future__ import annotations

import time
from decimal import Decimal
from typing import Any, NamedTuple

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ratelimits.admin.rule_form.rule_text import effect
from ratelimits.algorithms.base import Wording, amount, number
from ratelimits.conf import conf
from ratelimits.engine.server import current_server
from ratelimits.models import Rule
from ratelimits.quota.standings import UNAVAILABLE
from ratelimits.simulate.trial import Slot, TrialResult, try_rule
from ratelimits.status.additions import registered

#: Size of the chart in SVG units, without its labels.
WIDTH, HEIGHT = 480, 96
#: Approximate number of rows of the table.
_ROWS = 8


def trial_of(rule: Rule | None, errors: list[str]) -> dict[str, Any]:
    """Return the values for the template: charts and numbers of keys, or the errors in the typed values."""
    if rule is None:
        return {"errors": errors or [_("Nothing was typed.")]}
    algorithm = rule.to_algorithm()
    context: dict[str, Any] = {"affected": effect(rule, algorithm)}
    if algorithm.admits_nothing:
        return context
    unit = conf.UNITS.get(rule.meter, rule.meter)
    try:
        trials = [*try_rule(current_server().wire, algorithm, rule.max_wait, time.time_ns() // 1000)]
        if not algorithm.leases:
            trials += (trial for added in registered for trial in added.trials(rule))
    except UNAVAILABLE:
        return {**context, "redis_is_silent": True}
    return {**context, "charts": [_chart(trial, unit) for trial in trials]}


class Bar(NamedTuple):
    """A bar of the chart, in SVG units. Its lower part stands for admitted permits, its upper part for refused permits.

    admitted_y, admitted  the y coordinate and the height of the lower part
    refused_y, refused    the y coordinate and the height of the upper part
    """

    x: str
    width: str
    admitted_y: str
    admitted: str
    refused_y: str
    refused: str


class TableRow(NamedTuple):
    """A row of the table: the start of a span of time, and the permits in this span."""

    start: str
    requested: str
    admitted: str
    refused: str


def _chart(trial: TrialResult, unit: str) -> dict[str, Any]:
    """Return the values of the chart's template. `unit` is the unit of the meter."""
    words = Wording(_, ngettext)
    highest = max(1, *(slot.admitted + slot.refused for slot in trial.slots))
    return {
        "title": _title(trial, unit, words),
        "summary": _summary(trial, unit, words),
        "bars": [_bar(index, len(trial.slots), slot, highest) for index, slot in enumerate(trial.slots)],
        "width": WIDTH,
        "height": HEIGHT,
        "highest": number(highest),
        "end": words.span(_short(trial.length)),
        "rows": _rows(trial, words),
    }


def _title(trial: TrialResult, unit: str, words: Wording) -> str:
    values = {"each": amount(trial.permits, unit), "every": words.span(_short(trial.interval), bare=True)}
    values["length"] = words.span(_short(trial.length))
    if trial.kind == "bursts":
        text = _("Bursts: %(each)s at once, every %(every)s")
    elif trial.kind == "recorded":
        text = _("Recorded requests: the newest %(length)s, %(each)s")
    else:
        text = _("Steady overload: %(each)s, spread evenly over %(length)s")
    title = text % values
    if trial.duration:
        title = _("%(load)s; each request takes %(held)s") % {"load": title, "held": words.span(trial.duration)}
    return title


def _summary(trial: TrialResult, unit: str, words: Wording) -> str:
    values = {"admitted": number(trial.admitted), "asked": amount(trial.requested, unit)}
    text = _("%(admitted)s of %(asked)s admitted.") % values
    if trial.longest_wait:
        text += " " + _("The longest wait is %(span)s.") % {"span": words.span(_short(trial.longest_wait))}
    return text


def _short(seconds: Decimal) -> Decimal:
    """Return whole seconds as they are, and other seconds with at most three significant digits."""
    return seconds if not seconds % 1 else Decimal(f"{seconds:.3g}")


def _bar(index: int, slots: int, slot: Slot, highest: int) -> Bar:
    width = Decimal(WIDTH) / slots
    admitted, refused = (Decimal(HEIGHT * count) / highest for count in (slot.admitted, slot.refused))
    # SVG needs a decimal point in every language. Django would write numbers as the user's language does.
    # The y axis points down. Between two bars, there is a gap of 1 unit.
    return Bar(
        x=f"{index * width:.2f}",
        width=f"{width - 1:.2f}",
        admitted_y=f"{HEIGHT - admitted:.2f}",
        admitted=f"{admitted:.2f}",
        refused_y=f"{HEIGHT - admitted - refused:.2f}",
        refused=f"{refused:.2f}",
    )


def _rows(trial: TrialResult, words: Wording) -> list[TableRow]:
    rows = []
    number_of_slots = len(trial.slots)
    per_row = max(number_of_slots // _ROWS, 1)
    for first in range(0, number_of_slots, per_row):
        slots = trial.slots[first : first + per_row]
        row = TableRow(
            start=words.span(_short(trial.length * first / number_of_slots)),
            requested=number(sum(slot.requested for slot in slots)),
            admitted=number(sum(slot.admitted for slot in slots)),
            refused=number(sum(slot.refused for slot in slots)),
        )
        rows.append(row)
    return rows
