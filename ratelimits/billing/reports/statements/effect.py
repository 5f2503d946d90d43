"""Calculate the effect that an adjustment will have on the report of its period.

An allowance has the quantities that a plan includes in a period, and how much of them is used so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from ratelimits.algorithms.billing_periods import Period
from ratelimits.billing.models import Adjustment, Report, ReportLine
from ratelimits.billing.pricing.prices import Units
from ratelimits.billing.reports.adjusting import start_of
from ratelimits.billing.reports.amounts import billed_prices, rounded_price
from ratelimits.billing.reports.build import Allowance
from ratelimits.billing.reports.closing.closing_data import ClosingData
from ratelimits.billing.reports.closing.customer import Closing
from ratelimits.billing.reports.rows import USAGE
from ratelimits.billing.reports.statements import statements
from ratelimits.billing.reports.terms.price_book import RecordedPrices
from ratelimits.conf import conf
from ratelimits.models.accounts.named import NamedCustomer
from ratelimits.money import ZERO
from ratelimits.usage.models.sums import ExactSum
from ratelimits.usage.periods import SECOND

#: The smallest number with four digits. A percentage is not rounded to fewer digits.
_FOUR_DIGITS = 1000


@dataclass(frozen=True, slots=True)
class Quantities:
    """The units of one meter that a report bills: units that the plan includes, and overage."""

    included: int
    overage: int

    @property
    def billed(self) -> int:
        return self.included + self.overage


@dataclass(frozen=True, slots=True)
class AmountOwed:
    """The amount that the customer owes for all meters of the billing period, before and after an adjustment."""

    currency: str
    before: Decimal
    after: Decimal


@dataclass(frozen=True, slots=True)
class Effect:
    """The quantities of the adjustment's meter on the report, before and after the adjustment.

    used      units that were used and not refunded; they include no adjustments
    version   version of the report that the adjustment corrects; 0 if the period has no report
    quantity  units that the adjustment adds; if below 0, units that it subtracts
    owed      None if the plan has no prices
    """

    used: int
    version: int
    quantity: int
    before: Quantities
    after: Quantities
    owed: AmountOwed | None = None

    @property
    def is_large(self) -> bool:
        """Return whether the adjustment is larger than all units that were used."""
        return abs(self.quantity) > self.used

    @property
    def percent(self) -> str | None:
        """Return the size of the adjustment as a percentage of the used units; None if no unit was used.

        If the percentage has more than two decimal places and more than four digits, it is rounded to these, after "≈".
        """
        if self.used <= 0:
            return None
        exact, places = Fraction(abs(self.quantity) * 100, self.used), 2
        while 0 < exact * 10**places < _FOUR_DIGITS:
            places += 1
        whole, decimals = divmod(round(exact * 10**places), 10**places)
        text = f"{whole}.{decimals:0{places}}".rstrip("0").rstrip(".")
        return text if Fraction(text) == exact else f"≈ {text}"


@dataclass(frozen=True, slots=True)
class _State:
    """The state of a billing period without the adjustments that are on no report yet.

    used, version           as in `Effect`
    allowance               the included units, and the overage, that are used so far
    prices                  the period's prices
    has_usage_or_report     whether the period has usage or a report
    """

    used: int
    version: int
    allowance: Allowance
    prices: RecordedPrices
    has_usage_or_report: bool

    def price(self) -> Decimal:
        """Return the price of the units that the allowance has now."""
        return rounded_price(self.prices, {meter: _units(self.allowance, meter) for meter in self.prices["meters"]})


def effect_of(adjustment: Adjustment, using: str | None = None) -> Effect:
    """Return the effect of an adjustment that is not on a report yet.

    Other adjustments that the next report of the period will contain are applied first.
    """
    using = using or conf.DATABASE
    customer, meter = adjustment.named_customer(using), adjustment.meter
    data = ClosingData(using, [customer], {})
    # Nothing is closed here. So no shards are needed, and the moment of closing does not matter.
    closing = Closing(data, customer, shards=[], now=0)
    period = closing.periods.at(start_of(adjustment))
    if closing.periods.is_closed(period):
        state = _final(using, data.reports(customer), period, closing.allowance_after_reports(period), adjustment)
    else:
        state = _provisional(using, data, customer, period, adjustment)
    allowance, prices = state.allowance, state.prices
    others = [other for other in closing.periods.adjustments(period) if other.pk != adjustment.pk]
    for other in others:
        allowance.split(other.meter, other.quantity)
    # A period gets a report only if it has usage or adjustments. Without a report, nothing is owed.
    before, price_before = _quantities(allowance, meter), ZERO
    if prices and (state.has_usage_or_report or others):
        price_before = state.price()
    allowance.split(meter, adjustment.quantity)
    after = _quantities(allowance, meter)
    owed = AmountOwed(prices["currency"], price_before, state.price()) if prices else None
    return Effect(state.used, state.version, adjustment.quantity, before, after, owed)


def _units(allowance: Allowance, meter: str) -> Units:
    quantities = _quantities(allowance, meter)
    return Units(quantities.billed, quantities.overage)


def _quantities(allowance: Allowance, meter: str) -> Quantities:
    return Quantities(allowance.used.get(meter, 0), allowance.over.get(meter, 0))


def _final(
    using: str, reports: Sequence[Report], period: Period, allowance: Allowance, adjustment: Adjustment
) -> _State:
    """Return the state of a period with a report. `allowance` is the allowance after the reports of the period.

    `reports` are the customer's reports, oldest first.
    """
    newest = max((other for other in reports if other.period_start == period.start), key=lambda other: other.version)
    lines = ReportLine.objects.using(using).filter(report__customer__token=newest.customer_id, charge_category=USAGE)
    sums = lines.filter(usage_period=period.start // SECOND, meter=adjustment.meter).aggregate(
        consumed=ExactSum("consumed_quantity"), refunded=ExactSum("refunded_quantity")
    )
    return _State(
        used=(sums["consumed"] or 0) - (sums["refunded"] or 0),
        version=newest.version,
        allowance=allowance,
        prices=billed_prices(reports, period.start),
        has_usage_or_report=True,
    )


def _provisional(
    using: str, data: ClosingData, customer: NamedCustomer, period: Period, adjustment: Adjustment
) -> _State:
    """Return the state of a period without a report."""
    included = data.included(customer, period)
    allowance, used, has_usage = Allowance(included.included), 0, False
    for statement in statements(period.label, account=customer.present[0], using=using):
        rows = statement.rows if statement.report.period_start == period.start else ()
        for row in rows:
            if row.charge_category != USAGE:
                continue
            has_usage = True
            allowance.used[row.meter] = allowance.used.get(row.meter, 0) + row.included_quantity
            allowance.over[row.meter] = allowance.over.get(row.meter, 0) + row.overage_quantity
            if row.meter == adjustment.meter:
                used += row.consumed_quantity - row.refunded_quantity
    try:
        prices = data.prices.of(*included.price_source)
    except ValueError:
        prices = {}  # The price is invalid; the list of open periods shows the error.
    return _State(used=used, version=0, allowance=allowance, prices=prices, has_usage_or_report=has_usage)
