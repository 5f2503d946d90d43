"""Read the cost and the scope of a view. All entry points for rules use these functions.

The cost in some meters can be chosen by the client. The bounds of a view say in which meters, and between which costs.
A cost beyond its bounds is a mistake of the client, who gets 400. Every other wrong cost is a mistake of the view, and
raises WrongCost.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.http import HttpResponse
from django.utils.functional import Promise

from ratelimits.answers.headers import NEVER
from ratelimits.answers.responses import problem_document
from ratelimits.conf import shown
from ratelimits.conf.setting_rules import BOUNDS, are_bounds
from ratelimits.quota.costs import ONE_REQUEST, WrongCost
from ratelimits.view_keys import read

Cost = int | str | Mapping[str, int | str]
#: The lowest and the highest cost that a client may choose in each meter.
Bounds = Mapping[str, tuple[int, int]]
#: A whole number as clients write it. JSON can have "250.0".
_WHOLE = re.compile(r"\+?([0-9]{1,20})(?:\.0{1,20})?", re.ASCII)


class CostOutOfBounds(Exception):
    """Raised if a client has chosen a cost beyond the bounds of the view. The request was not charged."""

    def __init__(self, meter: str, lowest: int, highest: int) -> None:
        super().__init__(f"The cost in {meter} must be a whole number from {lowest} to {highest}.")


def costs_of(
    cost: Cost | Callable[..., Cost] | None,
    *about: Any,
    bounds: Bounds | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> Mapping[str, int]:
    """Return a view's costs by meter.

    None means one request. A number is the cost in the meter "requests". A callable is called with the arguments
    `about`, of which the first is the request, and returns None, a number or a mapping. In the meters of `bounds`, the
    client chooses the cost. `arguments` are the arguments in the URL. Raise CostOutOfBounds if the client's cost is not
    valid.
    """
    value = cost(*about) if callable(cost) else cost
    if value is None:
        return ONE_REQUEST
    costs: Mapping[str, Any] = value if isinstance(value, Mapping) else {"requests": value}
    if bounds is None:
        return costs
    check_bounds(bounds, "throttle_cost_bounds")
    if not callable(cost):  # the text that a function returns is the client's, and no place
        costs = _at_places(costs, bounds, about[0], arguments or {})
    return _within(costs, bounds)


def out_of_bounds(error: CostOutOfBounds) -> HttpResponse:
    """Return the response to a request whose client has chosen a cost beyond the bounds of the view."""
    body = {"title": "Bad Request", "status": 400, "detail": str(error)}
    return problem_document(body, 400, {"Cache-Control": NEVER})


def check_bounds(bounds: Any, place: str) -> None:
    """Raise ImproperlyConfigured if the bounds of a view are not valid. `place` says where they are written."""
    if bounds is not None and not are_bounds(bounds):
        raise ImproperlyConfigured(f"{place}: {shown(bounds)} is not valid. Write {BOUNDS}")


def _at_places(costs: Mapping[str, Any], bounds: Bounds, request: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the costs by meter. Read those that are written as a place in the request, such as "field:max_tokens".

    `arguments` are the arguments in the URL. A cost whose meter has no bounds is no place.
    """
    return {
        meter: read(cost, request, arguments) if isinstance(cost, str) and meter in bounds else cost
        for meter, cost in costs.items()
    }


def _within(costs: Mapping[str, Any], bounds: Bounds) -> dict[str, Any]:
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


def wrong_cost(error: WrongCost, view: object) -> WrongCost:
    """Return the same error with the view's name in its message."""
    return WrongCost(f"{view_name(view)}: {error}")


def scope_of(scope: object, view: object) -> str:
    """Return a view's scope as a str. Raise ImproperlyConfigured if `scope` is neither a str nor a lazy text."""
    if isinstance(scope, str):
        return scope
    if isinstance(scope, Promise):
        return str(scope)
    raise ImproperlyConfigured(f"{view_name(view)}: the scope must be a text such as 'search', not {shown(scope)}")


def view_name(view: Any) -> str:
    """Return the name of a view for messages, such as "shop.views.search"."""
    function = view if hasattr(view, "__qualname__") else type(view)
    return f"{function.__module__}.{function.__qualname__}"
