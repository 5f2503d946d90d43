"""The rules that apply to one kind of request, and the rules that apply but cannot be read."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NamedTuple

from ratelimits.algorithms.limits import Algorithm, Mode

if TYPE_CHECKING:
    from ratelimits.identity import Identity
    from ratelimits.rules.keyed import OverrideRow
    from ratelimits.rules.rows import RuleRow

GLOBAL_KEY = "global"


@dataclass(frozen=True, slots=True)
class AppliedRule:
    """A rule as it applies to a request.

    key       the counted key, such as "user:42"; "" in a Selection, which many keys share
    key_kind  the attribute of Identity that contains the key, or "global"
    max_wait  the longest wait in seconds
    prefetch  for how many requests a process may take permits in advance; 0: it may not
    rule      the id of the rule
    version   the version of the newest edit that affects the rule: of the rule, an override, or a deleted rule
    since     when these parameters came into force, in µs since 1970 UTC
    plan      the slug of the rule's plan; "" for a default rule
    """

    name: str
    key: str
    key_kind: str
    algorithm: Algorithm
    meter: str
    mode: Mode
    bills: bool
    on_failure: str
    max_wait: Decimal
    prefetch: int
    rule: int
    version: int
    since: int
    plan: str


class UnreadableRule(NamedTuple):
    """A rule whose row or override is not valid. Its failure policy decides instead."""

    name: str
    rule: int
    meter: str
    on_failure: str

    @property
    def refuses(self) -> bool:
        """Return whether the failure policy refuses.

        The policy "local" refuses too, since it would need the numbers.
        """
        return self.on_failure != "allow"


class ExplainedRule(NamedTuple):
    """A rule that applies to an identity in some scope, and why.

    row        the rule's row: a default rule, or one of the plan that `on_plan` names
    rule       the rule as it applies; None if an override switched it off
    on_plan    "key" or "account" if the rule is of the plan of a key or of the account; "" for a default rule
    overrides  those in force that change it; of several numbers the first counts
    """

    row: RuleRow
    rule: AppliedRule | UnreadableRule | None
    on_plan: str
    overrides: tuple[OverrideRow, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Selection:
    """The rules that apply to one kind of request. Selections are compared and hashed by object identity."""

    rules: tuple[AppliedRule, ...]
    #: The version of the rules, which Redis compares with its own version; None: it does not compare them.
    version: int | None
    #: Rules that cannot be read, so that their failure policy decides. Shadow rules are left out.
    unreadable: tuple[UnreadableRule, ...] = ()
    #: Cache of objects built from these rules. It lives as long as this Selection.
    cache: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def keys(self, identity: Identity) -> tuple[str, ...]:
        """Return the key under which each rule counts this identity."""
        return tuple(
            GLOBAL_KEY if rule.key_kind == GLOBAL_KEY else getattr(identity, rule.key_kind) for rule in self.rules
        )
