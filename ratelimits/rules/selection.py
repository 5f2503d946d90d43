"""The rules that apply to requests that are alike, and those rules that cannot be read."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NamedTuple

from ratelimits.algorithms.limits import Algorithm, Mode

if TYPE_CHECKING:
    from ratelimits.identity import Identity

GLOBAL_KEY = "global"


@dataclass(frozen=True, slots=True)
class AppliedRule:
    """A rule as it applies to a request.

    key       what is counted, such as "user:42"; "" in a Selection, which is not about one key
    key_kind  the attribute of Identity that the key comes from, or "global"
    max_wait  in seconds
    prefetch  maximum number of requests whose permits a process takes in advance; 0 for none
    version   of the newest row that changed the rule: its own, an override, or a deleted rule that came before it
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
    """A rule whose row or override makes no sense. Its failure policy decides instead."""

    name: str
    rule: int
    meter: str
    on_failure: str

    @property
    def refuses(self) -> bool:
        """Return whether it refuses. With the policy "local" it also refuses, since a local limit needs its numbers."""
        return self.on_failure != "allow"


@dataclass(frozen=True, eq=False, slots=True)
class Selection:
    """The rules of all requests that are alike. Compared and hashed by object identity."""

    rules: tuple[AppliedRule, ...]
    #: The configuration version of the rules, which the script compares with its own; None: it does not compare.
    version: int | None
    #: Rules whose failure policy decides instead. A rule in shadow mode is never among them.
    unreadable: tuple[UnreadableRule, ...] = ()
    #: Cache of objects built from these rules. It lives as long as this Selection.
    cache: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def keys(self, identity: Identity) -> tuple[str, ...]:
        """Return the key under which each rule counts this identity."""
        return tuple(
            GLOBAL_KEY if rule.key_kind == GLOBAL_KEY else getattr(identity, rule.key_kind) for rule in self.rules
        )
