"""Read rules and the lines of a trace (recorded requests). Each mistake gets a sentence that says what is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from decimal import ROUND_HALF_UP, Decimal, InvalidOperation
from itertools import islice
from typing import Any, NamedTuple

from ratelimits.algorithms.limits import Algorithm, algorithm_from_json
from ratelimits.algorithms.parsing import HORIZON, MICROSECONDS
from ratelimits.engine.call import Op
from ratelimits.engine.program import MAX_LIMITS

#: Maximum cost of one line.
MAX_COST = 2**40
LATEST = HORIZON // MICROSECONDS
FIELDS = ("at", "op", "key", "cost", "timeout", "lease", "rule")
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
_MICRO = Decimal("0.000001")
#: Number of lines that are decoded together, if possible.
_LOT = 500


class BadLine(ValueError):
    """A mistake in a line of a trace. `number` counts from 1; 0 is the rule."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number


class TraceLine(NamedTuple):
    """One line of a trace.

    `at` is the number as it was written. `now` and `timeout` are in µs; a `timeout` of -1 accepts any wait. `rules` are
    the new rules of a line with the op `set_rule`, otherwise None.
    """

    at: int | Decimal
    now: int
    op: Op
    key: str
    cost: int
    timeout: int
    lease: str
    rules: Rules | None = None


def _far(text: str) -> Decimal:
    """Replace a number whose exponent is too large for a Decimal by infinity, so that it is refused as out of range."""
    try:
        return Decimal(text)
    except InvalidOperation:
        return Decimal("-Infinity" if text.startswith("-") else "Infinity")


def _long(text: str) -> int | Decimal:
    try:
        return int(text)
    except ValueError:
        return Decimal(text)


# NaN and Infinity are not JSON. Accept them here, so that the message is about the line's field.
_JSON = json.JSONDecoder(parse_float=Decimal, parse_constant=Decimal)
_LENIENT = json.JSONDecoder(parse_float=_far, parse_int=_long, parse_constant=Decimal)


def decoded(text: bytes) -> Any:
    """Return the JSON value of a text in UTF-8, with exact decimals. Raise ValueError that says where it is wrong."""
    try:
        read = text.decode()
        try:
            return _JSON.decode(read)
        except json.JSONDecodeError:
            raise
        except (InvalidOperation, ValueError):
            return _LENIENT.decode(read)
    except json.JSONDecodeError as error:
        raise ValueError(f"this is not JSON: {error.msg} at character {error.pos + 1}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"this is not UTF-8: byte {error.start + 1}") from error
    except RecursionError as error:
        raise ValueError("this is nested too deeply") from error


def objects(texts: Iterable[bytes]) -> Iterator[tuple[int, Any]]:
    """Yield the number (from 1) and the value of each line that is not blank.

    For a line that is not JSON, the value is a ValueError.
    """
    numbered = ((number, text) for number, text in enumerate(texts, 1) if text.strip())
    while lot := list(islice(numbered, _LOT)):
        together = _together([text for _, text in lot])
        if together is not None:
            yield from zip((number for number, _ in lot), together, strict=True)
            continue
        for number, text in lot:
            try:
                data = decoded(text)
            except ValueError as error:
                data = error
            yield number, data


def _together(texts: list[bytes]) -> list[Any] | None:
    """Decode lines together as one JSON list, which is faster. Return None if they must be decoded one by one.

    If the lines contain no list, each item is exactly one line: a string cannot contain a line break, and an item
    cannot begin within an object.
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
    """Return the algorithms of one rule, or of a list of rules that are decided together. Raise ValueError."""
    rules = data if isinstance(data, list) else [data]
    if not rules:
        raise ValueError("a list of rules needs at least one rule")
    if len(rules) > MAX_LIMITS:
        raise ValueError(f"at most {MAX_LIMITS} rules are decided together, not {len(rules)}")
    return tuple(algorithm_from_json(rule) for rule in rules)


def micros(name: str, value: Any) -> int:
    """Return seconds as µs, rounded half up.

    A number beyond HORIZON becomes a number that is refused as out of range.
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
            # Round only once, whatever the number of digits.
            return int(value.quantize(_MICRO, ROUND_HALF_UP).scaleb(6))
    return 2 * HORIZON if value > 0 else -2 * HORIZON


class Reader:
    """Reads the lines of one trace. `rules` are the rules in force, which a line with `set_rule` changes."""

    def __init__(self, rules: Rules) -> None:
        self._bring(rules)

    def _bring(self, rules: Rules) -> None:
        self.rules = rules
        self._most = min((rule.max_cost for rule in rules if rule.max_cost is not None), default=MAX_COST)
        self._most = min(self._most, MAX_COST)

    def line(self, data: Any) -> TraceLine:
        """Return one line. Raise ValueError with a sentence that says what to write instead."""
        if not isinstance(data, dict):
            if isinstance(data, ValueError):
                raise data
            raise ValueError(f'a line is an object such as {{"at": 12.5, "op": "try_acquire"}}, not {_shown(data)}')
        if not data.keys() <= _FIELDS:
            unknown = next(field for field in data if field not in _FIELDS)
            raise ValueError(f"unknown field {unknown!r}: a line takes {', '.join(FIELDS)}")
        get = data.get
        at, name, timeout, key, lease, new = get("at"), get("op"), get("timeout"), get("key"), get("lease"), None
        if at is None:
            raise ValueError("at is missing: the moment in seconds")
        now = micros("at", at)
        if at < 0 or now > HORIZON:
            raise ValueError(f"at must be from 0 to {LATEST}, in seconds, not {_shown(at)}")
        op = Op.TRY if name is None else OPS.get(name) if isinstance(name, str) else None
        if op is None:
            raise ValueError(f"unknown op {_shown(name)}: use one of {', '.join(OPS)}")
        wait = 0 if timeout is None else min(max(micros("timeout", timeout), 0), HORIZON)
        cost = self._cost(get("cost"))
        key = "" if key is None else _text("key", key)
        lease = "" if lease is None else _text("lease", lease)
        if op is Op.CHANGE:
            new = self._changed(get("rule"))
        elif get("rule") is not None:
            raise ValueError(f"a rule belongs to set_rule, not to {name or 'try_acquire'}")
        return TraceLine(at, now, op, key, cost, -1 if name == "acquire" else wait, lease, new)

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
        if 0 <= value <= self._most:
            return int(value)
        if 0 <= value <= MAX_COST:
            raise ValueError(f"cost {value} takes more than 142 years at this rate: at most {self._most} does not")
        raise ValueError(f"cost must be from 0 to {MAX_COST}, not {_shown(value)}")

    def _changed(self, data: Any) -> Rules:
        if data is None:
            raise ValueError("set_rule needs a rule")
        new = read_rules(data)
        if len(new) != len(self.rules):
            raise ValueError(f"set_rule brings {len(new)} rules in the place of {len(self.rules)}: write one for each")
        self._bring(new)
        return new


def _text(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{field} must be a string, not {_shown(value)}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{field} holds half a character") from error
    return value


def _shown(value: Any) -> str:
    number = isinstance(value, Decimal | int) and not isinstance(value, bool)
    text = str(value) if number else json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
