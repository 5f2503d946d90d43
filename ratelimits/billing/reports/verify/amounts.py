"""Verify the prices that a report recorded, and its amounts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ratelimits.billing.models import PlanPrice, Report, ReportLine
from ratelimits.billing.reports.amounts import Totals, recorded_prices
from ratelimits.usage.models.sums import ExactSum
from ratelimits.usage.periods import SECOND


def verify_amounts(using: str, report: Report) -> Iterator[str]:
    """Yield a sentence for each error in a version's prices and amounts."""
    has_only_own_period = report.version == 1 and set(report.since) <= {str(report.period_start // SECOND)}
    if has_only_own_period and not report.prices and not report.amounts:
        return  # verify/terms.py checks whether the report should have prices.
    try:
        # A period keeps the prices of its first report. So the earlier reports are needed, oldest first.
        rows = Report.objects.using(using).filter(customer__token=report.customer_id, pk__lt=report.pk)
        earlier = list(rows.order_by("pk"))
        errors = list(_verify_prices(using, report, earlier))
        yield from errors
        if not errors and report.amounts != (expected := _amounts(using, report, earlier)):
            yield f"its amounts are {_shown(report.amounts)}, but its lines and prices give {_shown(expected)}"
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
        yield "its prices or amounts do not have the form in which reports store them"


def _verify_prices(using: str, report: Report, earlier: list[Report]) -> Iterator[str]:
    report_period = str(report.period_start // SECOND)
    prices: dict[str, Any] = report.prices.get("periods", {})
    if report.version == 1 and report_period in prices:
        yield from _compare_history(using, prices[report_period])
    expected = recorded_prices(report, earlier, report.since, prices.get(report_period, {}))
    for period in sorted(prices.keys() | expected.keys()):
        if prices.get(period) != expected.get(period):
            yield "its prices differ from the prices with which the period was billed for the first time"


def _compare_history(using: str, record: dict[str, Any]) -> Iterator[str]:
    """Yield an error for each price that differs from the same version of this price in the history."""
    history: Any = PlanPrice.history
    for meter, price in record["meters"].items():
        row = history.using(using).filter(id=price["id"], version=price["version"]).first()
        if row is None:
            continue  # Raw SQL wrote the price, so only the report's digest protects it.
        expected = {"id": row.id, "version": row.version, **PlanPrice.price(row).record()}
        for name, value in expected.items():
            if price.get(name) != value or row.meter != meter:
                yield (
                    f"its price of {meter} has {name} {price.get(name)!r}, but the configuration's version"
                    f" {price['version']} has {value!r} for {row.meter}"
                )
                break


def _amounts(using: str, report: Report, earlier: list[Report]) -> dict[str, Any]:
    totals = Totals(report, earlier)
    if report.prices:
        lines = ReportLine.objects.using(using).filter(report=report).order_by()
        sums = lines.values_list("usage_period", "meter").annotate(
            ExactSum("included_quantity"), ExactSum("overage_quantity")
        )
        for period, meter, included, overage in sums:
            totals.add_units(str(period), meter, included, overage)
    return totals.amounts()


def _shown(amounts: dict[str, Any]) -> str:
    total: dict[str, str] = amounts.get("total", {})
    return ", ".join(f"{amount} {currency}" for currency, amount in total.items()) or "none"
