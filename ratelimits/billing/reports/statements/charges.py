"""Make charges: the rows of a report with their amounts, and further rows for amounts that belong to no single line.

There are four kinds of further amounts:

- the flat fees;
- if the units of a meter reach another volume tier: the difference between the new and the old price of earlier units;
- if the price of a meter is below its minimum: the difference;
- the rounding of a period's price.

All amounts of a report add up to its total.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from tempfile import SpooledTemporaryFile
from typing import TYPE_CHECKING, Any

from ratelimits.billing.models import Report
from ratelimits.billing.pricing.prices import NO_UNITS, Units
from ratelimits.billing.reports.amounts import (
    BeforeAndAfter,
    Totals,
    amount_added,
    prices_of,
    quantities_of,
    recorded_prices,
    unreadable_if_malformed,
)
from ratelimits.billing.reports.rows import (
    CORRECTION,
    FEE,
    FINAL,
    MINIMUM,
    REPRICING,
    ROUNDING,
    Charge,
    Row,
    RowMaker,
    line_id,
    report_id,
    row_type,
)
from ratelimits.billing.reports.statements import Statement, rows, version_lines, versions
from ratelimits.billing.reports.terms.price_book import PriceBook, RecordedPrices
from ratelimits.conf import conf
from ratelimits.models.accounts.named import billed_accounts
from ratelimits.money import ZERO, added, minus
from ratelimits.usage.periods import SECOND

if TYPE_CHECKING:
    from ratelimits.billing.reports.exports import Format

logger = logging.getLogger(__name__)

#: Maximum number of bytes of a provisional report's rows in memory. A larger report goes to a temporary file.
_MAX_IN_MEMORY = 1 << 20


def lines_for(file_format: Format, statements: Iterable[Statement]) -> Iterator[Any]:
    """Return the items that a format writes: charges if the format has amounts, otherwise rows."""
    if file_format.bills:
        return _with_present_accounts(rows(statements))
    return charges(statements) if file_format.priced else rows(statements)


def _with_present_accounts(lines: Iterable[Row]) -> Iterator[Row]:
    """Yield the rows with the accounts that their customers have now.

    The account on an old report perhaps names another customer now, who must not pay.
    """
    moved = billed_accounts(conf.DATABASE)
    for row in lines:
        account = moved.get(row.report_id.partition(".")[0], row.account)
        yield row if account == row.account else row._replace(account=account)


def charges(statements: Iterable[Statement]) -> Iterator[Charge]:
    """Yield all rows with their amounts, one report after another.

    Raise UnreadableError if a report's prices or amounts cannot be read.
    """
    books: dict[str, PriceBook] = {}
    for statement in statements:
        using = statement.report._state.db or conf.DATABASE
        if statement.status == FINAL:
            for version in versions(statement.report):
                yield from version_charges(version)
        else:
            yield from _provisional(statement, books.setdefault(using, PriceBook(using)))


def version_charges(report: Report) -> Iterator[Charge]:
    """Yield the rows that a version added, with their amounts.

    Raise UnreadableError if the version's prices or amounts cannot be read.
    """
    with unreadable_if_malformed(report):
        yield from _priced(report, version_lines(report), FINAL)


def _provisional(statement: Statement, book: PriceBook) -> Iterator[Charge]:
    """Yield the charges of an open period."""
    report = statement.report
    try:
        included = statement.included
        # If the end of the period is in the future, `record` has the current prices.
        record = book.of(*included.price_source) if included is not None else {}
    except ValueError as error:
        logger.warning("The open period of %r has no amounts: %s", report.account, error)
        record = {}
    if not record:
        yield from map(Charge, statement.rows)
        return
    period = str(report.period_start // SECOND)
    records = recorded_prices(report, (), [period], record)
    report.prices = {"account_name": statement.account_name, "periods": records}
    totals, has_units = Totals(report, ()), False
    make = row_type(report.columns_version)._make
    # The rows are read twice, because the price of a unit can depend on the total.
    with SpooledTemporaryFile(max_size=_MAX_IN_MEMORY) as spooled:
        for row in statement.rows:
            spooled.write(json.dumps(row).encode() + b"\n")
            totals.add_units(period, row.meter, row.included_quantity, row.overage_quantity)
            # Only the line of an account without usage has no meter.
            has_units = has_units or bool(row.meter)
        if has_units:
            report.amounts = totals.amounts()
        else:
            report.prices = {}  # A period without units gets no report, so there is nothing to pay.
        spooled.seek(0)
        yield from _priced(report, ((make(json.loads(line)), period) for line in spooled), statement.status)


def _priced(report: Report, lines: Iterable[tuple[Row, str]], status: str) -> Iterator[Charge]:
    """Yield the charges of the report's lines, then the charges that do not belong to a line.

    `lines` has each row with the start of the period of its usage (s since 1970 UTC, as text).
    """
    records: dict[str, RecordedPrices] = report.prices.get("periods", {})
    if not records:
        for row, _period in lines:
            yield Charge(row)
        return
    amounts = report.amounts["periods"]
    quantities = {period: quantities_of(amounts[period]) for period in records}
    prices = {
        (period, meter): price for period, record in records.items() for meter, price in prices_of(record).items()
    }
    # By period and meter: the overage before the current line, and the overage after all lines of this version.
    units_before: dict[tuple[str, str], int] = {}
    units_after: dict[tuple[str, str], int] = {}
    for period, meter in prices:
        before, after = quantities[period][meter]
        units_before[period, meter], units_after[period, meter] = (before or NO_UNITS).overage, after.overage
    name = report.prices["account_name"]
    totals: dict[str, str] = report.amounts["total"]
    for row, period in lines:
        record = records.get(period)
        if record is None:
            yield Charge(row, name)
            continue
        price, currency = prices.get((period, row.meter)), record["currency"]
        if price is None:
            yield Charge(row, name, currency, total=totals[currency])  # The plan has no price for this meter.
            continue
        subject = period, row.meter
        parts = price.parts(units_before[subject], row.overage_quantity, units_after[subject])
        units_before[subject] += row.overage_quantity
        yield Charge(row, name, currency, tuple(parts), added(part.amount for part in parts), totals[currency])
    for period, record in records.items():
        currency = record["currency"]
        for category, meter, amount in other_charges(record, quantities[period]):
            if amount:
                row = _row_without_units(report, status, category, period, meter, record["plan"])
                yield Charge(row, name, currency, amount=amount, total=totals[currency])


def other_charges(record: RecordedPrices, quantities: dict[str, BeforeAndAfter]) -> Iterator[tuple[str, str, Decimal]]:
    """Yield the category, the meter and the amount of each charge that does not belong to a line; most amounts are 0.

    The rounding of the period has the meter "". `quantities` has the units of the period before and after this version,
    by meter.
    """
    exact_amounts = []
    for meter, price in prices_of(record).items():
        before, after = quantities[meter]
        exact_amounts.append(_difference(price.of, before, after))
        yield FEE, meter, _difference(price.fees, before, after)
        yield REPRICING, meter, price.repriced(before or NO_UNITS, after)
        yield MINIMUM, meter, _difference(price.top_up, before, after)
    yield ROUNDING, "", minus(amount_added(record, quantities), added(exact_amounts))


def _difference(charged: Callable[[Units], Decimal], before: Units | None, after: Units) -> Decimal:
    """Return the amount for `after` units minus the amount for `before` units.

    If `before` is None, nothing was charged before.
    """
    return minus(charged(after), ZERO if before is None else charged(before))


def _row_without_units(report: Report, status: str, category: str, period: str, meter: str, plan: str) -> Row:
    """Return a row without units, for a charge that has only an amount."""
    name, start = report_id(report.customer_id, report.period_start), int(period) * SECOND
    is_correction = report.version > 1 or start != report.period_start
    return RowMaker(report, status).without_line(
        line_id=line_id(name, report.version, category, period, meter),
        meter=meter,
        charge_category=category,
        charge_class=CORRECTION if is_correction else "",
        charge_period_start=start,
        charge_period_end=report.period_end,
        plan=plan,
        durability_gap="",  # This column is about usage, and this row has none.
    )
