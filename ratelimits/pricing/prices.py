"""The price of a quantity: by the unit, by graduated tiers or by volume, with a flat fee and a minimum.

A period's total has a price. What was reported later is priced as the difference of that price before and after, so
that the sum over a report's versions is the price of the final quantity, whatever came when.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import NamedTuple

from ratelimits.pricing.money import ZERO, added, minus, plus, times, written
from ratelimits.pricing.tiers import Tier, parse, to_text

#: Each unit costs the same; each unit costs what its own tier says; all units cost what the total's tier says.
PER_UNIT, GRADUATED, VOLUME = "per_unit", "graduated", "volume"


class PricedPart(NamedTuple):
    """Units of a line that cost the same; the quantity is below zero where units come off."""

    quantity: int
    unit_price: Decimal
    amount: Decimal


@dataclass(frozen=True, slots=True)
class Price:
    """What the units of a meter cost in a billing period. A total below zero costs what 0 does."""

    pricing: str
    tiers: tuple[Tier, ...]
    flat_fee: Decimal = ZERO
    minimum: Decimal = ZERO

    @classmethod
    def from_record(cls, record: Mapping[str, str]) -> Price:
        """Return the price that `record` wrote down. Raises ValueError or KeyError for anything else."""
        flat_fee, minimum = Decimal(record["flat_fee"]), Decimal(record["minimum"])
        return cls(record["pricing"], parse(record["tiers"]), flat_fee, minimum)

    def record(self) -> dict[str, str]:
        """Return it as texts: the same ones for the same price."""
        return {
            "pricing": self.pricing,
            "tiers": to_text(self.tiers),
            "flat_fee": written(self.flat_fee),
            "minimum": written(self.minimum),
        }

    def of(self, total: int) -> Decimal:
        """Return the price of a period's total, exact."""
        return plus(self.units(total), self.fees(total), self.top_up(total))

    def units(self, total: int) -> Decimal:
        """Return what the units alone cost."""
        if self.pricing == VOLUME:
            return times(max(total, 0), self._tier(total).unit_price)
        return added(times(count, tier.unit_price) for tier, count in self._graduated(0, total))

    def fees(self, total: int) -> Decimal:
        """Return the flat fee and the fees of the tiers that have a unit: under volume pricing of one tier."""
        if total <= 0:
            return self.flat_fee
        if self.pricing == VOLUME:
            return plus(self.flat_fee, self._tier(total).fee)
        return plus(self.flat_fee, *(tier.fee for tier, _count in self._graduated(0, total)))

    def top_up(self, total: int) -> Decimal:
        """Return what fees and units lack of the minimum."""
        return max(minus(self.minimum, plus(self.fees(total), self.units(total))), ZERO)

    def parts(self, before: int, quantity: int, total: int) -> list[PricedPart]:
        """Return what units cost that come after `before` others, in a period that has `total` in the end."""
        if self.pricing == VOLUME:
            price = self._tier(total).unit_price
            return [PricedPart(quantity, price, times(quantity, price))] if quantity else []
        after = before + quantity
        spans = self._graduated(min(before, after), max(before, after))
        sign = 1 if quantity > 0 else -1
        found = [
            PricedPart(sign * count, tier.unit_price, times(sign * count, tier.unit_price)) for tier, count in spans
        ]
        return found if sign > 0 else found[::-1]

    def repriced(self, before: int, total: int) -> Decimal:
        """Return what it changes for the first `before` units that the total is in another tier now."""
        if self.pricing != VOLUME:
            return ZERO
        lines = times(total - before, self._tier(total).unit_price)
        return minus(minus(self.units(total), self.units(before)), lines)

    def _tier(self, total: int) -> Tier:
        return next(tier for tier in self.tiers if tier.up_to is None or total <= tier.up_to)

    def _graduated(self, start: int, end: int) -> Iterator[tuple[Tier, int]]:
        """The tiers of the units behind the `start`-th up to the `end`-th, and how many are in each."""
        low = 0
        for tier in self.tiers:
            high = end if tier.up_to is None else min(tier.up_to, end)
            if high > max(low, start):
                yield tier, high - max(low, start)
            if tier.up_to is None or tier.up_to >= end:
                return
            low = tier.up_to
