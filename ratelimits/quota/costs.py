"""What a request costs in each meter: read the costs of a view, and check them and the names of their meters.

The cost in some meters can be chosen by the client. The bounds of a view say in which meters, and between which costs.
A cost beyond its bounds is a mistake of the client, who gets 400. Every other wrong cost is a mistake of the view, and
raises WrongCost.

A view can take the names of its meters from its clients. Each new name needs memory in this process, counters in Redis
and lines in the ledger, so the number of names is bounded. Known meters are "requests", the meters of rules, and the
meters in the setting METERS. A cost on another meter is refused.

If METERS is not set, the meters of UNITS, of included quantities and of prices are known too. Then a process also
accepts MAX_FURTHER further meters: a view may count something that no rule limits.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.http import HttpResponse
from django.utils.functional import Promise

from ratelimits.answers.headers import NEVER
from ratelimits.answers.responses import problem_document
from ratelimits.conf import conf, shown
from ratelimits.conf.setting_rules import BOUNDS, MAX_COST, are_bounds
from ratelimits.engine.keys import LONGEST_NAME
from ratelimits.rules import Snapshot
from ratelimits.view_keys import read

#: The default cost of a request, as a mapping and as a tuple of pairs (meter, cost).
ONE_REQUEST: Mapping[str, int] = {"requests": 1}
ONE_ITEM = tuple(ONE_REQUEST.items())
_HINT = ". If clients choose it, give its bounds (throttle_cost_bounds)"
#: Maximum number of meters that count one request.
MAX_METERS = 16
#: The names of meters that a rule, a plan and a price can have.
SLUG = re.compile("[-a-zA-Z0-9_]+")
#: Maximum number of further meters that a process accepts in its life.
MAX_FURTHER = 32
#: Minimum seconds between two times that the rules are read again because a meter is not known.
_PAUSE = 1.0
Cost = int | str | Mapping[str, int | str]
#: The lowest and the highest cost that a client may choose in each meter.
Bounds = Mapping[str, tuple[int, int]]
#: A whole number as clients write it. JSON can have "250.0".
_WHOLE = re.compile(r"\+?([0-9]{1,20})(?:\.0{1,20})?", re.ASCII)

_lock = threading.Lock()
#: The further meters of this process.
_further: set[str] = set()
#: The moment before which the rules are not read again, in seconds of the monotonic clock.
_not_before = 0.0


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


def need_newer_rules(meters: Iterable[str], snapshot: Snapshot) -> bool:
    """Return whether `check_meters` would refuse a meter, and the caller must first read the rules again.

    A refused request does not ask Redis, so Redis cannot say that the rules in memory are too old. Return True at most
    once in a second.
    """
    global _not_before
    if _refused_meter(list(_unknown_meters(meters, snapshot)), snapshot) is None or time.monotonic() < _not_before:
        return False
    _not_before = time.monotonic() + _PAUSE
    return True


def check_meters(meters: Iterable[str], snapshot: Snapshot | None) -> None:
    """Raise WrongCost if a request names a meter that is not known, and that is not accepted as a further one.

    A meter that no rule and no price can name is never accepted: its usage could neither be limited nor be billed.
    `snapshot` has the rules in memory. It is None while no rules could be read. Then it is not known which meters rules
    name, so every meter that no setting names is a further one.
    """
    global _further
    unknown = list(_unknown_meters(meters, snapshot))
    if not unknown:
        return
    for meter in unknown:
        if not SLUG.fullmatch(meter):
            raise WrongCost(
                f"a meter has only letters from a to z, digits, '-' and '_', so that rules and prices can name it:"
                f" {shown(meter)} is wrong"
            )
    with _lock:
        refused = _refused_meter(unknown, snapshot)
        if refused is None:
            _further = {*_unknown_meters(_further, snapshot), *unknown}
    if refused is None:
        return
    if conf.METERS is not None and snapshot is not None:
        raise WrongCost(
            f"the meter {shown(refused)} is not known: add it to RATELIMITS['METERS'], or make a rule for it"
        )
    raise WrongCost(
        f"the meter {shown(refused)} is not known, and this process has already accepted {MAX_FURTHER} other meters"
        " that no rule and no plan names: list the meters of the project in RATELIMITS['METERS']"
    )


def _unknown_meters(meters: Iterable[str], snapshot: Snapshot | None) -> Iterator[str]:
    """Yield the meters that neither a setting nor a row names."""
    for meter in meters:
        if meter == "requests" or (snapshot is not None and meter in snapshot.rule_meters):
            continue
        declared = conf.METERS
        if declared is not None and meter in declared:
            continue
        if declared is None and (meter in conf.UNITS or (snapshot is not None and meter in snapshot.rows.plan_meters)):
            continue
        yield meter


def _refused_meter(unknown: list[str], snapshot: Snapshot | None) -> str | None:
    """Return a meter that cannot be accepted as a further one; None if all can be accepted."""
    if not unknown:
        return None
    if conf.METERS is not None and snapshot is not None:
        return unknown[0]
    new = [meter for meter in unknown if meter not in _further]
    # A setting, a rule or a plan perhaps names some of the further meters by now.
    if (
        new
        and len(_further) + len(new) > MAX_FURTHER
        and len({*_unknown_meters(_further, snapshot), *new}) > MAX_FURTHER
    ):
        return new[0]
    return None


def forget_meters() -> None:
    """Forget the further meters. A test calls this."""
    global _further, _not_before
    _further = set()
    _not_before = 0.0


def _forked() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forked)


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
