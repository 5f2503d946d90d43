"""Make prices of plans, and read the amounts from finalised reports."""

from __future__ import annotations

import csv
import io
from fractions import Fraction
from typing import Any

from django.core.management import CommandError, call_command
from django.db.models import QuerySet

from ratelimits.billing.models import PlanPrice, Report
from ratelimits.billing.reports.exports import FORMATS
from ratelimits.billing.reports.statements import statement
from ratelimits.billing.reports.statements.charges import lines_for
from ratelimits.models import Account, Plan
from tests.support.reports.invoices import account

TIERS = "10: 1\n20: 0.5 + 2\nmore: 0.333"


def priced(identifier: str = "acme", *, included: int = 5, currency: str = "EUR", **fields: Any) -> Account:
    """Make an account, in the past, whose plan includes this number of requests and has a price for more."""
    payer = account(identifier, included=included, name=f"{identifier.title()} Ltd.")
    assert payer.plan is not None
    Plan.objects.filter(pk=payer.plan.pk).update(currency=currency)
    charge(payer, **{"unit_price": "0.10", **fields})
    return payer


def charge(payer: Account, **fields: Any) -> PlanPrice:
    """Validate and save a price for an account's plan, in force since the past."""
    assert payer.plan is not None
    row = PlanPrice(plan=Plan.objects.get(slug=payer.plan.slug), **fields)
    row.full_clean()
    row.save()
    for model in (Plan, PlanPrice):
        QuerySet(model).update(since=0)
        model.history.update(since=0)
    return row


def written(report: Report, name: str = "csv-amounts") -> bytes:
    """Return the file of a report in a format."""
    form = FORMATS[name]
    return b"".join(form.stream(lines_for(form, [statement(report)])))


def table(report: Report, name: str = "csv-amounts") -> list[dict[str, str]]:
    """Return the rows of the report's CSV."""
    return list(csv.DictReader(io.StringIO(written(report, name).decode())))


def amounts(report: Report) -> list[tuple[str, ...]]:
    """Return version, category, meter, overage, unit price and amount of each row with an amount."""
    columns = ("report_version", "charge_category", "meter", "overage_quantity", "unit_price", "amount")
    return [tuple(row[name] for name in columns) for row in table(report) if row["amount"]]


def owed(report: Report) -> Fraction:
    """Return the sum of the amounts of all rows of a report's file."""
    return sum((Fraction(row["amount"]) for row in table(report) if row["amount"]), Fraction(0))


def findings(*arguments: Any) -> str:
    """Return the findings of ratelimits_verify on everything, one on each line; "" if there are none."""
    out = io.StringIO()
    try:
        call_command("ratelimits_verify", "--all", *arguments, stdout=out, stderr=io.StringIO())
    except CommandError:
        return out.getvalue()
    return out.getvalue().replace("No errors were found.\n", "")
