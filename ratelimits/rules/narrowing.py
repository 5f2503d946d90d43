"""Which rules cover a request, by which key they count it, with which numbers, and which of them bills."""

from __future__ import annotations

from dataclasses import replace

from ratelimits.algorithms.limits import Algorithm, Mode
from ratelimits.models.keys import COVERS
from ratelimits.rules.keyed import OverrideRow
from ratelimits.rules.rows import RuleRow
from ratelimits.rules.selection import GLOBAL_KEY, AppliedRule

#: Bits for the kinds of keys that an identity has.
API_KEY, USER, ADDRESS, ACCOUNT = 1, 2, 4, 8
_NARROWEST = ((API_KEY, "api_key"), (USER, "user"), (ADDRESS, "address"))


def covers(row: RuleRow, method: str) -> bool:
    """Return whether the rule covers this HTTP method: it names the method, or no method. GET covers HEAD too."""
    return not row.methods or method in row.methods or (method == "HEAD" and "GET" in row.methods)


def for_head(applied: list[tuple[int, RuleRow, AppliedRule]]) -> list[tuple[int, RuleRow, AppliedRule]]:
    """Leave out rules that name GET but not HEAD if another rule of the same scope and meter names HEAD.

    A shadow rule that names HEAD does not replace another rule, since a shadow rule must never change a decision.
    """
    named = {
        (row.scope, row.meter) for _rank, row, rule in applied if "HEAD" in row.methods and rule.mode is Mode.ENFORCE
    }
    return [
        one
        for one in applied
        if not one[1].methods or "HEAD" in one[1].methods or (one[1].scope, one[1].meter) not in named
    ]


def counted_kind(key_kind: str, present: int) -> str | None:
    """Return the attribute of Identity that a rule counts; None if the identity does not have it."""
    if key_kind == GLOBAL_KEY:
        return GLOBAL_KEY
    if key_kind == "key":
        return next((name for bit, name in _NARROWEST if present & bit), None)
    if key_kind == "account":
        return "account" if present & ACCOUNT else None
    field = "address" if key_kind == "ip" else key_kind
    return next((name for bit, name in _NARROWEST if name == field and present & bit), None)


def overridden(row: RuleRow, kind: str, overrides: list[OverrideRow]) -> Algorithm:
    """Return the row's algorithm with the numbers of the overrides. The first override that has a number is used.

    The numbers of an override apply only if the rule counts the override's key alone: a counter that several keys share
    cannot have two limits. Raise ValueError if the row or the numbers are not valid.
    """
    numbers: dict[str, object] = {}
    for override in reversed(overrides):
        if is_alone(kind, override):
            numbers |= dict(override.numbers)
    return row.with_numbers(numbers)


def is_alone(kind: str, override: OverrideRow) -> bool:
    """Return whether counters of this kind (an attribute of Identity) belong to the override's key alone."""
    return ("ip" if kind == "address" else kind) in COVERS[override.key.partition(":")[0]]


def one_bill(applied: list[tuple[int, AppliedRule]]) -> tuple[AppliedRule, ...]:
    """Let at most one rule bill for each kind of key and meter.

    It is the rule of the key's plan, then of the account's plan, then a default rule; of several, the first by name.
    """
    bills: dict[tuple[str, str], AppliedRule] = {}
    for _rank, rule in sorted(applied, key=lambda one: -one[0]):
        if rule.bills:
            bills.setdefault((rule.key_kind, rule.meter), rule)
    return tuple(
        replace(rule, bills=False) if rule.bills and bills[rule.key_kind, rule.meter] is not rule else rule
        for _rank, rule in applied
    )
