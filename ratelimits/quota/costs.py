"""Check a request's cost in each meter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ratelimits.conf import shown
from ratelimits.conf.setting_rules import MAX_COST
from ratelimits.engine.keys import LONGEST_NAME

#: The default cost of a request, as a mapping and as a tuple of pairs (meter, cost).
ONE_REQUEST: Mapping[str, int] = {"requests": 1}
ONE_ITEM = tuple(ONE_REQUEST.items())
_HINT = ". If clients choose it, give its bounds (throttle_cost_bounds)"
#: Maximum number of meters that count one request.
MAX_METERS = 16


class WrongCost(ValueError):
    """Raised if the costs of a request are not valid. Then correct the view that sets these costs."""


def valid_costs(costs: Mapping[str, int]) -> Mapping[str, int]:
    """Return the costs by meter, as integers. Raise WrongCost if they are not valid."""
    if not costs:
        raise WrongCost("a request needs at least one meter, such as {'requests': 1}")
    if len(costs) > MAX_METERS:
        raise WrongCost(f"a request is counted by at most {MAX_METERS} meters, not {len(costs)}")
    all_int = True
    for meter, cost in costs.items():
        name: object = meter  # a view can give any value, whatever the annotation says
        if not isinstance(name, str) or not name:
            raise WrongCost(f"a meter must be a text such as 'requests', not {shown(name)}")
        # A digest that stands for a long name begins with "~" (see engine/keys.py).
        if len(name) > LONGEST_NAME or name[0] == "~":
            raise WrongCost(
                f"a meter has at most {LONGEST_NAME} characters and does not begin with '~': {shown(name)} is wrong"
            )
        if not _is_cost(cost):
            wrong: object = cost
            hint = _HINT if isinstance(wrong, str) else ""
            raise WrongCost(
                f"the cost in {shown(meter)} must be a whole number from 0 to 2**40, not {shown(cost)}{hint}"
            )
        if type(cost) is not int:
            all_int = False
    # Convert other types to int, because Python cannot add numbers of all types, such as a float and a Decimal.
    return costs if all_int else {meter: int(cost) for meter, cost in costs.items()}


def _is_cost(cost: Any) -> bool:
    if type(cost) is int:
        return 0 <= cost <= MAX_COST
    try:
        return type(cost) is not bool and cost % 1 == 0 and 0 <= cost <= MAX_COST
    except (TypeError, ArithmeticError):  # not a number, or a Decimal that is infinite
        return False
