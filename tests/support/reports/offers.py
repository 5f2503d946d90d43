"""Draw what plans include and charge, write it to the database, and tell the model (tests/reference/customers.py)."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from random import Random
from typing import Any

from ratelimits.billing.models import PlanPrice
from ratelimits.models import Plan, PlanInclusion
from tests.reference.customers import Books, Offer, Price, Tier
from tests.support.reports.edits import edit_at

#: The plans, with their currencies; "" is for a plan without prices.
PLANS = {"small": "EUR", "middle": "JPY", "large": "KWD", "free": ""}
#: The decimals of the currencies.
DIGITS = {"EUR": 2, "JPY": 0, "KWD": 3, "": 2}


class Offers:
    """The plans of a history."""

    def __init__(self, draw: Random, books: Books) -> None:
        self.draw, self.books = draw, books
        for slug, currency in PLANS.items():
            with edit_at(0):
                made = Plan.objects.create(name=slug.title(), slug=slug, currency=currency)
                PlanInclusion.objects.create(plan=made, meter="requests", quantity=0)
            books.offers[slug] = []
            self._offer(slug, 0)

    def edit(self, now: int) -> None:
        """Edit what a plan includes and charges."""
        self._offer(self.draw.choice([*PLANS]), now)

    def _offer(self, slug: str, now: int) -> None:
        draw, quantity = self.draw, self.draw.choice((0, 40, 101, 300))
        prices = {meter: self._price() for meter in ("requests", "tokens")} if PLANS[slug] else {}
        with edit_at(now):
            PlanInclusion.objects.filter(plan__slug=slug).update(quantity=quantity)
            for meter, price in prices.items():
                fields = written(price)
                rows = PlanPrice.objects.filter(plan__slug=slug, meter=meter)
                if draw.random() < 0.1 and rows.exists():  # an edit that gives the meter a new row
                    rows.delete()
                if not rows.update(**fields):
                    PlanPrice.objects.create(plan=Plan.objects.get(slug=slug), meter=meter, **fields)
        self.books.offers[slug].append((now, Offer({"requests": quantity}, prices, DIGITS[PLANS[slug]])))

    def _price(self) -> Price:
        draw, pricing = self.draw, self.draw.choice(("per_unit", "graduated", "volume"))

        def amount(most: int) -> Fraction:
            return Fraction(draw.randrange(most * 1000), 10 ** draw.choice((3, 3, 7)))

        ends = [] if pricing == "per_unit" else sorted(draw.sample(range(1, 200), 2))
        tiers = [Tier(end, amount(5), amount(9) * (pricing != "per_unit")) for end in (*ends, None)]
        fees = draw.random() < 0.5
        return Price(pricing, tuple(tiers), amount(9) * fees, amount(30) * fees, draw.random() < 0.3)


def written(price: Price) -> dict[str, Any]:
    """Return the columns of a price."""

    def text(amount: Fraction) -> str:
        return f"{Decimal(amount.numerator) / Decimal(amount.denominator):f}"

    tiers = [f"{tier.up_to or 'more'}: {text(tier.price)} + {text(tier.fee)}" for tier in price.tiers]
    is_plain = price.pricing == "per_unit"
    return {
        "pricing": price.pricing,
        "unit_price": Decimal(text(price.tiers[0].price)) if is_plain else None,
        "tiers": "" if is_plain else "\n".join(tiers),
        "flat_fee": Decimal(text(price.flat_fee)),
        "minimum": Decimal(text(price.minimum)),
        "fees_due": "report" if price.with_report else "usage",
    }
