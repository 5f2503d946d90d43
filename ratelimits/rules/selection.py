"""What applies to requests that are alike: the rules, ready to be asked, and those that cannot be read."""

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

    `key` is what is counted, such as "user:42" ("" in a Selection, which is not about one key), and `key_kind` the
    field of Identity that it comes from, or "global". `version` is that of the newest row that shaped the rule (its
    own, an override, a rule that went away above it), `since` when these parameters came into force, in µs since
    1970 UTC. `max_wait` is in seconds, `prefetch` the most requests whose permits are taken ahead (0: none); `plan` is
    the slug of the rule's plan, "" for a default rule.
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
    """A rule whose row, or whose override, makes no sense: its own failure policy stands in for its decision."""

    name: str
    rule: int
    meter: str
    on_failure: str

    @property
    def refuses(self) -> bool:
        """Whether it refuses. A local limit has no numbers to go by either, so it refuses too."""
        return self.on_failure != "allow"


@dataclass(frozen=True, eq=False, slots=True)
class Selection:
    """The rules of all requests that are alike; compared and hashed by identity."""

    rules: tuple[AppliedRule, ...]
    #: The configuration version that they are of, which a decision hands to the script; None: it is not compared.
    version: int | None
    #: Those in whose place their failure policy decides; never one in the shadow.
    unreadable: tuple[UnreadableRule, ...] = ()
    #: What is made of them once, and kept for as long as they are.
    cache: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def keys(self, identity: Identity) -> tuple[str, ...]:
        """What each rule counts this identity under."""
        return tuple(
            GLOBAL_KEY if rule.key_kind == GLOBAL_KEY else getattr(identity, rule.key_kind) for rule in self.rules
        )
