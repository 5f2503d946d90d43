"""Read and write tiers as people write them, with one tier on each line.

For example, "1000: 0.10" is the price of each of the first 1000 units, and "more: 0.05" is the price of all further
units.
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from typing import NamedTuple

from ratelimits import money
from ratelimits.algorithms import typed_numbers
from ratelimits.money import ZERO, written

#: The first word of the last tier, which has no upper end.
MORE = "more"
#: The highest end of a tier.
_MAX_UNITS = 2**63 - 1
_SHAPE = 'write a tier as "1000: 0.10" (or "1000: 0.10 + 5" with a fee), and the last one as "more: 0.05"'


class Tier(NamedTuple):
    """The units of a period from the end of the previous tier up to the unit at the position `up_to`.

    `up_to` is None if the tier has no end. `unit_price` is the price of each unit. The fee is due once if the tier
    contains at least one unit.
    """

    up_to: int | None
    unit_price: Decimal
    fee: Decimal = ZERO


def parse(text: str) -> tuple[Tier, ...]:
    """Return the tiers that a text contains. Raise ValueError with a sentence that says what is wrong."""
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"there are no tiers: {_SHAPE}")
    tiers: list[Tier] = []
    for line in lines:
        quoted = f"“{line.strip()}”"
        # The end of the tier, the price of a unit, and perhaps a fee (see `_SHAPE`).
        end_text, colon, prices = line.partition(":")
        price_text, plus, fee_text = prices.partition("+")
        if not colon:
            raise ValueError(f"{quoted} is not a tier: {_SHAPE}")
        if tiers and tiers[-1].up_to is None:
            raise ValueError(f"{quoted} comes after the tier “{MORE}”, which must be the last")
        up_to = _up_to(end_text.strip(), quoted)
        previous_end = (tiers[-1].up_to or 0) if tiers else 0
        if up_to is not None and up_to <= previous_end:
            raise ValueError(f"{quoted} must end at more units than the tier before it: sort the tiers")
        fee = money.read(fee_text.strip()) if plus else ZERO
        tiers.append(Tier(up_to, money.read(price_text.strip()), fee))
    if tiers[-1].up_to is not None:
        raise ValueError(f'there is no price for units beyond {tiers[-1].up_to}: add a line such as "{MORE}: 0.05"')
    return tuple(tiers)


def to_text(tiers: Iterable[Tier]) -> str:
    """Return tiers as a text that `parse` can read. Prices have no trailing zeros."""
    return "\n".join(
        f"{MORE if tier.up_to is None else tier.up_to}: {written(tier.unit_price)}"
        + (f" + {written(tier.fee)}" if tier.fee else "")
        for tier in tiers
    )


def _up_to(text: str, quoted: str) -> int | None:
    if text == MORE:
        return None
    wanted = f"{quoted} must begin with a whole number of units from 1 to {_MAX_UNITS}, or with “{MORE}”"
    try:
        units = typed_numbers.whole(text)
    except typed_numbers.Mistyped as error:
        raise ValueError(f"{quoted}: {error}" if error.is_ambiguous else wanted) from error
    if not 0 < units <= _MAX_UNITS:
        raise ValueError(wanted)
    return units
