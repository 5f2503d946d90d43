"""What a version of a report comes to: its lines' totals, priced as its plan's prices were when it was finalised.

A period's price is a function of its total quantities alone. A version is worth the difference of that price before
and after it, so the sum over all versions is the price of the final quantities. Names that one account had in a period
have one price together: the report that is closed first has the fees, the others what they add. Amounts are exact; each
period's price is rounded once, half to even, to the minor unit of its currency.
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

#: A meter's total before (None: nothing was billed) and after a version.
Span = Sequence[Any]


class UnreadableError(ValueError):
    """A report's prices or amounts are not in the shape that reports record them in; the message names the report."""


@contextmanager
def readable(report: Report) -> Iterator[None]:
    """Raise UnreadableError where the prices or amounts of a report turn out to have another shape."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        about = "its prices or amounts are not in the shape that reports record them in"
        raise UnreadableError(f"report {report}: {about}; ratelimits_verify says more") from error


def prices_of(record: Record) -> dict[str, Price]:
    """Return the prices by meter that a report recorded for a period."""
    return {meter: Price.from_record(price) for meter, price in record["meters"].items()}


def home(report: Report, period: str) -> str:
    """Return the billing period that usage counted under a period (s, as text) is priced in.

    Usage under periods that overlap is of one billing period.
    """
    found: str = report.prices.get("members", {}).get(period, period)
    return found


def priced_together(using: str, own: Sequence[Report], account: str, names: Sequence[str]) -> list[Report]:
    """Return the reports that a version's price comes after, in the order of their making.

    Those are `own`, the account's, and those that were priced together with it under `names`, its other names.
    """
    if not names:
        return list(own)
    others = Report.objects.using(using).filter(account__in=list(names))
    beside = [report for report in others if account in report.prices.get("names", ())]
    return sorted([*own, *beside], key=lambda report: report.pk)


def recorded(report: Report, earlier: Sequence[Report], periods: Iterable[str], own: Record) -> dict[str, Record]:
    """Return, by billing period (s, as text), the prices that hold for what a report has of it.

    `own` are those of the report's period at its end, for its first version. What was billed once, under whichever name
    of the account, keeps its prices.
    """
    found: dict[str, Record] = {}
    for period in sorted({*periods, _own(report)}, key=int):
        record = _newest(earlier, "prices", period)
        if record is None and report.version < 2 and period == _own(report):
            record = own
        if record:
            found[period] = record
    return found


class Totals:
    """The totals of a version's lines by the period of their usage and by meter, and what they come to.

    `earlier` are the reports that its price comes after (see `priced_together`), in the order of their making.
    """

    def __init__(self, report: Report, earlier: Sequence[Report]) -> None:
        self._report, self._earlier = report, earlier
        self._added: dict[tuple[str, str], int] = {}

    def add(self, line: ReportLine) -> None:
        """Count a line of the version."""
        self.count(str(line.usage_period), line.meter, line.overage_quantity)

    def count(self, period: str, meter: str, quantity: int) -> None:
        """Count units beyond what is included, of usage in a period (s, as text)."""
        about = home(self._report, period), meter
        self._added[about] = self._added.get(about, 0) + quantity

    def amounts(self) -> dict[str, Any]:
        """Return the spans and the amount of each priced period, and the report's total; {} where nothing is priced."""
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
        """The total of the version before."""
        about = self._report.account, self._report.period_start
        same = [each for each in self._earlier if (each.account, each.period_start) == about and each.amounts]
        found: Mapping[str, str] = same[-1].amounts["total"] if same else {}
        return found


def billed(reports: Sequence[Report], start: int) -> tuple[Record, Counter[str]]:
    """Return the prices that a billing period was billed with, and its units by meter; {} and none if it was not.

    `start` is the period's, in µs since 1970 UTC; `reports` are those that are priced together, in their order.
    """
    period = str(start // SECOND)
    record: Record = _newest(reports, "prices", period) or {}
    amounts = _newest(reports, "amounts", period)
    return record, Counter({meter: span[1] for meter, span in amounts["quantities"].items()} if amounts else {})


def price_of(record: Record, totals: Mapping[str, int]) -> Decimal:
    """Return the rounded price of a period's totals by meter."""
    return rounded(added(price.of(totals[meter]) for meter, price in prices_of(record).items()), record["digits"])


def worth(record: Record, quantities: Mapping[str, Span]) -> Decimal:
    """Return what a version adds to the rounded price of a period."""
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
    """What the newest of these reports says of a period; None if none does."""
    for report in reversed(earlier):
        found = getattr(report, field).get("periods", {}).get(period)
        if found is not None:
            return found
    return None
