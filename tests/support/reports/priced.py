"""Prices of accounts' plans, and what finalised reports say that they come to."""

from __future__ import annotations

import csv
import io
from fractions import Fraction
from typing import Any

from django.core.management import CommandError, call_command
from django.db.models import QuerySet

from ratelimits.models import Account, Plan, PlanPrice, Report
from ratelimits.reports.exports import FORMATS
from ratelimits.reports.statements import statement
from ratelimits.reports.statements.charges import lines_for
from tests.support.reports.invoices import account

TIERS = "10: 1\n20: 0.5 + 2\nmore: 0.333"


def priced(identifier: str = "acme", *, included: int = 5, currency: str = "EUR", **fields: Any) -> Account:
    """An account, of old, whose plan includes so many requests and charges for more of them."""
    payer = account(identifier, included=included, name=f"{identifier.title()} Ltd.")
    assert payer.plan is not None
    Plan.objects.filter(pk=payer.plan.pk).update(currency=currency)
    charge(payer, **{"unit_price": "0.10", **fields})
    return payer


def charge(payer: Account, **fields: Any) -> PlanPrice:
    """A price, of old, on an account's plan, validated and saved."""
    assert payer.plan is not None
    row = PlanPrice(plan=Plan.objects.get(slug=payer.plan.slug), **fields)
    row.full_clean()
    row.save()
    for model in (Plan, PlanPrice):
        QuerySet(model).update(since=0)
        model.history.update(since=0)
    return row


def written(report: Report, name: str = "csv-amounts") -> bytes:
    """A report's file in a format."""
    form = FORMATS[name]
    return b"".join(form.stream(lines_for(form, [statement(report)])))


def table(report: Report, name: str = "csv-amounts") -> list[dict[str, str]]:
    """The rows of its CSV."""
    return list(csv.DictReader(io.StringIO(written(report, name).decode())))


def amounts(report: Report) -> list[tuple[str, ...]]:
    """Of each row with an amount, its version, category, meter, overage, unit price and amount."""
    columns = ("report_version", "charge_category", "meter", "overage_quantity", "unit_price", "amount")
    return [tuple(row[name] for name in columns) for row in table(report) if row["amount"]]


def owed(report: Report) -> Fraction:
    """What all rows of a report's file add up to."""
    return sum((Fraction(row["amount"]) for row in table(report) if row["amount"]), Fraction(0))


def findings(*arguments: Any) -> str:
    """What ratelimits_verify says of everything, one finding a line; "" if all holds."""
    out = io.StringIO()
    try:
        call_command("ratelimits_verify", "--all", *arguments, stdout=out, stderr=io.StringIO())
    except CommandError:
        return out.getvalue()
    return out.getvalue().replace("All holds.\n", "")
