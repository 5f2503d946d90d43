"""Compute the amounts of a report version: what its lines cost at the prices of the account's plan.

The price of a period depends only on the period's total quantities. The amount of a version is the price with the
quantities of this version, minus the price without them. So the amounts of all versions add up to the price of the
final quantities.

Prices are computed exactly. Only the price of a whole period is rounded: half to even, to the minor unit of its
currency.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from ratelimits.billing.models import Report, ReportLine
from ratelimits.billing.pricing.prices import NO_UNITS, Price, Units
from ratelimits.billing.reports.terms.price_book import RecordedPrices
from ratelimits.money import ZERO, added, minus, plus, rounded
from ratelimits.usage.periods import SECOND

#: The units of a meter before a version, and after it. If the meter was not billed before, the first are None. They are
#: not 0 units then, because 0 units can have a price too: a fee or a minimum that is due with each report.
BeforeAndAfter = tuple[Units | None, Units]


class UnreadableError(ValueError):
    """Raised if a report's prices or amounts do not have the form in which reports store them."""


@contextmanager
def unreadable_if_malformed(report: Report) -> Iterator[None]:
    """Raise UnreadableError if the code in this context fails because a report's prices or amounts are malformed."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        problem = "its prices or amounts do not have the form in which reports store them"
        raise UnreadableError(f"report {report}: {problem}; ratelimits_verify says more") from error


def prices_of(record: RecordedPrices) -> dict[str, Price]:
    """Return the prices of a period, by meter, from the record of these prices in a report.

    A record also has the currency, and `digits`, which is the currency's number of decimals.
    """
    return {meter: Price.from_record(price) for meter, price in record["meters"].items()}


def recorded_prices(
    report: Report, earlier: Sequence[Report], periods: Iterable[str], prices_at_end: RecordedPrices
) -> dict[str, RecordedPrices]:
    """Return the prices that a report version uses. The keys are starts of periods (s since 1970 UTC, as text).

    `earlier` are the customer's earlier reports, oldest first. `periods` are the periods of the version's lines. A
    period keeps the prices of its first report. `prices_at_end` are the prices at the end of the report's period. Only
    the first version of the report uses `prices_at_end`, and only for the report's own period.
    """
    records: dict[str, RecordedPrices] = {}
    report_period = _period_of(report)
    for period in sorted({*periods, report_period}, key=int):
        record = _newest(earlier, "prices", period)
        is_first_version = report.version < 2  # A provisional report has version 0.
        if record is None and is_first_version and period == report_period:
            record = prices_at_end
        if record:
            records[period] = record
    return records


class Totals:
    """Adds up the lines of a version by billing period and meter, and computes the version's amounts.

    `earlier` are the customer's earlier reports, oldest first.
    """

    def __init__(self, report: Report, earlier: Sequence[Report]) -> None:
        self._report, self._earlier = report, earlier
        self._added: dict[tuple[str, str], Units] = {}

    def add(self, line: ReportLine) -> None:
        """Add a line of the version."""
        self.add_units(str(line.usage_period), line.meter, line.included_quantity, line.overage_quantity)

    def add_units(self, period: str, meter: str, included: int, overage: int) -> None:
        """Add units to the period that starts at `period` (s since 1970 UTC, as text)."""
        key = period, meter
        self._added[key] = self._added.get(key, NO_UNITS).plus(Units(included + overage, overage))

    def amounts(self) -> dict[str, Any]:
        """Return the quantities and the amount of each priced period, and the report's total.

        The total includes the amounts of the report's earlier versions. Return {} if the report has no prices.
        """
        priced: dict[str, RecordedPrices] = self._report.prices.get("periods", {})
        if not priced:
            return {}
        total = {currency: Decimal(text) for currency, text in self._total_before().items()}
        periods = {}
        for period, record in priced.items():
            quantities = self._quantities(period, record)
            amount = amount_added(record, quantities)
            periods[period] = {
                "quantities": {
                    # Lists, because a report is compared with what the database gives back.
                    meter: [None if before is None else [*before], [*after]]
                    for meter, (before, after) in quantities.items()
                },
                "amount": f"{amount:f}",
            }
            currency = record["currency"]
            total[currency] = plus(total.get(currency, ZERO), amount)
        return {"periods": periods, "total": {currency: f"{amount:f}" for currency, amount in total.items()}}

    def _quantities(self, period: str, record: RecordedPrices) -> dict[str, BeforeAndAfter]:
        previous = _newest(self._earlier, "amounts", period)
        quantities: dict[str, BeforeAndAfter] = {}
        for meter in record["meters"]:
            # Each version begins with the units at which the previous version ended.
            before = quantities_of(previous)[meter][1] if previous else None
            quantities[meter] = before, (before or NO_UNITS).plus(self._added.get((period, meter), NO_UNITS))
        return quantities

    def _total_before(self) -> Mapping[str, str]:
        """Return the previous version's total by currency; {} if there is no previous version."""
        start = self._report.period_start
        versions = [other for other in self._earlier if other.period_start == start and other.amounts]
        total: Mapping[str, str] = versions[-1].amounts["total"] if versions else {}
        return total


def quantities_of(amounts: Mapping[str, Any]) -> dict[str, BeforeAndAfter]:
    """Return the units of a period by meter, before and after a version.

    `amounts` is the entry of the period in `Report.amounts`.
    """
    return {
        meter: (None if before is None else Units(*before), Units(*after))
        for meter, (before, after) in amounts["quantities"].items()
    }


def billed_prices(reports: Sequence[Report], start: int) -> RecordedPrices:
    """Return the prices of a billing period that starts at `start` (µs since 1970 UTC); {} if no report has billed it.

    `reports` are the customer's reports, oldest first.
    """
    return _newest(reports, "prices", str(start // SECOND)) or {}


@dataclass(frozen=True, slots=True)
class MeterAmount:
    """The exact amount that a version adds for a meter of a billing period, before the period's price is rounded.

    period     the start of the period (s since 1970 UTC, as text)
    before     the units that earlier versions billed; None if the meter was not billed before
    after      the units that this version and the earlier versions bill together
    """

    period: str
    meter: str
    before: Units | None
    after: Units
    amount: Decimal
    currency: str


def meter_amounts(report: Report) -> Iterator[MeterAmount]:
    """Yield the amount of each priced meter of a version. Call this in the context of `unreadable_if_malformed`."""
    for period, record in report.prices.get("periods", {}).items():
        quantities = quantities_of(report.amounts["periods"][period])
        for meter, price in prices_of(record).items():
            before, after = quantities[meter]
            amount = minus(price.of(after), price.of(before) if before is not None else ZERO)
            yield MeterAmount(period, meter, before, after, amount, record["currency"])


def rounded_price(record: RecordedPrices, totals: Mapping[str, Units]) -> Decimal:
    """Return the rounded price of a period; `totals` are the period's units by meter."""
    return rounded(added(price.of(totals[meter]) for meter, price in prices_of(record).items()), record["digits"])


def amount_added(record: RecordedPrices, quantities: Mapping[str, BeforeAndAfter]) -> Decimal:
    """Return the rounded price of a period after a version, minus the rounded price before this version."""
    digits, prices = record["digits"], prices_of(record)
    price_after = rounded_price(record, {meter: after for meter, (_before, after) in quantities.items()})
    billed_before = {meter: before for meter, (before, _after) in quantities.items() if before is not None}
    price_before = added(price.of(billed_before[meter]) for meter, price in prices.items() if meter in billed_before)
    return minus(price_after, rounded(price_before, digits))


def _period_of(report: Report) -> str:
    return str(report.period_start // SECOND)


def _newest(earlier: Sequence[Report], field: str, period: str) -> Any:
    """Return a period's entry in the prices or amounts (`field`) of the newest report with such an entry.

    Return None if no report has such an entry.
    """
    for report in reversed(earlier):
        entry = getattr(report, field).get("periods", {}).get(period)
        if entry is not None:
            return entry
    return None
