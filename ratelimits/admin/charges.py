"""The amounts of a report, for its page in the admin."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from decimal import Decimal
from itertools import islice
from typing import Any

from django.utils.html import format_html, format_html_join
from django.utils.translation import gettext as _

from ratelimits.models import Report
from ratelimits.models.ledger import moment
from ratelimits.pricing.money import minus, written
from ratelimits.reports.amounts import UnreadableError, prices_of, readable
from ratelimits.reports.periods import SECOND
from ratelimits.reports.statements.charges import version_charges


def summary(report: Report) -> str:
    """Return, as HTML, the amount of each meter, the amount of the version, and the amount that the account owes.

    Return "–" for a report without prices.
    """
    try:
        with readable(report):
            rows = format_html_join("", "<div>{}</div>", ((text,) for text in _priced_meters(report)))
            owed = report.amounts.get("total", {}) if report.amounts else {}
            totals = format_html_join("", "<div><strong>{}: {} {}</strong></div>", _owed_amounts(owed))
    except UnreadableError as error:
        return str(error)
    return format_html("{}{}", rows, totals) if owed else "–"


def _owed_amounts(owed: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    for currency, amount in owed.items():
        yield _("owed for this report up to this version"), amount, currency


def _priced_meters(report: Report) -> Iterator[str]:
    for period, record in report.prices.get("periods", {}).items():
        amounts = report.amounts["periods"][period]
        for meter, price in prices_of(record).items():
            before, after = amounts["quantities"][meter]
            amount = minus(price.of(after), price.of(before) if before is not None else Decimal(0))
            values: dict[str, Any] = {"meter": meter, "currency": record["currency"], "amount": written(amount)}
            values |= {"after": f"{after:,}", "before": f"{before or 0:,}"}
            text = _("%(meter)s: %(after)s beyond the included quantity, %(amount)s %(currency)s")
            if before is not None:
                text = _(
                    "%(meter)s: %(after)s beyond the included quantity (%(before)s before), %(amount)s %(currency)s"
                )
            yield text % values
        text = _("this version, for the period from %(start)s: %(amount)s %(currency)s, rounded")
        start = f"{moment(int(period) * SECOND):%Y-%m-%d}"
        yield text % {"start": start, "amount": amounts["amount"], "currency": record["currency"]}


def line_amounts(report: Report, limit: int) -> dict[str, str]:
    """Return the amounts of the first `limit` lines of a version of a report, by `line_id`."""
    amounts = {}
    with suppress(UnreadableError):  # `summary` shows the error.
        for charge in islice(version_charges(report), limit):
            if charge.amount is not None:
                amounts[charge.row.line_id] = f"{written(charge.amount)} {charge.currency}"
    return amounts
