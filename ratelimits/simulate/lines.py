"""Read rules, and the lines of a trace (recorded requests). The message of each error says what to correct."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from decimal import ROUND_HALF_UP, Decimal, InvalidOperation
from itertools import islice
from typing import Any, NamedTuple

from ratelimits.algorithms.base import HORIZON, MICROSECONDS
from ratelimits.algorithms.limits import Algorithm, algorithm_from_json, with_numbers
from ratelimits.engine.call import Op
from ratelimits.engine.program import MAX_LIMITS

#: Maximum cost of one line.
MAX_COST = 2**40
#: Latest moment of a line, in seconds.
LATEST = HORIZON // MICROSECONDS
#: Fields of a line.
FIELDS = ("at", "op", "key", "cost", "timeout", "lease", "rule")
#: The operation of each `op` that a line can name.
OPS = {
    "try_acquire": Op.TRY,
    "acquire": Op.TRY,
    "peek": Op.PEEK,
    "create": Op.CREATE,
    "refund": Op.REFUND,
    "release": Op.RELEASE,
    "reset": Op.RESET,
    "set_rule": Op.CHANGE,
}

Rules = tuple[Algorithm, ...]
_FIELDS = frozenset(FIELDS)
#: A microsecond in seconds: the smallest step of time.
_MICROSECOND = Decimal("0.000001")
#: Number of lines that are decoded in one step, if possible.
_LINES_AT_ONCE = 500


class BadLine(ValueError):
    """A mistake in a line of a trace. The first line has the number 1. The number 0 stands for the rule."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number


class TraceLine(NamedTuple):
    """One line of a trace.

    at       the moment in seconds, as it is written in the line
    now      the same moment in µs
    timeout  the longest accepted wait in µs; -1 if any wait is accepted
    lease    the name of the lease that the line takes or ends; "" if the line names none
    rules    the new rules, in a line with the op `set_rule`; None in other lines
    """

    at: int | Decimal
    now: int
    op: Op
    key: str
    cost: int
    timeout: int
    lease: str
    rules: Rules | None = None


def _decimal_or_infinity(text: str) -> Decimal:
    """Return a number as a Decimal. If the exponent is too large for a Decimal, return infinity.

    An infinite number is later refused, because it is out of range.
    """
    try:
        return Decimal(text)
    except InvalidOperation:
        return Decimal("-Infinity" if text.startswith("-") else "Infinity")


def _int_or_decimal(text: str) -> int | Decimal:
    """Return a whole number; a Decimal if the number has more digits than Python allows for an int."""
    try:
        return int(text)
    except ValueError:
        return Decimal(text)


# NaN and Infinity are not JSON. The decoders accept them, so that a later message can name the field with this value.
_JSON = json.JSONDecoder(parse_float=Decimal, parse_constant=Decimal)
_LENIENT = json.JSONDecoder(parse_float=_decimal_or_infinity, parse_int=_int_or_decimal, parse_constant=Decimal)


def decode_json(text: bytes) -> Any:
    """Return the value of a JSON text in UTF-8, with exact decimals. Raise ValueError that says where a mistake is."""
    try:
        json_text = text.decode()
        try:
            return _JSON.decode(json_text)
        except json.JSONDecodeError:
            raise
        except (InvalidOperation, ValueError):  # a number is too large for a Decimal or for an int
            return _LENIENT.decode(json_text)
    except json.JSONDecodeError as error:
        raise ValueError(f"this is not JSON: {error.msg} at character {error.pos + 1}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"this is not UTF-8: byte {error.start + 1}") from error
    except RecursionError as error:
        raise ValueError("the line is nested too deeply") from error


def json_lines(texts: Iterable[bytes]) -> Iterator[tuple[int, Any]]:
    """Yield the number (from 1) and the value of each line that is not blank.

    For a line that is not JSON, the value is a ValueError.
    """
    lines = ((number, text) for number, text in enumerate(texts, 1) if text.strip())
    while group := list(islice(lines, _LINES_AT_ONCE)):
        values = _decoded_together([text for _, text in group])
        if values is not None:
            yield from zip((number for number, _ in group), values, strict=True)
            continue
        for number, text in group:
            try:
                data = decode_json(text)
            except ValueError as error:
                data = error
            yield number, data


def _decoded_together(texts: list[bytes]) -> list[Any] | None:
    """Decode several lines together, as one JSON list, because this is faster. Return their values.

    Return None if each line must be decoded alone: if a line is not JSON, or if two lines might be one value together,
    such as `{"a": [1` and `{"b": 2}]}`. Two lines that begin with "{" can be one value only if the first line contains
    "[".
    """
    whole = b",\n".join(texts)
    if b"[" in whole or not all(text.lstrip().startswith(b"{") for text in texts):
        return None
    try:
        values: list[Any] = _JSON.decode(f"[{whole.decode()}]")
    except (InvalidOperation, ValueError, RecursionError):
        return None
    return values if len(values) == len(texts) else None


def read_rules(data: Any) -> Rules:
    """Return the algorithms of one rule, or of a list of rules that are decided together.

    Raise ValueError if the list is empty or too long, or if a rule is not valid.
    """
    rules = data if isinstance(data, list) else [data]
    if not rules:
        raise ValueError("the list of rules is empty: write at least one rule")
    if len(rules) > MAX_LIMITS:
        raise ValueError(f"at most {MAX_LIMITS} rules are decided together, not {len(rules)}")
    return tuple(algorithm_from_json(with_numbers(rule) if isinstance(rule, dict) else rule) for rule in rules)


def micros(name: str, value: Any) -> int:
    """Return seconds as µs, rounded half up.

    For a number above `LATEST` or below `-LATEST`, return a number that is also too large or too small: 2 * HORIZON or
    -2 * HORIZON. Raise ValueError, for the field `name`, if the value is not a number.
    """
    if type(value) is int:
        if -LATEST <= value <= LATEST:
            return value * MICROSECONDS
    else:
        if type(value) is float:
            value = Decimal(repr(value))
        if not isinstance(value, Decimal) or value.is_nan():
            raise ValueError(f"{name} must be a number of seconds, not {_shown(value)}")
        if -LATEST <= value <= LATEST:
            # Round before the multiplication. A product with too many digits would be rounded, too.
            return int(value.quantize(_MICROSECOND, ROUND_HALF_UP).scaleb(6))
    return 2 * HORIZON if value > 0 else -2 * HORIZON


class Reader:
    """Reads the lines of one trace. `rules` are the current rules: a line with `set_rule` changes them."""

    def __init__(self, rules: Rules) -> None:
        self._use_rules(rules)

    def _use_rules(self, rules: Rules) -> None:
        self.rules = rules
        self._max_cost = min((rule.max_cost for rule in rules if rule.max_cost is not None), default=MAX_COST)
        self._max_cost = min(self._max_cost, MAX_COST)

    def line(self, data: Any) -> TraceLine:
        """Return the line that a JSON value describes. Raise ValueError with a sentence that says what to write."""
        if not isinstance(data, dict):
            if isinstance(data, ValueError):
                raise data
            raise ValueError(f'a line is an object such as {{"at": 12.5, "op": "try_acquire"}}, not {_shown(data)}')
        if not data.keys() <= _FIELDS:
            unknown = next(field for field in data if field not in _FIELDS)
            raise ValueError(f"unknown field {unknown!r}: the fields of a line are {', '.join(FIELDS)}")
        get = data.get
        at, name, timeout, key, lease = get("at"), get("op"), get("timeout"), get("key"), get("lease")
        if at is None:
            raise ValueError("at is missing: write the moment in seconds")
        now = micros("at", at)
        if at < 0 or now > HORIZON:
            raise ValueError(f"at must be from 0 to {LATEST}, in seconds, not {_shown(at)}")
        if name is None:
            name = "try_acquire"
        op = OPS.get(name) if isinstance(name, str) else None
        if op is None:
            raise ValueError(f"unknown op {_shown(name)}: use one of {', '.join(OPS)}")
        wait = 0 if timeout is None else min(max(micros("timeout", timeout), 0), HORIZON)
        cost = self._cost(get("cost"))
        key = "" if key is None else _text("key", key)
        lease = "" if lease is None else _text("lease", lease)
        new_rules = None
        if op is Op.CHANGE:
            new_rules = self._new_rules(get("rule"))
        elif get("rule") is not None:
            raise ValueError(f"only a line with set_rule has a rule, not a line with {name}")
        return TraceLine(at, now, op, key, cost, -1 if name == "acquire" else wait, lease, new_rules)

    def _cost(self, value: Any) -> int:
        if value is None:
            return 1
        if type(value) is not int:
            if type(value) is float:
                value = Decimal(repr(value))
            if not isinstance(value, Decimal) or value.is_nan():
                raise ValueError(f"cost must be a whole number of permits, not {_shown(value)}")
            if 0 <= value <= MAX_COST:
                if value % 1:
                    raise ValueError(f"cost must be a whole number of permits, not {_shown(value)}")
                value = int(value)
        if 0 <= value <= self._max_cost:
            return int(value)
        if 0 <= value <= MAX_COST:
            raise ValueError(
                f"cost {value} takes more than 142 years at this rate: write a cost of at most {self._max_cost}"
            )
        raise ValueError(f"cost must be from 0 to {MAX_COST}, not {_shown(value)}")

    def _new_rules(self, data: Any) -> Rules:
        if data is None:
            raise ValueError("set_rule needs a rule")
        new_rules = read_rules(data)
        if len(new_rules) != len(self.rules):
            raise ValueError(
                f"set_rule has {len(new_rules)} rules, but the trace has {len(self.rules)}: write a new rule for each"
                " rule of the trace"
            )
        self._use_rules(new_rules)
        return new_rules


def _text(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{field} must be a string, not {_shown(value)}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{field} contains half of a surrogate pair") from error
    return value


def _shown(value: Any) -> str:
    number = isinstance(value, Decimal | int) and not isinstance(value, bool)
    text = str(value) if number else json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
