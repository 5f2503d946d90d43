"""Find whether a rule applies to a request, under which kind of key it counts the request, and with which numbers."""

from __future__ import annotations

from dataclasses import replace

from ratelimits.algorithms.limits import Algorithm, Mode
from ratelimits.models.fields.rule_fields import IPV4_PREFIX, IPV6_PREFIX
from ratelimits.models.fields.view_key_texts import is_text, source_digest, source_of
from ratelimits.models.keys import COVERS, key_name
from ratelimits.rules.keyed import OverrideRow
from ratelimits.rules.rows import RuleRow
from ratelimits.rules.selection import GLOBAL_KEY, AppliedRule

#: Bits for the kinds of keys that an identity has.
API_KEY, USER, ADDRESS, ACCOUNT, VIEW_KEY = 1, 2, 4, 8, 16
#: Bits for the kinds of keys that an identity has but that cannot be read, by their attribute of Identity.
UNREADABLE = {"user": 32, "api_key": 64, "account": 128}
#: The kinds of keys that stand for a caller, each with its attribute of Identity, in the order in which they are taken.
_CALLER = ((USER, "user"), (API_KEY, "api_key"), (ADDRESS, "address"))


def covers(row: RuleRow, scope: str, method: str) -> bool:
    """Return whether the rule covers a scope and an HTTP method.

    A rule for "*" covers all scopes except its `except_scopes`. A rule without methods covers all methods. GET also
    covers HEAD.
    """
    if row.scope not in ("*", scope) or scope in row.except_scopes:
        return False
    return not row.methods or method in row.methods or (method == "HEAD" and "GET" in row.methods)


def for_head(applied: list[tuple[int, RuleRow, AppliedRule]]) -> list[tuple[int, RuleRow, AppliedRule]]:
    """Return the rules that apply to a HEAD request.

    A rule that names GET, but not HEAD, is left out if an enforced rule of the same scope and meter names HEAD. A rule
    in shadow mode that names HEAD has no such effect, because it must never change a decision.

    Each rule comes with its rank (see `let_one_bill`) and its row.
    """
    with_head = {
        (row.scope, row.meter) for _rank, row, rule in applied if "HEAD" in row.methods and rule.mode is Mode.ENFORCE
    }
    return [
        (rank, row, rule)
        for rank, row, rule in applied
        if not row.methods or "HEAD" in row.methods or (row.scope, row.meter) not in with_head
    ]


def applies_to_caller(row: RuleRow, present: int, groups: frozenset[str]) -> bool:
    """Return whether the rule applies to a caller.

    `present` has a bit for each kind of key that the caller has. `groups` are the groups of its user. An identity that
    has only an account stands for all callers of this account. In the same way, an identity that has only keys from a
    view stands for all callers with these keys.
    """
    if present in (ACCOUNT, VIEW_KEY) or (row.callers == "everyone" and not row.group):
        return True
    if row.group and row.group not in groups:
        return False
    is_authenticated = bool(present & (USER | API_KEY))
    return row.callers == "everyone" or (row.callers == "authenticated") == is_authenticated


def needs_unreadable(row: RuleRow, present: int) -> bool:
    """Return whether the rule needs a key that the identity has but that cannot be read.

    `present` has a bit for each kind of key that the identity has, and for each that cannot be read.
    """
    user, api_key = present & UNREADABLE["user"], present & UNREADABLE["api_key"]
    if row.key_kind in UNREADABLE and present & UNREADABLE[row.key_kind]:
        return True
    if row.key_kind == "caller" and (user or (api_key and not present & USER)):
        return True
    if row.algorithm is not None and row.algorithm.follows_billing and present & UNREADABLE["account"]:
        return True  # The window of the rule is a period of the account.
    if row.group:
        return bool(user)
    # Whoever has one of the two is authenticated, whatever the other one is.
    return row.callers != "everyone" and bool(user or api_key) and not present & (USER | API_KEY)


def counted_kind(row: RuleRow, present: int, sources: tuple[str, ...]) -> str | None:
    """Return the kind of key under which a rule counts an identity (see `AppliedRule.key_kind`).

    Return None if the identity has no such key. `present` has a bit for each kind of key that the identity has.
    `sources` are the digests of the sources of its view keys, in their order.
    """
    if row.key_kind == "view_key":
        # A rule that names no source counts the first key of each view.
        first = sources[0] if sources else ""
        source = source_of(row.view_key).digest if row.view_key else first
        return f"view_key/{source}" if source in sources else None
    kind = _counted_attribute(row.key_kind, present)
    if kind == "address" and (row.ipv4_prefix, row.ipv6_prefix) != (IPV4_PREFIX, IPV6_PREFIX):
        return f"address/{row.ipv4_prefix}/{row.ipv6_prefix}"
    return kind


def _counted_attribute(key_kind: str, present: int) -> str | None:
    """Return the attribute of Identity that contains the counted key, or "global"; None if there is no such key."""
    if key_kind == GLOBAL_KEY:
        return GLOBAL_KEY
    if key_kind == "caller":
        return next((name for bit, name in _CALLER if present & bit), None)
    if key_kind == "account":
        return "account" if present & ACCOUNT else None
    field = "address" if key_kind == "ip" else key_kind
    return next((name for bit, name in _CALLER if name == field and present & bit), None)


def overridden(row: RuleRow, kind: str, overrides: list[OverrideRow]) -> Algorithm:
    """Return the row's algorithm with the numbers of the overrides.

    If several overrides set the same field, such as `capacity`, the value of the first override is used.

    The numbers of an override apply only if no other key shares the rule's counter, because a counter cannot have two
    limits. Raise ValueError if the row or the numbers are not valid.
    """
    numbers: dict[str, object] = {}
    for override in reversed(overrides):
        if belongs_to_key(kind, override):
            numbers |= dict(override.numbers)
    return row.with_numbers(numbers)


def belongs_to_key(kind: str, override: OverrideRow) -> bool:
    """Return whether a counter for this kind of key counts only requests of the override's key.

    `kind` is as in `AppliedRule.key_kind`.
    """
    if is_text(override.key):
        return kind == f"view_key/{source_digest(key_name(override.key))}"
    kind_of_override, _colon, _name = override.key.partition(":")
    return ("ip" if kind == "address" else kind) in COVERS[kind_of_override]


def let_one_bill(applied: list[tuple[int, AppliedRule]]) -> tuple[AppliedRule, ...]:
    """For each pair of a meter and a kind of key, let at most one rule bill.

    `applied` has the rules sorted by name, each with its rank: 2 for a rule of the key's plan, 1 for a rule of the
    account's plan, 0 for a default rule. The rule with the highest rank bills. If there are several, the first of them
    bills.
    """
    billing: dict[tuple[str, str], AppliedRule] = {}
    # The highest rank first. Rules of the same rank keep their order.
    for _rank, rule in sorted(applied, key=lambda rank_and_rule: rank_and_rule[0], reverse=True):
        if rule.bills:
            billing.setdefault((rule.key_kind, rule.meter), rule)
    return tuple(
        replace(rule, bills=False) if rule.bills and billing[rule.key_kind, rule.meter] is not rule else rule
        for _rank, rule in applied
    )
