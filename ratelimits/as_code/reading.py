"""Read a document of rules as code, and find what is wrong in it. Types are checked before rows are made."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from decimal import Decimal, InvalidOperation
from typing import Any, NamedTuple

from ratelimits.algorithms import typed_numbers, typed_rates
from ratelimits.algorithms.base import MAX_PERMITS
from ratelimits.algorithms.limits import ALGORITHMS, DEFAULT_ALGORITHM, fields_of, with_numbers
from ratelimits.algorithms.typed_numbers import Mistyped
from ratelimits.models.accounts import PlanInclusion

#: A message shows at most this many characters of a value. A longer value is cut.
_MAX_SHOWN = 60
#: Maximum number of digits of a number. A database would round a number with more digits.
_MAX_DIGITS = 40
#: The largest number that a database can store.
_MAX_STORED = 2**63 - 1
#: The fields of a rule that are not parameters of its algorithm, with their defaults. A field that has its default is
#: not written to the document.
DEFAULTS: dict[str, Any] = {
    "scope": "*",
    "except_scopes": "",
    "callers": "everyone",
    "group": "",
    "key_kind": "caller",
    "view_key": "",
    "ipv4_prefix": None,
    "ipv6_prefix": None,
    "meter": "requests",
    "max_wait": None,
    "mode": "enforce",
    "bills": False,
    "on_failure": "",
    "prefetch": None,
    "refusal_status": 429,
    "refusal_text": "",
    "start_from_ledger": False,
    "lasting": None,
}
#: Maximum number of characters of a typed rate.
_MAX_RATE = 60
_RULE = '{"name": "burst", "algorithm": "token_bucket", "capacity": 10, …}'
_EXAMPLE = '{"plans": {"pro": {"name": "Pro", "includes": {"requests": 10000}}}, "rules": [{"name": …}, …]}'

Document = dict[str, Any]


class FieldType(NamedTuple):
    """The type of a field.

    description  a text for messages
    accepts      returns whether a value has this type
    """

    description: str
    accepts: Callable[[Any], bool]


def is_text(value: Any) -> bool:
    """Return whether the value is a text that a database can store.

    A text in JSON can contain NUL characters and surrogates, which a database cannot store.
    """
    return isinstance(value, str) and "\0" not in value and not any("\ud800" <= char <= "\udfff" for char in value)


def _is_whole(value: Any) -> bool:
    # Numbers below 0 have the right type. The models refuse them, with a message for each field.
    return type(value) is int and -MAX_PERMITS <= value <= MAX_PERMITS


def is_number(value: Any) -> bool:
    """Return whether the value is a number that a limit can have."""
    return _is_whole(value) or (
        type(value) is Decimal
        and value.is_finite()
        and abs(value) <= MAX_PERMITS
        and len(value.as_tuple().digits) <= _MAX_DIGITS
    )


_TEXT = FieldType("a text", is_text)
NAME = FieldType("a text that is not empty", lambda value: is_text(value) and value != "")
_WHOLE_NUMBER = FieldType(f"a whole number from 0 to {MAX_PERMITS}", _is_whole)
#: A plan can include more units than one request can take, for example bytes.
_QUANTITY = FieldType(
    f"a whole number from 0 to {_MAX_STORED}",
    lambda value: type(value) is int and -_MAX_STORED <= value <= _MAX_STORED,
)
_NUMBER = FieldType(f"a number from 0 to {MAX_PERMITS}", is_number)
# A valid text, such as "10/5min", is replaced by numbers before the types are checked. So only numbers are accepted.
_RATE = FieldType(f'a number from 0 to {MAX_PERMITS}, or a text such as "10/5min"', is_number)
_TIME = FieldType(
    f'seconds from 0 to {MAX_PERMITS}, or a text with a unit such as "1 h"',
    lambda value: (is_text(value) and value != "") or is_number(value),
)
_BOOLEAN = FieldType("true or false", lambda value: isinstance(value, bool))
_INITIAL = FieldType('"full", "empty" or a whole number', lambda value: is_text(value) or _is_whole(value))

#: Fields of a rule that are allowed to be null. A null means the same as a missing field.
NULLABLE: dict[str, FieldType] = {
    "plan": NAME,
    "capacity": _WHOLE_NUMBER,
    "rate": _RATE,
    "period": _TIME,
    "initial": _INITIAL,
    "window_start": _TEXT,
    "calendar_unit": _TEXT,
    "timezone": _TEXT,
    "anchor": _TEXT,
    "sub_windows": _WHOLE_NUMBER,
    "delay_after": _WHOLE_NUMBER,
    "max_burst_seconds": _TIME,
    "warm_up": _TIME,
    "cold_factor": _NUMBER,
    "lease_ttl": _TIME,
    "max_wait": _TIME,
    "prefetch": _WHOLE_NUMBER,
    "ipv4_prefix": _WHOLE_NUMBER,
    "ipv6_prefix": _WHOLE_NUMBER,
    "lasting": _BOOLEAN,
}
#: All fields of a rule.
RULE: dict[str, FieldType] = NULLABLE | {
    "name": NAME,
    "algorithm": NAME,
    "weighted": _BOOLEAN,
    "scope": NAME,
    "except_scopes": _TEXT,
    "callers": NAME,
    "group": _TEXT,
    "key_kind": NAME,
    "view_key": _TEXT,
    "meter": NAME,
    "mode": NAME,
    "bills": _BOOLEAN,
    "on_failure": _TEXT,
    "refusal_status": _WHOLE_NUMBER,
    "refusal_text": _TEXT,
    "start_from_ledger": _BOOLEAN,
}


def rule_type_problems(entry: dict[str, Any]) -> Iterator[str]:
    """Yield a sentence for each field of a rule whose value has a wrong type."""
    for field, value in entry.items():
        field_type = RULE.get(field)
        if field_type is not None and not field_type.accepts(value):
            yield f"{field} must be {field_type.description}, not {as_json(value)}"


class EntryPart(NamedTuple):
    """A part of a plan's entry in a document: an object that has a value for each meter.

    model     the table of its rows
    rows      the attribute of a plan with these rows
    example   such an object, for messages
    problems  yields a sentence for each wrong type in the value of a meter
    value_of  returns the value of a row
    columns   returns the columns of a row with a value
    """

    model: Any
    rows: str
    example: str
    problems: Callable[[str, Any], Iterator[str]]
    value_of: Callable[[Any], Any]
    columns: Callable[[Any], dict[str, Any]]


def _quantity_problems(meter: str, quantity: Any) -> Iterator[str]:
    if not _QUANTITY.accepts(quantity):
        yield f"includes of {as_json(meter)} must be {_QUANTITY.description}, not {as_json(quantity)}"


#: The parts of a plan's entry, by the word in the document. A higher floor adds its own.
parts: dict[str, EntryPart] = {
    "includes": EntryPart(
        PlanInclusion,
        "inclusions",
        '{"requests": 10000}',
        _quantity_problems,
        lambda row: row.quantity,
        lambda quantity: {"quantity": quantity},
    )
}


def plan_type_problems(slug: str, plan: dict[str, Any]) -> Iterator[str]:
    """Yield a sentence for each wrong type of a value in a plan."""
    if not NAME.accepts(slug):
        yield f"a plan's slug must be {NAME.description}, not {as_json(slug)}"
    if "name" in plan and not NAME.accepts(plan["name"]):
        yield f"name must be {NAME.description}, not {as_json(plan['name'])}"
    if "currency" in plan and not _TEXT.accepts(plan["currency"]):
        yield f"currency must be {_TEXT.description}, not {as_json(plan['currency'])}"
    for word, part in parts.items():
        for meter, value in plan.get(word, {}).items():
            if not NAME.accepts(meter):
                yield f"a meter must be {NAME.description}, not {as_json(meter)}"
            yield from part.problems(meter, value)


def as_json(value: Any) -> str:
    """Return a value as JSON for a message. A long text is cut."""
    if type(value) is Decimal:
        text = str(value)
    else:
        try:
            text = json.dumps(value, default=str)
        except (ValueError, RecursionError):
            text = f"a {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


def printable(text: str) -> str:
    """Return the text. If it has characters that a terminal or a log cannot show, return it as JSON, with escapes."""
    return text if text.isprintable() else as_json(text)


def _decimal(literal: str) -> Decimal:
    """Return a decimal of a file. Raise Mistyped if a person can have written thousands, such as 1.000."""
    try:
        typed_numbers.decimal(literal)
    except Mistyped as error:
        if error.is_ambiguous:
            raise
    return Decimal(literal)


def decode_json(raw: bytes) -> Any:
    """Return the value of a JSON text in UTF-8, with exact decimals.

    Raise ValueError if the text is not JSON in UTF-8. In most cases the message says which line is wrong.
    """
    try:
        return json.loads(raw.decode("utf-8-sig"), parse_float=_decimal, parse_constant=Decimal)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}: not JSON: {error.msg}") from error
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ValueError(f"line {line}: byte {error.start + 1} of the file is not UTF-8: save it as UTF-8") from error
    except RecursionError as error:
        raise ValueError("the document is nested too deeply: no plan and no rule has so many levels") from error
    except Mistyped:
        raise
    except (InvalidOperation, ValueError) as error:
        raise ValueError(f"a number has too many digits: the largest number is {MAX_PERMITS}") from error


class RefusedError(ValueError):
    """Raised if a document cannot be loaded.

    problems  a sentence for each error
    rest      the plans and rules without errors. It does not contain the rules of a plan with errors. None if `parse`
              could not read the document at all, or if `load` refused it
    """

    def __init__(self, problems: list[str], rest: Document | None = None) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems
        self.rest = rest


def identity(entry: dict[str, Any]) -> tuple[str, str]:
    """Return the plan and the name of a rule. Together they identify the rule."""
    return str(entry.get("plan") or ""), str(entry.get("name"))


def parse(raw: bytes) -> Document:
    """Return the document that the bytes of a file contain.

    Raise RefusedError if the document is not valid. The error lists all problems, each with its place.
    """
    try:
        document = decode_json(raw)
    except ValueError as error:
        raise RefusedError([str(error)]) from error
    if not isinstance(document, dict) or document.keys() - {"plans", "rules"}:
        raise RefusedError([f"write an object such as {_EXAMPLE}"])
    plans, rules = document.get("plans", {}), document.get("rules", [])
    if not isinstance(plans, dict) or not isinstance(rules, list):
        raise RefusedError([f"plans must be an object whose keys are slugs, and rules a list, as in {_EXAMPLE}"])
    problems: list[str] = []
    valid_plans = {}
    for slug, plan in plans.items():
        found = [f"plan “{printable(slug)}”: {problem}" for problem in _plan_problems(slug, plan)]
        problems += found
        if not found:
            valid_plans[slug] = plan
    entries: list[dict[str, Any]] = []
    for number, entry in enumerate(rules, 1):
        completed, found = _completed(entry)
        found += _rule_problems(completed)
        problems += [f"rule {number}: {_name_of(entry)}{problem}" for problem in found]
        if not found:
            entries.append(completed)
    problems += [
        f"rule “{name}” of plan “{plan}” is in the document twice"
        if plan
        else f"rule “{name}” is in the document twice"
        for (plan, name), count in sorted(Counter(map(identity, entries)).items())
        if count > 1
    ]
    if problems:
        invalid_plans = plans.keys() - valid_plans.keys()
        rest = {identity(entry): entry for entry in entries if entry.get("plan") not in invalid_plans}
        raise RefusedError(problems, {"plans": valid_plans, "rules": list(rest.values())})
    return {"plans": plans, "rules": sorted(entries, key=identity)}


def _name_of(entry: Any) -> str:
    """Return the name of a rule as the start of a message; "" if the rule has no name."""
    name: Any = entry.get("name") if isinstance(entry, dict) else None
    return f"“{printable(name)}”: " if is_text(name) else ""


def _plan_problems(slug: str, plan: Any) -> Iterator[str]:
    if not isinstance(plan, dict) or plan.keys() - {"name", "currency", *parts}:
        if isinstance(plan, dict) and "prices" in plan and "prices" not in parts:
            yield "prices need the app that bills: add 'ratelimits.billing' to INSTALLED_APPS"
        yield 'write {"name": "Pro", "includes": {"requests": 10000}}'
        return
    for word, part in parts.items():
        if not isinstance(plan.get(word, {}), dict):
            yield f"{word} must be an object such as {part.example}"
            return
    yield from plan_type_problems(slug, plan)


def _completed(entry: Any) -> tuple[Any, list[str]]:
    """Return the completed entry of a rule, and the problems of its typed rate.

    The completed entry has an algorithm, no nulls that mean the same as a missing field, and numbers in place of a
    typed rate. If the typed rate is not valid, the completed entry has no rate, so that `_rule_problems` does not
    report the rate again. An entry that is not an object is returned unchanged: `_rule_problems` reports it.
    """
    if not isinstance(entry, dict):
        return entry, []
    given = {field: value for field, value in entry.items() if value is not None or field not in NULLABLE}
    completed = {"algorithm": DEFAULT_ALGORITHM, **given}
    rate = completed.get("rate")
    if not isinstance(rate, str) or not rate.isprintable() or len(rate) > _MAX_RATE:
        return completed, []
    try:
        return with_numbers(completed), []
    except ValueError as error:
        del completed["rate"]
        return completed, [str(error)]


def _rule_problems(entry: Any) -> Iterator[str]:
    if not isinstance(entry, dict):
        yield f"write an object such as {_RULE}"
        return
    checked = dict(entry)
    if not is_text(entry.get("name")):
        yield f"the name is missing or not a text: write an object such as {_RULE}"
        checked.pop("name", None)
    algorithm = entry.get("algorithm")
    if isinstance(algorithm, str) and algorithm in ALGORITHMS:
        yield from _unknown_fields(checked, algorithm)
    else:
        yield f"algorithm must be one of {', '.join(ALGORITHMS)}, not {as_json(algorithm)}"
        yield from (f"a rule has no field {printable(field)}" for field in sorted(checked.keys() - RULE.keys()))
        del checked["algorithm"]
        if isinstance(checked.get("rate"), str) and typed_rates.is_rate(checked["rate"]):
            del checked["rate"]  # Without an algorithm, a typed rate was neither checked nor replaced.
    yield from rule_type_problems(checked)


def _unknown_fields(entry: dict[str, Any], algorithm: str) -> Iterator[str]:
    """Yield a sentence for each field that a rule with this algorithm does not have. Remove these fields."""
    allowed = {"name", "plan", "algorithm", *fields_of(algorithm), *DEFAULTS}
    if not ALGORITHMS[algorithm].may_wait:
        allowed.discard("max_wait")
    algorithm_fields = ", ".join(fields_of(algorithm))
    for field in sorted(entry.keys() - allowed):
        yield f"{algorithm} has no field {printable(field)}: the fields of {algorithm} are {algorithm_fields}"
        del entry[field]
