"""Read rules whose rate is typed, such as {"algorithm": "token_bucket", "rate": "10/5min"}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ratelimits.algorithms import typed_rates
from ratelimits.algorithms.limits import ALGORITHMS, fields_of


def with_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a rule, with numbers in place of a typed rate. Other values are returned as they are.

    The typed rate also gives the period. It gives the capacity, if the algorithm has a capacity and `values` has none.
    Raise ValueError if the text is not a rate, or if it contradicts another field.
    """
    numbers = dict(values)
    rate, algorithm = values.get("rate"), values.get("algorithm")
    fields = fields_of(algorithm) if isinstance(algorithm, str) and algorithm in ALGORITHMS else ()
    if not isinstance(rate, str) or not typed_rates.is_rate(rate) or "period" not in fields:
        return numbers
    permits, period = typed_rates.rate(rate)
    given_period = numbers.get("period")
    if isinstance(given_period, str):
        given_period = typed_rates.seconds(given_period)
    if given_period is not None and given_period != period:
        raise ValueError("the rate contains another period: delete the field period, or write the rate as a number")
    numbers["period"] = period
    if "rate" in fields:
        numbers["rate"] = permits
    else:
        del numbers["rate"]
    if "capacity" not in fields:
        return numbers
    given_capacity = numbers.get("capacity")
    if given_capacity is None and permits != permits.to_integral_value():
        raise ValueError("the permits of the rate are not a whole number: write the field capacity too")
    if given_capacity is not None and "rate" not in fields and given_capacity != permits:
        raise ValueError("the rate contains another capacity: delete the field capacity or the field rate")
    if given_capacity is None:
        numbers["capacity"] = int(permits)
    return numbers
