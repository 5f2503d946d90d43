"""Costs that clients choose: read them from the request, and keep them within the bounds of the view.

The bounds of a view say in which meters its clients choose the cost. A cost beyond its bounds is a mistake of the
client, who gets 400. Every other wrong cost is a mistake of the view, and raises WrongCost.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from ratelimits.conf import shown
from ratelimits.conf.setting_rules import BOUNDS, are_bounds
from ratelimits.view_keys import read

#: The lowest and the highest cost that a client may choose in each meter.
Bounds = Mapping[str, tuple[int, int]]
#: A whole number as clients write it. JSON can have "250.0".
_WHOLE = re.compile(r"\+?([0-9]{1,20})(?:\.0{1,20})?", re.ASCII)


class CostOutOfBounds(Exception):
    """Raised if a client has chosen a cost beyond the bounds of the view. The request was not charged."""

    def __init__(self, meter: str, lowest: int, highest: int) -> None:
        super().__init__(f"The cost in {meter} must be a whole number from {lowest} to {highest}.")


def check_bounds(bounds: Any, place: str) -> None:
    """Raise ImproperlyConfigured if the bounds of a view are not valid. `place` says where they are written."""
    if bounds is not None and not are_bounds(bounds):
        raise ImproperlyConfigured(f"{place}: {shown(bounds)} is not valid. Write {BOUNDS}")


def at_places(costs: Mapping[str, Any], bounds: Bounds, request: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the costs by meter. Read those that are written as a place in the request, such as "field:max_tokens".

    `arguments` are the arguments in the URL. A cost whose meter has no bounds is no place.
    """
    return {
        meter: read(cost, request, arguments) if isinstance(cost, str) and meter in bounds else cost
        for meter, cost in costs.items()
    }


def within(costs: Mapping[str, Any], bounds: Bounds) -> dict[str, Any]:
    """Return the costs by meter. Raise CostOutOfBounds if one that the client chooses is not within its bounds."""
    return {meter: _chosen(meter, cost, bounds[meter]) if meter in bounds else cost for meter, cost in costs.items()}


def _chosen(meter: str, cost: Any, bounds: tuple[int, int]) -> int:
    number = _number(cost)
    if number is None or not bounds[0] <= number <= bounds[1]:
        raise CostOutOfBounds(meter, *bounds)
    return number


def _number(value: Any) -> int | None:
    """Return a whole number that a client sent, also as a text; None for anything else."""
    if isinstance(value, str):
        text = _WHOLE.fullmatch(value)
        return None if text is None else int(text[1])
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return int(value) if is_whole and not isinstance(value, bool) else None
