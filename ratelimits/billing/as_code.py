"""The prices of plans as code: the part `prices` of a plan's entry."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from ratelimits import money
from ratelimits.as_code.reading import NAME, EntryPart, FieldType, as_json, is_number, is_text, parts
from ratelimits.billing.models.prices import PlanPrice, price_of, price_text
from ratelimits.billing.pricing.prices import WITH_USAGE
from ratelimits.money import ZERO

#: The fields of a price that are written only if they are not 0.
_FEES = ("flat_fee", "minimum")
_TIERS = FieldType(
    'a list of texts such as "1000: 0.10"',
    lambda value: isinstance(value, list) and all(is_text(line) and "\n" not in line for line in value),
)
_DECIMAL = FieldType('a decimal as a text, such as "0.10"', lambda value: is_text(value) or is_number(value))
#: All fields of a price.
_FIELDS: dict[str, FieldType] = {
    "pricing": NAME,
    "unit_price": _DECIMAL,
    "tiers": _TIERS,
    "flat_fee": _DECIMAL,
    "minimum": _DECIMAL,
    "fees_due": NAME,
}


def register() -> None:
    """Let the plans of a document have prices."""
    example = '{"requests": {"unit_price": "0.10"}}'
    parts["prices"] = EntryPart(PlanPrice, "prices", example, _problems, _as_code, _columns)


def _problems(meter: str, price: Any) -> Iterator[str]:
    if not isinstance(price, dict) or price.keys() - _FIELDS.keys():
        yield f'the price of {as_json(meter)} must be an object such as {{"unit_price": "0.10", "flat_fee": "5"}}'
        return
    for field, value in price.items():
        if problem := _problem(_FIELDS[field], value):
            yield f"{field} of {as_json(meter)}{problem}"


def _problem(field: FieldType, value: Any) -> str:
    """Return what is wrong with the value of a field, as the end of a sentence; "" if it is right."""
    if not field.accepts(value):
        return f" must be {field.description}, not {as_json(value)}"
    if field is _DECIMAL:
        try:
            money.read(value) if isinstance(value, str) else money.price(Decimal(value))
        except ValueError as error:
            return f": {error}"
    return ""


def _as_code(price: PlanPrice) -> dict[str, Any]:
    """Return the entry of a price. Decimals are texts, and tiers are a list of texts."""
    entry: dict[str, Any] = {"pricing": price.pricing}
    if price.unit_price is not None:
        entry["unit_price"] = price_text(price.unit_price)
    if price.tiers:
        entry["tiers"] = price.tiers.splitlines()
    entry |= {name: price_text(getattr(price, name)) for name in _FEES if getattr(price, name)}
    return entry if price.fees_due == WITH_USAGE else entry | {"fees_due": price.fees_due}


def _columns(entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "pricing": entry.get("pricing", PlanPrice.Pricing.PER_UNIT),
        "unit_price": price_of(entry["unit_price"]) if "unit_price" in entry else None,
        "tiers": "\n".join(entry.get("tiers", ())),
        "fees_due": entry.get("fees_due", WITH_USAGE),
        **{name: price_of(entry.get(name, ZERO)) for name in _FEES},
    }
