"""Test prices against an independent model, which works out the price of each unit by itself, in fractions."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratelimits.billing.pricing import tiers
from ratelimits.billing.pricing.prices import (
    GRADUATED,
    NO_UNITS,
    PER_UNIT,
    VOLUME,
    WITH_REPORT,
    WITH_USAGE,
    Price,
    Units,
)
from ratelimits.money import added, minor_digits, rounded, written

PRICES = st.decimals(0, 20, places=12)
FEES = st.decimals(0, 30, places=12)


@st.composite
def prices(draw: st.DrawFn) -> Price:
    """Return a strategy for any price whose tiers end within 30 units."""
    pricing = draw(st.sampled_from([PER_UNIT, GRADUATED, VOLUME]))
    ends = [] if pricing == PER_UNIT else sorted(draw(st.sets(st.integers(1, 30), max_size=4)))
    fees = st.just(Decimal(0)) if pricing == PER_UNIT else FEES
    steps = tuple(tiers.Tier(end, draw(PRICES), draw(fees)) for end in [*ends, None])
    return Price(pricing, steps, draw(FEES), draw(FEES), draw(st.sampled_from([WITH_USAGE, WITH_REPORT])))


def modelled(price: Price, units: Units) -> Fraction:
    """Return the price of the units of a period: unit by unit, each looked up in the list of tiers.

    A period without net usage owes nothing; if fees are due with each report, it owes the flat fee and the minimum.
    """
    if units.net <= 0 and price.fees_due == WITH_USAGE:
        return Fraction(0)
    total = max(units.overage, 0) if units.net > 0 else 0

    def number_of(unit: int) -> int:
        return sum(1 for tier in price.tiers if tier.up_to is not None and unit > tier.up_to)

    tier_of = [number_of(total if price.pricing == VOLUME else unit) for unit in range(1, total + 1)]
    costs = sum((Fraction(price.tiers[number].unit_price) for number in tier_of), Fraction(0))
    fees = Fraction(price.flat_fee) + sum((Fraction(price.tiers[number].fee) for number in set(tier_of)), Fraction(0))
    return max(costs + fees, Fraction(price.minimum))


@given(prices(), st.integers(-5, 60), st.integers(-5, 40))
def test_a_total_costs_exactly_what_its_units_fees_and_minimum_do(price: Price, net: int, overage: int) -> None:
    assert Fraction(price.of(Units(net, overage))) == modelled(price, Units(net, overage))


@pytest.mark.parametrize("pricing", [PER_UNIT, GRADUATED, VOLUME])
def test_without_net_usage_nothing_is_owed_unless_fees_are_due_with_each_report(pricing: str) -> None:
    tier = tiers.Tier(None, Decimal(2), Decimal(7))
    with_usage, with_report = (
        Price(pricing, (tier,), Decimal(50), Decimal(80), due) for due in (WITH_USAGE, WITH_REPORT)
    )
    for units in (NO_UNITS, Units(-1, 0), Units(-1, 3)):
        assert with_usage.of(units) == 0
        assert with_report.of(units) == 80
    assert with_usage.of(Units(1, 0)) == with_report.of(Units(1, 0)) == 80
    assert with_usage.of(Units(20, 20)) == with_report.of(Units(20, 20)) == 97


@given(prices(), st.lists(st.tuples(st.integers(-9, 12), st.integers(-9, 12)), max_size=8))
def test_what_lines_cost_and_what_is_charged_beside_them_adds_up_to_the_difference(
    price: Price, quantities: list[tuple[int, int]]
) -> None:
    """The price of a total is the same, whatever versions led to it."""
    totals = [NO_UNITS]
    for net, overage in quantities:
        totals.append(totals[-1].plus(Units(net, overage)))
    paid = Fraction(price.of(NO_UNITS))
    for before, after in pairwise(totals):
        start, end = before.overage, after.overage
        middle = (end - start) // 2
        lines = [*price.parts(start, middle, end), *price.parts(start + middle, end - start - middle, end)]
        paid += sum(Fraction(part.amount) for part in lines)
        paid += Fraction(price.fees(after)) - Fraction(price.fees(before))
        paid += Fraction(price.top_up(after)) - Fraction(price.top_up(before))
        paid += Fraction(price.repriced(before, after))
        assert paid == modelled(price, after)


@given(prices(), st.integers(0, 30), st.integers(-30, 30))
def test_the_parts_of_a_line_are_its_units_each_at_its_own_price(price: Price, before: int, quantity: int) -> None:
    quantity = max(quantity, -before)
    parts = price.parts(before, quantity, before + quantity)
    assert sum(part.quantity for part in parts) == quantity
    assert all(Fraction(part.amount) == part.quantity * Fraction(part.unit_price) for part in parts)


@given(prices())
def test_a_price_comes_back_from_its_record(price: Price) -> None:
    assert Price.from_record(price.record()) == price
    assert all(type(text) is str for text in price.record().values())


@given(st.lists(st.decimals(0, 10**12, places=4), max_size=30), st.sampled_from([0, 2, 3, 4]))
def test_a_sum_is_rounded_once_half_to_even(amounts: list[Decimal], digits: int) -> None:
    total = sum(map(Fraction, amounts), Fraction(0))
    assert Fraction(rounded(added(amounts), digits)) == Fraction(round(total * 10**digits), 10**digits)


def test_halves_go_to_the_even_neighbour() -> None:
    texts = [f"{rounded(Decimal(text), 2):f}" for text in ("0.125", "0.135", "-0.125", "0.1250000001")]
    assert texts == ["0.12", "0.14", "-0.12", "0.13"]


@settings(max_examples=20)
@given(st.integers(0, 2**63 - 1))
def test_no_digit_of_a_large_amount_is_lost(quantity: int) -> None:
    price = Price(PER_UNIT, (tiers.Tier(None, Decimal("999999999999.999999999999")),))
    amount = price.of(Units(quantity, quantity))
    assert Fraction(amount) == quantity * Fraction(10**24 - 1, 10**12)
    assert Decimal(written(amount)) == amount


def test_an_amount_is_written_with_no_digit_more_than_it_needs() -> None:
    texts = ["0.10", "1200", "-3.50", "0.000", "1E+3"]
    assert [written(Decimal(text)) for text in texts] == ["0.1", "1200", "-3.5", "0", "1000"]


@pytest.mark.parametrize(("currency", "digits"), [("EUR", 2), ("JPY", 0), ("KWD", 3), ("CLF", 4)])
def test_a_currency_has_the_minor_unit_of_iso_4217(currency: str, digits: int) -> None:
    assert minor_digits(currency) == digits


@pytest.mark.parametrize("text", ["EURO", "eur", "XXX", ""])
def test_what_is_no_currency_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a currency of ISO 4217"):
        minor_digits(text)


def test_tiers_are_read_as_people_write_them() -> None:
    read = tiers.parse(" 1000 : 0.10 \n\n10000: 0.08+5\nmore: 0.050")
    assert read == (
        tiers.Tier(1000, Decimal("0.1")),
        tiers.Tier(10_000, Decimal("0.08"), Decimal(5)),
        tiers.Tier(None, Decimal("0.05")),
    )
    assert tiers.to_text(read) == "1000: 0.1\n10000: 0.08 + 5\nmore: 0.05"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "there are no tiers: write a tier as"),
        ("1000 0.10", "“1000 0.10” is not a tier: write a tier as"),
        ("1000: 0.10", "there is no price for units beyond 1000: add a line such as"),
        ("more: 1\n1000: 2", "“1000: 2” comes after the tier “more”"),
        ("1000: 1\n1000: 2\nmore: 3", "“1000: 2” must end at more units than the tier before it"),
        ("1,000: 1\nmore: 3", "“1,000” can mean 1 or 1000: write one of these two"),
        ("1.000: 1\nmore: 3", "“1.000” can mean 1 or 1000: write one of these two"),
        ("1.5: 1\nmore: 3", "“1.5: 1” must begin with a whole number of units"),
        ("more: 1.000", "“1.000” can mean 1 or 1000: write one of these two"),
        ("0: 1\nmore: 3", "must begin with a whole number of units from 1"),
        (f"{2**63}: 1\nmore: 3", "must begin with a whole number of units from 1"),
        ("more: 0,10", "“0,10” is not a price: write a decimal such as 0.10"),
        ("more: -1", "a price cannot be below 0"),
        ("more: 1e3", "“1e3” is not a price"),
        ("more: ١", "is not a price"),
        ("more: 1 +", "“” is not a price"),
        ("more: 0.0000000000001", "has too many digits"),
        ("more: 1000000000000", "has too many digits"),
    ],
)
def test_what_are_no_tiers_is_refused_with_what_to_write(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        tiers.parse(text)
