"""Verifying what a report says its lines cost: the prices that it recorded, and the amounts that they make."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.db.models import Sum

from ratelimits.models import PlanPrice, Report, ReportLine
from ratelimits.reports.amounts import Totals, billing_period_of, priced_together, recorded
from ratelimits.reports.periods import SECOND


def verify_amounts(using: str, report: Report) -> Iterator[str]:
    """Yield a sentence for each thing that does not hold of a version's prices and amounts; nothing if all holds."""
    plain = report.version == 1 and set(report.since) <= {str(report.period_start // SECOND)}
    if plain and not report.prices and not report.amounts:
        return  # whether its plan had any is known from the terms
    try:
        # Those that were made before it, in that order: what was billed once keeps its prices.
        own = list(Report.objects.using(using).filter(account=report.account, pk__lt=report.pk).order_by("pk"))
        together = priced_together(using, own, report.account, report.prices.get("names", ()))
        earlier = [each for each in together if each.pk < report.pk]
        wrong = list(_verify_prices(using, report, earlier))
        yield from wrong
        if not wrong and report.amounts != (expected := _amounts(using, report, earlier)):
            said, makes = _shown(report.amounts), _shown(expected)
            yield f"its amounts are {said}, and its lines and prices make {makes}"
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
        yield "its prices or amounts are not in the shape that reports record them in"


def _verify_prices(using: str, report: Report, earlier: list[Report]) -> Iterator[str]:
    own = str(report.period_start // SECOND)
    periods: dict[str, Any] = report.prices.get("periods", {})
    if report.version == 1 and own in periods:
        yield from _beside_history(using, periods[own])
    before = recorded(
        report, earlier, {billing_period_of(report, counted) for counted in report.since}, periods.get(own, {})
    )
    for period in sorted(periods.keys() | before.keys()):
        if periods.get(period) != before.get(period):
            yield "its prices are not those that the period was billed with first"


def _beside_history(using: str, record: dict[str, Any]) -> Iterator[str]:
    """What a recorded price says otherwise than the configuration did in its version."""
    history: Any = PlanPrice.history
    for meter, price in record["meters"].items():
        row = history.using(using).filter(id=price["id"], version=price["version"]).first()
        if row is None:
            continue  # written past the models: the report's digest alone says what it was
        expected = {"id": row.id, "version": row.version, **PlanPrice.price(row).record()}
        for name, value in expected.items():
            if price.get(name) != value or row.meter != meter:
                yield (
                    f"its price of {meter} has {name} {price.get(name)!r}, and the configuration's version"
                    f" {price['version']} says {value!r} of {row.meter}"
                )
                break


def _amounts(using: str, report: Report, earlier: list[Report]) -> dict[str, Any]:
    totals = Totals(report, earlier)
    if report.prices:
        lines = ReportLine.objects.using(using).filter(report=report).order_by()
        for period, meter, quantity in lines.values_list("usage_period", "meter").annotate(Sum("overage_quantity")):
            totals.count(str(period), meter, quantity)
    return totals.amounts()


def _shown(amounts: dict[str, Any]) -> str:
    total: dict[str, str] = amounts.get("total", {})
    return ", ".join(f"{amount} {currency}" for currency, amount in total.items()) or "none"
