"""The price of a quantity: per unit, by graduated tiers or by volume, with a flat fee and a minimum.

A price depends on the total quantity of a period. If a later version of a report adds usage, this usage costs the price
of the new total minus the price of the old total. So all versions together cost the price of the final total.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import NamedTuple

from ratelimits.pricing.money import ZERO, added, minus, plus, times, written
from ratelimits.pricing.tiers import Tier, parse, to_text

#: The kinds of pricing. PER_UNIT: every unit has the same price. GRADUATED: each unit has the price of its own tier.
#: VOLUME: all units have the price of one tier, the tier that the total reaches.
PER_UNIT, GRADUATED, VOLUME = "per_unit", "graduated", "volume"


class PricedPart(NamedTuple):
    """Units of a line that have the same price. The quantity is below 0 if units are subtracted."""

    quantity: int
    unit_price: Decimal
    amount: Decimal


@dataclass(frozen=True, slots=True)
class Price:
    """The price of a meter's units in a billing period. A total below 0 costs as much as a total of 0."""

    pricing: str
    tiers: tuple[Tier, ...]
    flat_fee: Decimal = ZERO
    minimum: Decimal = ZERO

    @classmethod
    def from_record(cls, record: Mapping[str, str]) -> Price:
        """Return the price that `record` describes in texts.

        Raise ValueError or KeyError if a text is wrong or missing.
        """
        flat_fee, minimum = Decimal(record["flat_fee"]), Decimal(record["minimum"])
        return cls(record["pricing"], parse(record["tiers"]), flat_fee, minimum)

    def record(self) -> dict[str, str]:
        """Return the price as texts; equal prices have equal texts."""
        return {
            "pricing": self.pricing,
            "tiers": to_text(self.tiers),
            "flat_fee": written(self.flat_fee),
            "minimum": written(self.minimum),
        }

    def of(self, total: int) -> Decimal:
        """Return the exact price of the total quantity of a period."""
        return plus(self.units(total), self.fees(total), self.top_up(total))

    def units(self, total: int) -> Decimal:
        """Return the price of the units, without the fees and the minimum."""
        if self.pricing == VOLUME:
            return times(max(total, 0), self._tier(total).unit_price)
        return added(times(count, tier.unit_price) for tier, count in self._graduated(0, total))

    def fees(self, total: int) -> Decimal:
        """Return the flat fee plus the fees of all tiers that contain at least one unit.

        With volume pricing, all units are in one tier: the tier that the total reaches.
        """
        if total <= 0:
            return self.flat_fee
        if self.pricing == VOLUME:
            return plus(self.flat_fee, self._tier(total).fee)
        return plus(self.flat_fee, *(tier.fee for tier, _count in self._graduated(0, total)))

    def top_up(self, total: int) -> Decimal:
        """Return the amount by which fees and units together are below the minimum; 0 if they reach the minimum."""
        return max(minus(self.minimum, plus(self.fees(total), self.units(total))), ZERO)

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

    def repriced(self, before: int, total: int) -> Decimal:
        """Return the change of the price of the first `before` units if the total changes from `before` to `total`.

        With volume pricing, the total can reach another tier. With other pricing, this price never changes.
        """
        if self.pricing != VOLUME:
            return ZERO
        price_of_new_units = times(total - before, self._tier(total).unit_price)
        return minus(minus(self.units(total), self.units(before)), price_of_new_units)

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
