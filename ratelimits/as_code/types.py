"""The types of a document of rules as code: what each field may hold, before any of it meets a model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from decimal import Decimal, InvalidOperation
from typing import Any, NamedTuple

from ratelimits.algorithms.parsing import MAX_PERMITS

#: Most characters of a value that a message repeats.
_SHOWN = 60


class Kind(NamedTuple):
    """What a field holds, in words, and whether a value is such."""

    words: str
    holds: Callable[[Any], bool]


def is_text(value: Any) -> bool:
    """Return whether a database can hold the value as text: JSON may name half a character, or a NUL."""
    return isinstance(value, str) and "\0" not in value and not any("\ud800" <= one <= "\udfff" for one in value)


def _whole(value: Any) -> bool:
    # What is below 0 is for the models to refuse, field by field.
    return type(value) is int and -MAX_PERMITS <= value <= MAX_PERMITS


def _number(value: Any) -> bool:
    # A database would round what has more digits.
    return _whole(value) or (
        type(value) is Decimal
        and value.is_finite()
        and abs(value) <= MAX_PERMITS
        and len(value.as_tuple().digits) <= 40
    )


_TEXT = Kind("a text", is_text)
_NAME = Kind("a text that is not empty", lambda value: is_text(value) and value != "")
_WHOLE = Kind(f"a whole number from 0 to {MAX_PERMITS}", _whole)
_NUMBER = Kind(f"a number from 0 to {MAX_PERMITS}", _number)
_TIME = Kind(
    f'seconds from 0 to {MAX_PERMITS}, or a text with a unit such as "1 h"',
    lambda value: is_text(value) or _number(value),
)
_FLAG = Kind("true or false", lambda value: isinstance(value, bool))
_INITIAL = Kind('"full", "empty" or a whole number', lambda value: is_text(value) or _whole(value))

_LINES = Kind(
    'a list of texts such as "1000: 0.10"',
    lambda value: isinstance(value, list) and all(is_text(one) and "\n" not in one for one in value),
)
_DECIMAL = Kind('a decimal as a text, such as "0.10"', lambda value: _is_decimal(value) or _number(value))


def _is_decimal(value: Any) -> bool:
    return is_text(value) and re.fullmatch(r"-?[0-9]{1,20}(\.[0-9]{1,20})?", value) is not None


#: Fields of a plan's price.
PRICE: dict[str, Kind] = {
    "pricing": _NAME,
    "unit_price": _DECIMAL,
    "tiers": _LINES,
    "flat_fee": _DECIMAL,
    "minimum": _DECIMAL,
}

#: Fields of a rule that null leaves out.
_OPTIONAL: dict[str, Kind] = {
    "plan": _NAME,
    "capacity": _WHOLE,
    "rate": _NUMBER,
    "period": _TIME,
    "initial": _INITIAL,
    "window_start": _TEXT,
    "calendar_unit": _TEXT,
    "timezone": _TEXT,
    "anchor": _TEXT,
    "sub_windows": _WHOLE,
    "delay_after": _WHOLE,
    "max_burst_seconds": _TIME,
    "warm_up": _TIME,
    "cold_factor": _NUMBER,
    "lease_ttl": _TIME,
    "max_wait": _TIME,
    "prefetch": _WHOLE,
}
RULE: dict[str, Kind] = _OPTIONAL | {
    "name": _NAME,
    "algorithm": _NAME,
    "weighted": _FLAG,
    "scope": _NAME,
    "key_kind": _NAME,
    "meter": _NAME,
    "mode": _NAME,
    "bills": _FLAG,
    "on_failure": _TEXT,
}


def rule_problems(entry: dict[str, Any]) -> Iterator[str]:
    """Yield a sentence for each field of a rule that holds something of another type."""
    for field, value in entry.items():
        kind = RULE.get(field)
        if kind is not None and not kind.holds(value) and not (value is None and field in _OPTIONAL):
            yield f"{field} must be {kind.words}, not {as_json(value)}"


def plan_problems(slug: str, plan: dict[str, Any]) -> Iterator[str]:
    """Yield a sentence for each part of a plan that is of another type."""
    if not _NAME.holds(slug):
        yield f"a plan's slug must be {_NAME.words}, not {as_json(slug)}"
    if "name" in plan and not _NAME.holds(plan["name"]):
        yield f"name must be {_NAME.words}, not {as_json(plan['name'])}"
    for meter, quantity in plan.get("includes", {}).items():
        if not _NAME.holds(meter):
            yield f"a meter must be {_NAME.words}, not {as_json(meter)}"
        if not _WHOLE.holds(quantity):
            yield f"includes of {as_json(meter)} must be {_WHOLE.words}, not {as_json(quantity)}"
    if "currency" in plan and not _TEXT.holds(plan["currency"]):
        yield f"currency must be {_TEXT.words}, not {as_json(plan['currency'])}"
    for meter, price in plan.get("prices", {}).items():
        if not _NAME.holds(meter):
            yield f"a meter must be {_NAME.words}, not {as_json(meter)}"
        if not isinstance(price, dict) or price.keys() - PRICE.keys():
            yield f'the price of {as_json(meter)} is an object such as {{"unit_price": "0.10", "flat_fee": "5"}}'
            continue
        for field, value in price.items():
            if not PRICE[field].holds(value):
                yield f"{field} of {as_json(meter)} must be {PRICE[field].words}, not {as_json(value)}"


def as_json(value: Any) -> str:
    """Return a value as JSON has it, for no longer than a message should be."""
    if type(value) is Decimal:
        text = str(value)
    else:
        try:
            text = json.dumps(value, default=str)
        except (ValueError, RecursionError):
            text = f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def printable(text: str) -> str:
    """Return a text that a terminal and a log can show: escapes in the place of half a character or a NUL."""
    return text if text.isprintable() else as_json(text)


def decoded(raw: bytes) -> Any:
    """Return the JSON value of a text in UTF-8, its decimals exact; raise ValueError that says where it is wrong."""
    try:
        return json.loads(raw.decode("utf-8-sig"), parse_float=Decimal, parse_constant=Decimal)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}: not JSON: {error.msg}") from error
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ValueError(f"line {line}: byte {error.start + 1} of the file is not UTF-8: save it as UTF-8") from error
    except RecursionError as error:
        raise ValueError("this is nested too deeply: plans and rules are lists of flat objects") from error
    except (InvalidOperation, ValueError) as error:
        raise ValueError(f"a number has too many digits: write one of at most {MAX_PERMITS}") from error
