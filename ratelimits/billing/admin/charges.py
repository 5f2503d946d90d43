"""The amounts of reports, for their pages in the admin."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from decimal import Decimal
from itertools import groupby, islice
from typing import Any, NamedTuple

from django.utils.html import format_html, format_html_join
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ratelimits.billing.models import Report
from ratelimits.billing.pricing.prices import NO_UNITS
from ratelimits.billing.reports.amounts import UnreadableError, meter_amounts, quantities_of, unreadable_if_malformed
from ratelimits.billing.reports.rows import FEE, MINIMUM, REPRICING, ROUNDING
from ratelimits.billing.reports.statements.charges import other_charges, version_charges
from ratelimits.billing.reports.statements.meter_totals import MeterTotal
from ratelimits.moments import moment
from ratelimits.money import ZERO, plus, written
from ratelimits.usage.periods import SECOND

#: The words for amounts that belong to no line of a report, by category.
_WITHOUT_LINE = {
    FEE: gettext_lazy("fees"),
    REPRICING: gettext_lazy("another price for units of earlier versions"),
    MINIMUM: gettext_lazy("added to reach the minimum"),
    ROUNDING: gettext_lazy("rounding"),
}


def summary(report: Report) -> str:
    """Return, as HTML, the amount of each meter, the amount of the version, and the amount that the account owes.

    Amounts that belong to no line of the report, such as fees, have lines of their own here. Return "–" for a report
    without prices.
    """
    try:
        with unreadable_if_malformed(report):
            rows = format_html_join("", "<div>{}</div>", ((text,) for text in _meter_sentences(report)))
            owed_amounts = report.amounts.get("total", {}) if report.amounts else {}
            totals = format_html_join("", "<div><strong>{}: {} {}</strong></div>", _owed_rows(owed_amounts))
    except UnreadableError as error:
        return str(error)
    return format_html("{}{}", rows, totals) if owed_amounts else "–"


def _owed_rows(amounts: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    for currency, amount in amounts.items():
        yield _("owed for this report up to this version"), amount, currency


def _without_lines(report: Report) -> dict[tuple[str, str], list[str]]:
    """Return the amounts that belong to no line, as texts, by period and meter. The rounding has the meter ""."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for period, record in report.prices.get("periods", {}).items():
        for category, meter, amount in other_charges(record, quantities_of(report.amounts["periods"][period])):
            if amount:
                text = f"{_WITHOUT_LINE[category]}: {written(amount)} {record['currency']}"
                found[period, meter].append(text)
    return found


def _meter_sentences(report: Report) -> Iterator[str]:
    """Yield, for each period, a sentence about each meter, and a sentence with the rounded amount of the period."""
    without_lines = _without_lines(report)
    for period, meters in groupby(meter_amounts(report), key=lambda meter: meter.period):
        for meter in meters:
            values: dict[str, Any] = {"meter": meter.meter, "currency": meter.currency}
            values |= {"amount": written(meter.amount), "after": f"{meter.after.overage:,}"}
            values["before"] = f"{(meter.before or NO_UNITS).overage:,}"
            text = _("%(meter)s: %(after)s units beyond the included quantity, %(amount)s %(currency)s")
            if meter.before is not None:
                text = _(
                    "%(meter)s: %(after)s units beyond the included quantity (%(before)s before this version),"
                    " %(amount)s %(currency)s"
                )
            yield text % values
            yield from (_("– of these, %s") % part for part in without_lines[period, meter.meter])
        yield from without_lines[period, ""]
        # `period` is the start of a billing period, in s since 1970 UTC.
        text = _("this version, for the period from %(start)s: %(amount)s %(currency)s, rounded")
        yield text % {
            "start": f"{moment(int(period) * SECOND):%Y-%m-%d}",
            "amount": report.amounts["periods"][period]["amount"],
            "currency": report.prices["periods"][period]["currency"],
        }


def line_amounts(report: Report, limit: int) -> dict[str, str]:
    """Return the amounts of the first `limit` lines of a version of a report, by `line_id`."""
    amounts = {}
    with suppress(UnreadableError):  # `summary` shows the error.
        for charge in islice(version_charges(report), limit):
            if charge.amount is not None:
                amounts[charge.row.line_id] = f"{written(charge.amount)} {charge.currency}"
    return amounts


class TotalRow(NamedTuple):
    """The totals of a meter, as texts.

    corrects  whether the units and amounts correct earlier periods
    amount    "" for a meter without a price; in brackets, the parts of it that belong to no line, such as fees
    """

    meter: str
    corrects: bool
    consumed: str
    refunded: str
    included: str
    overage: str
    amount: str


def total_rows(report: Report, totals: Iterable[MeterTotal]) -> list[TotalRow]:
    """Return a row for each meter of a report, with the meter's totals and exact amount.

    Call this only with the first version of a report. If this version also corrects units or amounts of earlier
    periods, the meter of this correction has a second row.
    """
    total_of = {(total.corrects, total.meter): total for total in totals}
    amounts: dict[tuple[bool, str], dict[str, Decimal]] = defaultdict(dict)
    without_lines, parts = _without_lines(report), defaultdict[tuple[bool, str], list[str]](list)
    for meter_amount in meter_amounts(report):
        # An amount of another period than the report's is a correction.
        corrects = meter_amount.period != str(report.period_start // SECOND)
        by_currency, currency = amounts[corrects, meter_amount.meter], meter_amount.currency
        by_currency[currency] = plus(by_currency.get(currency, ZERO), meter_amount.amount)
        parts[corrects, meter_amount.meter] += without_lines[meter_amount.period, meter_amount.meter]
    rows = []
    for corrects, meter in sorted(total_of.keys() | amounts.keys()):
        total = total_of.get((corrects, meter), MeterTotal(meter))
        exact_amounts = [f"{written(amount)} {currency}" for currency, amount in amounts[corrects, meter].items()]
        row = TotalRow(
            meter,
            corrects,
            consumed=f"{total.consumed:,}",
            refunded=f"{total.refunded:,}",
            included=f"{total.included:,}",
            overage=f"{total.overage:,}",
            amount=", ".join(exact_amounts) + (f" ({'; '.join(found)})" if (found := parts[corrects, meter]) else ""),
        )
        rows.append(row)
    return rows


def owed(report: Report) -> str:
    """Return what the account owes for a report up to this version, as text. Return "" for a report without prices."""
    return ", ".join(f"{amount} {currency}" for currency, amount in report.amounts.get("total", {}).items())
