"""The list of all algorithms, the class of a limit of one request, and the rules that people write as JSON.

Every algorithm is a frozen dataclass. Its fields have the same names as in the admin form and in rule files (JSON). For
a value that is not valid, ValueError is raised with a sentence that says what to write instead. Decimals such as `rate`
are exact and have at most six places. Fields with lengths of time are in seconds; the Lua script gets them in whole
microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from enum import IntEnum
from functools import cache
from typing import Any

from ratelimits.algorithms import typed_rates
from ratelimits.algorithms.base import Algorithm
from ratelimits.algorithms.billing_periods import check_terms
from ratelimits.algorithms.rates import Gcra, LeakyBucket, LeakyBucketQueue, SmoothBursty, SmoothWarmingUp, TokenBucket
from ratelimits.algorithms.windows import (
    NO_FIELD_OF_RULES,
    CalendarWindow,
    Concurrency,
    FixedWindow,
    SlidingLog,
    SlidingWindow,
)

__all__ = [
    "ALGORITHMS",
    "DEFAULT_ALGORITHM",
    "Algorithm",
    "CalendarWindow",
    "Concurrency",
    "FixedWindow",
    "Gcra",
    "LeakyBucket",
    "LeakyBucketQueue",
    "Limit",
    "Mode",
    "SlidingLog",
    "SlidingWindow",
    "SmoothBursty",
    "SmoothWarmingUp",
    "TokenBucket",
    "algorithm_from_json",
    "fields_of",
]


class Mode(IntEnum):
    """The mode of a limit. A refusal with ENFORCE refuses the request. A refusal with SHADOW is only recorded."""

    ENFORCE = 0
    SHADOW = 1


class Lasting(IntEnum):
    """When the state of a limit is restored from the ledger. Only a calendar window can be restored.

    NO      never
    LOST    if Redis has perhaps lost what the limit has counted in its window
    ALWAYS  as LOST, and also if the limit has no state yet, such as at the first request of a key
    """

    NO = 0
    LOST = 1
    ALWAYS = 2


#: All algorithms. Add a line for a new one.
_REGISTERED: tuple[type[Algorithm], ...] = (
    FixedWindow,
    CalendarWindow,
    SlidingWindow,
    SlidingLog,
    TokenBucket,
    Gcra,
    LeakyBucket,
    LeakyBucketQueue,
    SmoothBursty,
    SmoothWarmingUp,
    Concurrency,
)
ALGORITHMS: dict[str, type[Algorithm]] = {kind.id: kind for kind in _REGISTERED}
#: The algorithm of a rule for which nobody has chosen one.
DEFAULT_ALGORITHM = "token_bucket"

#: A moment in µs since 1970 UTC, in the year 2001.
_ANY_MOMENT = 10**15
#: Fields of the admin form that do not belong to an algorithm. A rule file can have them, and they are ignored here.
_OTHER_FORM_FIELDS = {
    "name",
    "plan",
    "scope",
    "except_scopes",
    "callers",
    "group",
    "key_kind",
    "view_key",
    "ipv4_prefix",
    "ipv6_prefix",
}
_OTHER_FORM_FIELDS |= {"meter", "mode", "bills", "on_failure", "max_wait", "prefetch", "refusal_status", "refusal_text"}
_OTHER_FORM_FIELDS |= {"start_from_ledger", "lasting"}


def fields_of(algorithm: str) -> tuple[str, ...]:
    """Return the field names of an algorithm in the order of its class. Raise ValueError for an unknown algorithm."""
    if algorithm not in ALGORITHMS:
        raise ValueError(f"unknown algorithm {algorithm!r}: use one of {', '.join(ALGORITHMS)}")
    return _field_names(ALGORITHMS[algorithm])


@cache
def _field_names(algorithm: type[Algorithm]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(algorithm) if NO_FIELD_OF_RULES not in field.metadata)


def algorithm_from_json(data: Any) -> Algorithm:
    """Return the algorithm that a rule file describes. `data` must be a dict with fields of the admin form.

    Ignore fields of the form that this algorithm does not have. Raise ValueError if there is a mistake in `data`.
    """
    if not isinstance(data, dict):
        raise ValueError(
            'a rule is an object such as {"algorithm": "token_bucket", "capacity": 10, "rate": 5, "period": 1}'
        )
    fields_left = dict(data)
    name = fields_left.pop("algorithm", None)
    if name is None:
        raise ValueError(f"a rule needs an algorithm: one of {', '.join(ALGORITHMS)}")
    algorithm_class = ALGORITHMS.get(name) if isinstance(name, str) else None
    if algorithm_class is None:
        raise ValueError(f"unknown algorithm {name!r}: use one of {', '.join(ALGORITHMS)}")
    parameters = fields_of(name)
    for field in fields_left:
        if field not in _OTHER_FORM_FIELDS and not any(field in fields_of(other) for other in ALGORITHMS):
            raise ValueError(f"unknown field {field!r}: {name} takes {', '.join(parameters)}")
    values = {field: fields_left[field] for field in parameters if fields_left.get(field) is not None}
    missing = [field.name for field in fields(algorithm_class) if field.name not in values and field.default is MISSING]
    if missing:
        raise ValueError(f"{name} needs {' and '.join(missing)}")
    algorithm = algorithm_class(**values)
    if algorithm.follows_billing:  # Only a rule for `ratelimits_simulate` has a time zone and an anchor here.
        check_terms(values.get("timezone", "UTC"), values.get("anchor"), _ANY_MOMENT)
    return algorithm


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


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit of a request.

    key      who is limited, such as "user:42"
    name     the name of the limit's state. Two limits of one key need different names
    cost     the permits that the request takes
    mode     whether a refusal refuses the request or is only recorded
    rule     id of the rule, recorded with the usage; 0 if the limit does not come from a rule
    version  version of the rule, recorded with the usage
    since    the moment from which the parameters of `algorithm` apply, in µs since 1970 UTC; 0 means the moment of the
             decision. For the time before `since`, the parameters that are stored in the limit's state apply
    """

    key: str
    algorithm: Algorithm
    name: str = "default"
    cost: int = 1
    mode: Mode = Mode.ENFORCE
    rule: int = 0
    version: int = 0
    since: int = 0
