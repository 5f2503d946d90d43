"""Write charges as CSV with the columns of FOCUS 1.2, the FinOps Open Cost and Usage Specification (focus.finops.org).

A row of FOCUS has only one unit price. So a report line becomes one row for its included units, and one row for each
unit price of its overage. A charge without units, such as a fee, is one row without a quantity. Lines without a
currency are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from ratelimits.billing.pricing.prices import PricedPart
from ratelimits.billing.reports.rows import ADJUSTMENT, FEE, FINAL, MINIMUM, REPRICING, ROUNDING, VERSION, Charge
from ratelimits.conf import conf
from ratelimits.files import csv_lines, encoded
from ratelimits.money import ZERO, written
from ratelimits.usage.periods import iso

_PURCHASE, _USAGE, _ADJUSTMENT = "Purchase", "Usage", "Adjustment"
#: The texts in the column ChargeDescription, by category of the charge.
_DESCRIPTIONS = {
    FEE: "{meter}: fees of plan {plan}",
    REPRICING: "{meter}: units billed before, at the price of another tier",
    MINIMUM: "{meter}: up to the minimum of plan {plan}",
    ROUNDING: "rounding of the billing period's price",
    ADJUSTMENT: "{meter}: adjusted by a person",
}

#: For each column, the function that returns its value. The function takes a charge, and a part of its units with one
#: unit price. The part is None if the charge has no units, such as a fee. FOCUS allows other columns if their names
#: begin with "x_": these columns are the app's own.
_COLUMNS: Mapping[str, Callable[[Charge, PricedPart | None], str]] = {
    "BilledCost": lambda charge, part: _cost(charge, part),
    # The customer's token.
    "BillingAccountId": lambda charge, _part: charge.row.report_id.partition(".")[0],
    "BillingAccountName": lambda charge, _part: charge.account_name,
    "BillingCurrency": lambda charge, _part: charge.currency,
    "BillingPeriodEnd": lambda charge, _part: iso(charge.row.billing_period_end),
    "BillingPeriodStart": lambda charge, _part: iso(charge.row.billing_period_start),
    "ChargeCategory": lambda charge, _part: _category(charge),
    "ChargeClass": lambda charge, _part: "Correction" if charge.row.charge_class else "",
    "ChargeDescription": lambda charge, part: _description(charge, part),
    "ChargeFrequency": lambda charge, _part: _frequency(charge),
    "ChargePeriodEnd": lambda charge, _part: iso(charge.row.charge_period_end),
    "ChargePeriodStart": lambda charge, _part: iso(charge.row.charge_period_start),
    "ConsumedQuantity": lambda _charge, part: "" if part is None else str(part.quantity),
    "ConsumedUnit": lambda charge, part: "" if part is None else charge.row.unit,
    "ContractedCost": lambda charge, part: _cost(charge, part),
    "ContractedUnitPrice": lambda charge, part: _unit_price(charge, part),
    "EffectiveCost": lambda charge, part: _cost(charge, part),
    "InvoiceId": lambda charge, _part: _invoice(charge),
    "InvoiceIssuerName": lambda _charge, _part: conf.NAMESPACE,
    "ListCost": lambda charge, part: _cost(charge, part),
    "ListUnitPrice": lambda charge, part: _unit_price(charge, part),
    "PricingCategory": lambda charge, _part: "Standard" if _category(charge) != _ADJUSTMENT else "Other",
    "PricingQuantity": lambda charge, part: _pricing_quantity(charge, part),
    "PricingUnit": lambda charge, part: charge.row.unit if part is not None else _unit_of_fee(charge),
    "ProviderName": lambda _charge, _part: conf.NAMESPACE,
    "PublisherName": lambda _charge, _part: conf.NAMESPACE,
    "ServiceCategory": lambda _charge, _part: "Other",
    "ServiceName": lambda charge, _part: charge.row.meter or conf.NAMESPACE,
    "SkuId": lambda charge, _part: f"{charge.row.plan}/{charge.row.meter}" if charge.row.meter else "",
    "SkuPriceId": lambda charge, part: _sku_price(charge, part),
    "SubAccountId": lambda charge, _part: charge.row.key,
    "SubAccountName": lambda charge, _part: charge.row.key,
    "x_LineId": lambda charge, _part: charge.row.line_id,
    "x_ReportVersion": lambda charge, _part: str(charge.row.report_version),
    "x_Status": lambda charge, _part: charge.row.status,
    "x_Plan": lambda charge, _part: charge.row.plan,
}
COLUMNS = tuple(_COLUMNS)
#: The functions that return a row's values, in the order of the columns.
_VALUES = tuple(_COLUMNS.values())
#: Columns that never contain a formula, because their values are not texts.
_COLUMNS_WITHOUT_TEXT = frozenset(
    {
        *("BilledCost", "ContractedCost", "EffectiveCost", "ListCost", "ContractedUnitPrice", "ListUnitPrice"),
        *("ConsumedQuantity", "PricingQuantity", "x_ReportVersion"),
        *("BillingPeriodStart", "BillingPeriodEnd", "ChargePeriodStart", "ChargePeriodEnd"),
    }
)


def stream(charges: Iterable[Charge], _version: int = VERSION) -> Iterator[bytes]:
    """Yield the charges as a CSV file in chunks. Each charge is read shortly before it is written."""
    return encoded(csv_lines(COLUMNS, _COLUMNS_WITHOUT_TEXT, _rows(charges)))


def _rows(charges: Iterable[Charge]) -> Iterator[list[str]]:
    for charge in charges:
        if charge.currency:
            for part in _parts(charge):
                yield [value(charge, part) for value in _VALUES]


def _parts(charge: Charge) -> Iterator[PricedPart | None]:
    """Yield one part of a charge for each unit price; yield None if the charge has no units, such as a fee."""
    row = charge.row
    if row.charge_category in (FEE, REPRICING, MINIMUM, ROUNDING):
        yield None
        return
    if row.included_quantity:
        yield PricedPart(row.included_quantity, unit_price=ZERO, amount=ZERO)
    if charge.amount is not None:
        yield from charge.parts
    elif row.overage_quantity:  # The plan has no price for this meter, so the units cost nothing.
        yield PricedPart(row.overage_quantity, unit_price=ZERO, amount=ZERO)


def _invoice(charge: Charge) -> str:
    """Return the name of the invoice: the report and its version. A version never changes, so neither does its sum.

    Charges of an open period are on no invoice yet, and FOCUS wants an empty value for them.
    """
    row = charge.row
    return f"{row.report_id}.v{row.report_version}" if row.status == FINAL else ""


def _cost(charge: Charge, part: PricedPart | None) -> str:
    return written(part.amount if part is not None else charge.amount or ZERO)


def _unit_price(charge: Charge, part: PricedPart | None) -> str:
    if part is not None:
        return written(part.unit_price)
    # The unit of a fee is a billing period. A correction has no unit price: its cost can be below 0, but FOCUS does not
    # allow a unit price below 0.
    return _cost(charge, None) if _unit_of_fee(charge) and not charge.row.charge_class else ""


def _pricing_quantity(charge: Charge, part: PricedPart | None) -> str:
    if part is not None:
        return str(part.quantity)
    return "1" if _unit_of_fee(charge) else ""


def _unit_of_fee(charge: Charge) -> str:
    """Return the unit of a fee; "" for other charges."""
    return "billing period" if charge.row.charge_category == FEE else ""


def _category(charge: Charge) -> str:
    if charge.row.charge_category == FEE:
        return _PURCHASE
    # `_DESCRIPTIONS` has all categories of charges except usage.
    return _ADJUSTMENT if charge.row.charge_category in _DESCRIPTIONS else _USAGE


def _frequency(charge: Charge) -> str:
    return {_USAGE: "Usage-Based", _PURCHASE: "Recurring", _ADJUSTMENT: "One-Time"}[_category(charge)]


def _description(charge: Charge, part: PricedPart | None) -> str:
    row = charge.row
    text = _DESCRIPTIONS.get(row.charge_category)
    if text is not None:
        return text.format(meter=row.meter, plan=row.plan)
    if part is not None and part.unit_price:
        return f"{row.meter} beyond what plan {row.plan} includes"
    return f"{row.meter} in plan {row.plan}, free of charge"


def _sku_price(charge: Charge, part: PricedPart | None) -> str:
    """Return the name of the price: plan, meter and unit price. Without units: plan, meter and category."""
    if not charge.row.meter:
        return ""
    price = _unit_price(charge, part) if part is not None else charge.row.charge_category
    return f"{charge.row.plan}/{charge.row.meter}/{price}"
