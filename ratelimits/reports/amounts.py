"""The amounts of a report version: what its lines cost, at the prices of the account's plan.

The price of a period depends only on the period's total quantities. A version's amount is the price after the version
minus the price before it, so all versions together cost the price of the final quantities.

If an account had several names in a period, these names share one price. The report that is closed first contains the
fees, and each later report contains what it adds to the price.

Amounts are exact. Each period's price is rounded once, half to even, to the minor unit of its currency.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from typing import Any

from ratelimits.models import Report, ReportLine
from ratelimits.pricing.money import ZERO, added, minus, plus, rounded
from ratelimits.pricing.prices import Price
from ratelimits.reports.periods import SECOND
from ratelimits.reports.terms.price_book import Record

#: Two totals of a meter: before a version (None if the meter was not billed before), and after the version.
Span = Sequence[Any]


class UnreadableError(ValueError):
    """Raised if a report's prices or amounts do not have the form in which reports store them."""


@contextmanager
def readable(report: Report) -> Iterator[None]:
    """Raise UnreadableError instead of the errors that reading malformed prices or amounts of a report causes."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        problem = "its prices or amounts do not have the form in which reports store them"
        raise UnreadableError(f"report {report}: {problem}; ratelimits_verify says more") from error


def prices_of(record: Record) -> dict[str, Price]:
    """Return, by meter, the prices that a report recorded for a period."""
    return {meter: Price.from_record(price) for meter, price in record["meters"].items()}


def billing_period_of(report: Report, period: str) -> str:
    """Return the start of the billing period that prices the usage which was counted under `period`.

    Both are starts of periods (s since 1970 UTC, as text). They differ if usage was counted under periods that overlap:
    such periods are one billing period.
    """
    billing_period: str = report.prices.get("members", {}).get(period, period)
    return billing_period


def priced_together(using: str, own: Sequence[Report], account: str, names: Sequence[str]) -> list[Report]:
    """Return, oldest first, the earlier reports on which the price of a version depends.

    `own` are the account's reports. The reports of its other names, `names`, are added if they share a price with it.
    """
    if not names:
        return list(own)
    others = Report.objects.using(using).filter(account__in=list(names))
    beside = [report for report in others if account in report.prices.get("names", ())]
    return sorted([*own, *beside], key=lambda report: report.pk)


def recorded(report: Report, earlier: Sequence[Report], periods: Iterable[str], own: Record) -> dict[str, Record]:
    """Return the prices that a report version uses, by the start of the billing period (s since 1970 UTC, as text).

    A period that was billed once, under any name of the account, keeps its prices. `own` are the prices at the end of
    the report's own period; only the first version uses them.
    """
    records: dict[str, Record] = {}
    for period in sorted({*periods, _own(report)}, key=int):
        record = _newest(earlier, "prices", period)
        if record is None and report.version < 2 and period == _own(report):
            record = own
        if record:
            records[period] = record
    return records


class Totals:
    """Adds up a version's lines by billing period and meter, and computes the version's amounts.

    `earlier` are the earlier reports on which the version's price depends (see `priced_together`), oldest first.
    """

    def __init__(self, report: Report, earlier: Sequence[Report]) -> None:
        self._report, self._earlier = report, earlier
        self._added: dict[tuple[str, str], int] = {}

    def add(self, line: ReportLine) -> None:
        """Add a line of the version."""
        self.count(str(line.usage_period), line.meter, line.overage_quantity)

    def count(self, period: str, meter: str, quantity: int) -> None:
        """Add overage units of the period that starts at `period` (s since 1970 UTC, as text)."""
        key = billing_period_of(self._report, period), meter
        self._added[key] = self._added.get(key, 0) + quantity

    def amounts(self) -> dict[str, Any]:
        """Return the quantities and the amount of each priced period, and the report's total; {} without prices."""
        priced: dict[str, Record] = self._report.prices.get("periods", {})
        if not priced:
            return {}
        total = {name: Decimal(text) for name, text in self._before().items()}
        periods = {}
        for period, record in priced.items():
            quantities = self._quantities(period, record)
            amount = worth(record, quantities)
            periods[period] = {"quantities": quantities, "amount": f"{amount:f}"}
            currency = record["currency"]
            total[currency] = plus(total.get(currency, ZERO), amount)
        return {"periods": periods, "total": {name: f"{amount:f}" for name, amount in total.items()}}

    def _quantities(self, period: str, record: Record) -> dict[str, Span]:
        before = _newest(self._earlier, "amounts", period)
        spans: dict[str, Span] = {}
        for meter in record["meters"]:
            billed = before["quantities"][meter][1] if before else None
            spans[meter] = [billed, (billed or 0) + self._added.get((period, meter), 0)]
        return spans

    def _before(self) -> Mapping[str, str]:
        """Return the total, by currency, of the previous version; {} if there is none."""
        key = self._report.account, self._report.period_start
        versions = [other for other in self._earlier if (other.account, other.period_start) == key and other.amounts]
        total: Mapping[str, str] = versions[-1].amounts["total"] if versions else {}
        return total


def billed(reports: Sequence[Report], start: int) -> tuple[Record, Counter[str]]:
    """Return a billing period's prices and its billed units by meter. Both are empty if the period was not billed.

    `start` is the start of the period (µs since 1970 UTC). `reports` are the reports that share a price, oldest first.
    """
    period = str(start // SECOND)
    record: Record = _newest(reports, "prices", period) or {}
    amounts = _newest(reports, "amounts", period)
    return record, Counter({meter: span[1] for meter, span in amounts["quantities"].items()} if amounts else {})


def price_of(record: Record, totals: Mapping[str, int]) -> Decimal:
    """Return the rounded price of a period; `totals` are its units by meter."""
    return rounded(added(price.of(totals[meter]) for meter, price in prices_of(record).items()), record["digits"])


def worth(record: Record, quantities: Mapping[str, Span]) -> Decimal:
    """Return the amount that a version adds to the rounded price of a period."""
    digits, prices = record["digits"], prices_of(record)
    after = price_of(record, {meter: quantities[meter][1] for meter in prices})
    before = rounded(
        added(price.of(quantities[meter][0]) for meter, price in prices.items() if quantities[meter][0] is not None),
        digits,
    )
    return minus(after, before)


def _own(report: Report) -> str:
    return str(report.period_start // SECOND)


def _newest(earlier: Sequence[Report], field: str, period: str) -> Any:
    """Return the entry for a period in a field of the newest report that has one; None if no report has it."""
    for report in reversed(earlier):
        entry = getattr(report, field).get("periods", {}).get(period)
        if entry is not None:
            return entry
    return None
