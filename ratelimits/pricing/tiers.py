"""Tiers as people write them: one a line, "1000: 0.10" for the first thousand units, "more: 0.05" for all beyond."""

from __future__ import annotations

import re
from collections.abc import Iterable
from decimal import Decimal
from typing import NamedTuple

from ratelimits.pricing.money import ZERO, written

#: What the last tier begins with: it has no end.
MORE = "more"
#: Digits that a price may have, and how many of them behind the decimal point.
DIGITS, PLACES = 15, 10
_MAX_UNITS = 10**12
_LINE = re.compile(r"\s*(?P<up_to>[^:]*?)\s*:\s*(?P<price>[^+]*?)\s*(?:\+\s*(?P<fee>.*?)\s*)?")
_PRICE = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_SHAPE = 'write a tier as "1000: 0.10" (or "1000: 0.10 + 5" with a fee), and the last one as "more: 0.05"'


class Tier(NamedTuple):
    """Units up to and with the `up_to`-th (None: all that are beyond the tier before) at a price for each.

    The fee is due once, when there is a first unit in the tier.
    """

    up_to: int | None
    unit_price: Decimal
    fee: Decimal = ZERO


def parse(text: str) -> tuple[Tier, ...]:
    """Return the tiers that a text says. Raises ValueError with a sentence that says which line is wrong, and how."""
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"there is no tier: {_SHAPE}")
    tiers: list[Tier] = []
    for line in lines:
        about = f"“{line.strip()}”"
        found = _LINE.fullmatch(line)
        if found is None:
            raise ValueError(f"{about} is no tier: {_SHAPE}")
        if tiers and tiers[-1].up_to is None:
            raise ValueError(f"{about} comes after the tier of all further units, which must be the last")
        up_to = _up_to(found["up_to"], about)
        before = (tiers[-1].up_to or 0) if tiers else 0
        if up_to is not None and up_to <= before:
            raise ValueError(f"{about} ends at or before the tier before it: tiers go up")
        fee = ZERO if found["fee"] is None else price(found["fee"])
        tiers.append(Tier(up_to, price(found["price"]), fee))
    if tiers[-1].up_to is not None:
        raise ValueError(f'nothing says what units beyond {tiers[-1].up_to} cost: add a line such as "{MORE}: 0.05"')
    return tuple(tiers)


def price(text: str) -> Decimal:
    """Return the price that a text says. Raises ValueError with a sentence that says what to write."""
    if not _PRICE.fullmatch(text):
        raise ValueError(f"“{text}” is no price: write a decimal such as 0.10, without a currency and thousands' marks")
    whole, _point, places = text.partition(".")
    if len(places.rstrip("0")) > PLACES or len(whole.lstrip("0")) + PLACES > DIGITS:
        most = DIGITS - PLACES
        raise ValueError(f"“{text}” has too many digits: at most {most} before and {PLACES} behind the decimal point")
    return Decimal(text)


def to_text(tiers: Iterable[Tier]) -> str:
    """Return tiers as `parse` reads them, each price with no digit more than it needs."""
    return "\n".join(
        f"{MORE if tier.up_to is None else tier.up_to}: {written(tier.unit_price)}"
        + (f" + {written(tier.fee)}" if tier.fee else "")
        for tier in tiers
    )


def _up_to(text: str, about: str) -> int | None:
    if text == MORE:
        return None
    if not (text.isascii() and text.isdecimal()) or not 0 < int(text) <= _MAX_UNITS:
        raise ValueError(f"{about} must begin with a whole number of units from 1 to {_MAX_UNITS}, or with “{MORE}”")
    return int(text)
