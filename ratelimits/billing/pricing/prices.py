"""The price of a quantity: per unit, by graduated tiers or by volume, with a flat fee and a minimum.

A price depends on the total quantity of a period. If a later version of a report adds usage, this usage costs the price
of the new total minus the price of the old total. So all versions together cost the price of the final total.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import NamedTuple

from ratelimits.billing.pricing.tiers import Tier, parse, to_text
from ratelimits.money import ZERO, added, minus, plus, times, written

#: The kinds of pricing. PER_UNIT: every unit has the same price. GRADUATED: each unit has the price of its own tier.
#: VOLUME: all units have the price of one tier, the tier that the total reaches.
PER_UNIT, GRADUATED, VOLUME = "per_unit", "graduated", "volume"
#: When the flat fee and the minimum are due. WITH_USAGE: if the net usage of the meter is above 0. WITH_REPORT: if the
#: account has a report.
WITH_USAGE, WITH_REPORT = "usage", "report"


class Units(NamedTuple):
    """The units of a meter in a billing period.

    net      units that were used, minus those that were refunded, plus adjustments
    overage  the part of `net` that the plan does not include
    """

    net: int
    overage: int

    def plus(self, other: Units) -> Units:
        """Return the sum of these units and others."""
        return Units(self.net + other.net, self.overage + other.overage)

    def minus(self, other: Units) -> Units:
        """Return these units without others."""
        return Units(self.net - other.net, self.overage - other.overage)


#: A period without units.
NO_UNITS = Units(0, 0)


class PricedPart(NamedTuple):
    """Units of a line that have the same price. The quantity is below 0 if units are subtracted."""

    quantity: int
    unit_price: Decimal
    amount: Decimal


@dataclass(frozen=True, slots=True)
class Price:
    """The price of a meter's units in a billing period. Without net usage above 0, units cost nothing."""

    pricing: str
    tiers: tuple[Tier, ...]
    flat_fee: Decimal = ZERO
    minimum: Decimal = ZERO
    fees_due: str = WITH_USAGE

    @classmethod
    def from_record(cls, record: Mapping[str, str]) -> Price:
        """Return the price that `record` describes in texts.

        Raise ValueError or KeyError if a text is wrong or missing.
        """
        flat_fee, minimum = Decimal(record["flat_fee"]), Decimal(record["minimum"])
        return cls(record["pricing"], parse(record["tiers"]), flat_fee, minimum, record["fees_due"])

    def record(self) -> dict[str, str]:
        """Return the price as texts; equal prices have equal texts."""
        return {
            "pricing": self.pricing,
            "tiers": to_text(self.tiers),
            "flat_fee": written(self.flat_fee),
            "minimum": written(self.minimum),
            "fees_due": self.fees_due,
        }

    def of(self, units: Units) -> Decimal:
        """Return the exact price of the units of a period."""
        return plus(self.units(units), self.fees(units), self.top_up(units))

    def units(self, units: Units) -> Decimal:
        """Return the price of the units, without the fees and the minimum."""
        if units.net <= 0:
            return ZERO
        if self.pricing == VOLUME:
            return times(max(units.overage, 0), self._tier(units.overage).unit_price)
        return added(times(count, tier.unit_price) for tier, count in self._graduated(0, units.overage))

    def fees(self, units: Units) -> Decimal:
        """Return the flat fee plus the fees of all tiers that contain at least one unit.

        With volume pricing, all units are in one tier: the tier that the total reaches.
        """
        if not self._are_fees_due(units):
            return ZERO
        if units.net <= 0 or units.overage <= 0:
            return self.flat_fee
        if self.pricing == VOLUME:
            return plus(self.flat_fee, self._tier(units.overage).fee)
        return plus(self.flat_fee, *(tier.fee for tier, _count in self._graduated(0, units.overage)))

    def top_up(self, units: Units) -> Decimal:
        """Return the amount by which fees and units together are below the minimum; 0 if they reach the minimum."""
        if not self._are_fees_due(units):
            return ZERO
        return max(minus(self.minimum, plus(self.fees(units), self.units(units))), ZERO)

    def _are_fees_due(self, units: Units) -> bool:
        return units.net > 0 or self.fees_due == WITH_REPORT

    def parts(self, before: int, quantity: int, total: int) -> list[PricedPart]:
        """Divide `quantity` units into parts, with one part for each unit price.

        These units come after the first `before` units, in a period with `total` units. If `quantity` is below 0, units
        are subtracted from the end of the first `before` units.
        """
        if self.pricing == VOLUME:
            price = self._tier(total).unit_price
            return [PricedPart(quantity, price, times(quantity, price))] if quantity else []
        after = before + quantity
        spans = self._graduated(min(before, after), max(before, after))
        sign = 1 if quantity > 0 else -1
        parts = [
            PricedPart(sign * count, tier.unit_price, times(sign * count, tier.unit_price)) for tier, count in spans
        ]
        # Units are subtracted from the end, so the part with the last units comes first.
        return parts if sign > 0 else parts[::-1]

    def repriced(self, before: Units, after: Units) -> Decimal:
        """Return the change of the price of earlier units if the units of a period change from `before` to `after`.

        With volume pricing, the total can reach another tier. With other pricing, the price of earlier units changes
        only if the period had or has no net usage.
        """
        parts = self.parts(before.overage, after.overage - before.overage, after.overage)
        price_of_new_units = added(part.amount for part in parts)
        return minus(minus(self.units(after), self.units(before)), price_of_new_units)

    def _tier(self, total: int) -> Tier:
        return next(tier for tier in self.tiers if tier.up_to is None or total <= tier.up_to)

    def _graduated(self, start: int, end: int) -> Iterator[tuple[Tier, int]]:
        """Yield each tier with units at the positions `start` + 1 to `end`, and the number of these units."""
        low = 0
        for tier in self.tiers:
            high = end if tier.up_to is None else min(tier.up_to, end)
            if high > max(low, start):
                yield tier, high - max(low, start)
            if tier.up_to is None or tier.up_to >= end:
                return
            low = tier.up_to
