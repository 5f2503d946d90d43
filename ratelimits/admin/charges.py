"""What a report comes to, as its page in the admin shows it."""

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
    """Return what each meter adds to its period's price, what the version adds, and what is owed; "–" for no prices."""
    try:
        with readable(report):
            rows = format_html_join("", "<div>{}</div>", ((text,) for text in _meters(report)))
            owed = report.amounts.get("total", {}) if report.amounts else {}
            totals = format_html_join("", "<div><strong>{}: {} {}</strong></div>", _totals(owed))
    except UnreadableError as error:
        return str(error)
    return format_html("{}{}", rows, totals) if owed else "–"


def _totals(owed: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    for currency, amount in owed.items():
        yield _("owed by this report up to this version"), amount, currency


def _meters(report: Report) -> Iterator[str]:
    for period, record in report.prices.get("periods", {}).items():
        found = report.amounts["periods"][period]
        for meter, price in prices_of(record).items():
            before, after = found["quantities"][meter]
            amount = minus(price.of(after), price.of(before) if before is not None else Decimal(0))
            about: dict[str, Any] = {"meter": meter, "currency": record["currency"], "amount": written(amount)}
            about |= {"after": f"{after:,}", "before": f"{before or 0:,}"}
            text = _("%(meter)s: %(after)s beyond what is included, %(amount)s %(currency)s")
            if before is not None:
                text = _("%(meter)s: %(after)s after %(before)s beyond what is included, %(amount)s %(currency)s")
            yield text % about
        about = {"start": f"{moment(int(period) * SECOND):%Y-%m-%d}", "amount": found["amount"]}
        yield _("this version, of the period from %(start)s: %(amount)s %(currency)s, rounded") % {
            **about,
            "currency": record["currency"],
        }


def line_amounts(report: Report, most: int) -> dict[str, str]:
    """Return what each of a version's first lines costs, by line_id."""
    found = {}
    with suppress(UnreadableError):  # the summary says it
        for charge in islice(version_charges(report), most):
            if charge.amount is not None:
                found[charge.row.line_id] = f"{written(charge.amount)} {charge.currency}"
    return found
