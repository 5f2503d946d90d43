"""Choose the rules that apply to one kind of request, and give them the numbers of overrides.

A rule applies by its scope, by the caller of the request, and by the kind of key that it counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NamedTuple

from ratelimits.algorithms.billing_periods import PeriodTerms
from ratelimits.algorithms.limits import Algorithm, Lasting, Mode
from ratelimits.conf import conf
from ratelimits.models.fields.rule_fields import IPV4_PREFIX, IPV6_PREFIX
from ratelimits.models.fields.view_key_texts import is_text, source_digest, source_of
from ratelimits.models.keys import COUNTED, COVERS, key_name, network_key
from ratelimits.rules.keyed import OverrideRow
from ratelimits.rules.rows import Rows, RuleRow

if TYPE_CHECKING:
    from ratelimits.identity import Identity

GLOBAL_KEY = "global"
#: Bits for the kinds of keys that an identity has.
API_KEY, USER, ADDRESS, ACCOUNT, VIEW_KEY = 1, 2, 4, 8, 16
#: Bits for the kinds of keys that an identity has but that cannot be read, by their attribute of Identity.
UNREADABLE = {"user": 32, "api_key": 64, "account": 128}
#: The kinds of keys that stand for a caller, each with its attribute of Identity, in the order in which they are taken.
_CALLER = ((USER, "user"), (API_KEY, "api_key"), (ADDRESS, "address"))
#: The properties of an identity on which its rules depend. The items are: a bit for each kind of key that it has; the
#: plan of its key; the plan of its account; the moment when a row about one of its keys last changed, or 0 if this was
#: longer ago than RECENT (in keyed.py); the overrides of its keys; the groups of its user that are named by a rule; the
#: digests of the sources of its view keys; the terms of its account's billing periods, or None if no rule follows them;
#: and the number of its account's customer in the names of limits (see `Name.counter`). A plan is given by its id; 0
#: means no plan.
Properties = tuple[
    int, int, int, int, tuple[OverrideRow, ...], frozenset[str], tuple[str, ...], PeriodTerms | None, int
]
_NO_GROUPS: frozenset[str] = frozenset()


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


class Chooser:
    """Chooses the rules of one version that apply to an identity.

    clock     returns the present moment, in µs since 1970 UTC
    seen      is called with the present moment and the next moment at which a rule's numbers change
    log_once  logs an error about the rows, if this error was not logged before
    """

    __slots__ = ("_clock", "_log_once", "_plans", "_rows", "_seen")

    def __init__(
        self, rows: Rows, clock: Callable[[], int], seen: Callable[[int, int], None], log_once: Callable[[str], None]
    ) -> None:
        self._rows = rows
        self._clock = clock
        self._seen = seen
        self._log_once = log_once
        self._plans: dict[int, dict[str, RuleRow]] = {}
        for row in rows.rules.values():
            self._plans.setdefault(row.plan, {})[row.name] = row

    def possible(
        self, scope: str, method: str, present: int, sources: tuple[str, ...]
    ) -> list[AppliedRule | UnreadableRule]:
        """Return every enforced rule, of every plan, that can apply to a request, without overrides.

        `present` has a bit for each kind of key that the request has. `sources` are as in `Properties`.
        """
        found: list[AppliedRule | UnreadableRule] = []
        for row in self._rows.rules.values():
            kind = counted_kind(row, present, sources)
            # The groups of the user are not known here. So assume that the user is in the group of the rule.
            groups = frozenset({row.group}) if present & USER else _NO_GROUPS
            if row.mode != "enforce" or not covers(row, scope, method):
                continue
            if needs_unreadable(row, present):
                found.append(UnreadableRule(row.name, row.pk, row.meter, row.on_failure or conf.FAILURE_POLICY))
                continue
            if not applies_to_caller(row, present, groups):
                continue
            if kind is None and row.key_kind in COUNTED:  # See `chosen`.
                continue
            rule = self._apply(row, kind or GLOBAL_KEY, overrides=[], deletions=[], changed_at=0, terms=None)
            if rule is not None:
                found.append(rule)
        return found

    def chosen(
        self, properties: Properties, wanted: Callable[[RuleRow], bool]
    ) -> Iterator[tuple[int, RuleRow, AppliedRule | UnreadableRule | None, list[OverrideRow]]]:
        """Yield for each wanted rule, sorted by name: its rank, its row, the result of `_apply`, and its overrides.

        Yield only one rule for each name: the rule of the key's plan (rank 2). If there is none, yield the rule of the
        account's plan (rank 1). If there is none either, yield the default rule, which belongs to no plan (rank 0).
        """
        present, key_plan, account_plan, changed_at, overrides, groups, sources, terms, counter = properties
        plans = (0, account_plan, key_plan)  # by rank
        chosen: dict[str, tuple[int, RuleRow]] = {}
        for rank, plan in enumerate(plans):
            if rank == 0 or plan:
                chosen.update({name: (rank, row) for name, row in self._plans.get(plan, {}).items()})
        for name in sorted(chosen):
            rank, row = chosen[name]
            if not wanted(row):
                continue
            of_rule = [override for override in overrides if override.rule == name]
            if needs_unreadable(row, present):
                if _mode(row, of_rule) == "enforce":
                    on_failure = row.on_failure or conf.FAILURE_POLICY
                    yield rank, row, UnreadableRule(row.name, row.pk, row.meter, on_failure), of_rule
                continue
            if not applies_to_caller(row, present, groups):
                continue
            kind = counted_kind(row, present, sources)
            # Do not leave out a rule with an unknown kind of key: it is perhaps meant for this request. Such a rule is
            # not valid, so its failure policy decides.
            if kind is None and row.key_kind in COUNTED:
                continue
            # Look for the last deletion of a rule with this name, in this plan and in plans with a higher rank. Such a
            # deletion can be the reason why this rule applies now, so it counts as an edit of this rule.
            deleted_at = self._rows.deleted_at
            higher_plans = [plan for plan in plans[rank + 1 :] if plan]
            deletions = [deleted_at[plan, name] for plan in (row.plan, *higher_plans) if (plan, name) in deleted_at]
            applied = self._apply(row, kind or GLOBAL_KEY, of_rule, deletions, changed_at, terms)
            if counter and kind == "account" and isinstance(applied, AppliedRule):
                applied = replace(applied, key_kind=f"account/{counter}")
            yield rank, row, applied, of_rule

    def _apply(
        self,
        row: RuleRow,
        kind: str,
        overrides: list[OverrideRow],
        deletions: list[tuple[int, int]],
        changed_at: int,
        terms: PeriodTerms | None,
    ) -> AppliedRule | UnreadableRule | None:
        """Return the rule with the numbers and the mode of its overrides; None if the rule is off.

        If the rule is not valid, return an UnreadableRule, or None if the rule is in shadow mode. `deletions` has a
        version and a moment for each deletion.
        """
        mode = _mode(row, overrides)
        if mode == "off":
            return None
        on_failure = row.on_failure or conf.FAILURE_POLICY
        try:
            algorithm = overridden(row, kind, overrides)
        except ValueError as error:
            if not row.unreadable:
                pks = ", ".join(str(override.pk) for override in overrides)
                self._log_once(
                    f"Overrides {pks} of {row.name} are not valid: {error}. The rule's failure policy decides"
                )
            return None if mode == "shadow" else UnreadableRule(row.name, row.pk, row.meter, on_failure)
        if terms is not None:
            algorithm = algorithm.in_periods_of(terms)
        now = self._clock()
        span = algorithm.valid_span(now)
        if span is not None:
            _start, end = span
            self._seen(now, end)
        versions = [
            row.version,
            *(version for version, _deleted_at in deletions),
            *(item.version for item in overrides),
        ]
        moments = [row.edited_at, changed_at, *(deleted_at for _version, deleted_at in deletions)]
        moments += [max(item.edited_at, item.valid_from) for item in overrides]
        return AppliedRule(
            name=row.name,
            key="",  # The same result is used for many keys.
            key_kind=kind,
            algorithm=algorithm,
            meter=row.meter,
            mode=Mode.SHADOW if mode == "shadow" else Mode.ENFORCE,
            bills=row.bills,
            on_failure=on_failure,
            max_wait=row.max_wait,
            prefetch=row.prefetch,
            refusal_status=row.refusal_status,
            refusal_text=row.refusal_text,
            lasting=row.lasting,
            counts_since=row.counts_since,
            rule=row.pk,
            version=max(versions),
            since=max(moments),
            plan=self._rows.plans.get(row.plan, ""),
        )


def _mode(row: RuleRow, overrides: list[OverrideRow]) -> str:
    """Return the mode of the first override that has one; otherwise the mode of the rule."""
    return next((override.mode for override in overrides if override.mode), row.mode)
