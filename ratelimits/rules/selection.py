"""The rules that apply to one kind of request, and the rules that apply but cannot be read."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NamedTuple

from ratelimits.algorithms.limits import Algorithm, Lasting, Mode
from ratelimits.models.fields.view_key_texts import source_digest
from ratelimits.models.keys import network_key

if TYPE_CHECKING:
    from ratelimits.identity import Identity
    from ratelimits.rules.keyed import OverrideRow
    from ratelimits.rules.rows import RuleRow

GLOBAL_KEY = "global"


def key_of(identity: Identity, kind: str) -> str:
    """Return the key of this kind (see `AppliedRule.key_kind`) of an identity."""
    key = getattr(identity, kind, None)
    return key if key is not None else _other_key(identity, kind)


def plain_key(key: str) -> str:
    """Return the key of an identity for a counted key: "account:7" for "account@12:7", and any other key unchanged."""
    return f"account:{key.partition(':')[2]}" if key.startswith("account@") else key


def _other_key(identity: Identity, kind: str) -> str:
    """Return a view key, the network of the address, or the key of an account whose text has another customer.

    If the identity has no such key, return the kind ("global").
    """
    name, slash, lengths = kind.partition("/")
    if name == "account":
        return f"account@{lengths}:{identity.account_id}"
    if name == "view_key":
        return next((key for key in identity.view_keys if source_digest(key) == lengths), kind)
    if not slash or identity.address is None:
        return kind
    ipv4_prefix, _slash, ipv6_prefix = lengths.partition("/")
    return network_key(identity.address, int(ipv4_prefix), int(ipv6_prefix))


@dataclass(frozen=True, slots=True)
class AppliedRule:
    """A rule as it applies to a request.

    key       the counted key, such as "user:42"; "" in a Selection, because one Selection is used for many keys
    key_kind  the attribute of Identity that contains the key; "global"; "address/24/56" for the network of the address,
              with the length of its IPv4 prefix and of its IPv6 prefix; "view_key/5f2c81aa" for a key that the view
              gives, with the digest of its source; or "account/12" for an account whose text was given to another
              customer, with the number of this customer
    max_wait  the longest time that a request waits for its permits, in seconds
    on_failure  the failure policy: "allow", "deny" or "local"
    prefetch  maximum number of requests for which a process takes permits in advance; 0 for none
    refusal_status, refusal_text  what a refused client receives. If the text is "", the client reads when to try again
    lasting   in which cases a key's count is restored from the ledger (see `Lasting`)
    counts_since  the moment since which the rule exists, in µs since 1970 UTC
    rule      the id of the rule
    version   the version of the newest edit: an edit of the rule or of its overrides, or the deletion of a rule with
              the same name
    since     the moment since which the rule applies in this form, in µs since 1970 UTC
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
    refusal_status: int
    refusal_text: str
    lasting: Lasting
    counts_since: int
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
        """Return whether the failure policy refuses. The policy "local" refuses: without numbers it cannot decide."""
        return self.on_failure != "allow"


class ExplainedRule(NamedTuple):
    """A rule that applies to an identity in some scope, and the reasons why it applies.

    row        the row of the rule
    rule       the rule as it applies; None if an override has switched it off
    plan_of    "key" for a rule of the key's plan, "account" for a rule of the account's plan, "" for a default rule
    overrides  the overrides in force that change the rule. If several set the same field, the first one is used
    """

    row: RuleRow
    rule: AppliedRule | UnreadableRule | None
    plan_of: str
    overrides: tuple[OverrideRow, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Selection:
    """The rules that apply to one kind of request. Selections are compared and hashed by object identity."""

    rules: tuple[AppliedRule, ...]
    #: The version of the rules. Redis compares it with its own version. If it is None, Redis compares nothing.
    version: int | None
    #: Rules that cannot be read. Their failure policies decide instead. Shadow rules are left out.
    unreadable: tuple[UnreadableRule, ...] = ()
    #: Cache of objects built from these rules. It lives as long as this Selection.
    cache: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def keys(self, identity: Identity) -> tuple[str, ...]:
        """Return the key under which each rule counts this identity."""
        return tuple(key_of(identity, rule.key_kind) for rule in self.rules)
