"""Read a document of rules as code, and find what is wrong in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from ratelimits.algorithms import typed_rates
from ratelimits.algorithms.limits import ALGORITHMS, DEFAULT_ALGORITHM, fields_of, with_numbers
from ratelimits.as_code.types import (
    NULLABLE,
    RULE,
    as_json,
    decode_json,
    is_text,
    parts,
    plan_type_problems,
    printable,
    rule_type_problems,
)

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
