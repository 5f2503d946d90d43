"""Find the rules that apply to a request.

A snapshot is a copy of the rules at one version, in memory. It finds the rules for each kind of request once, and
caches them as a Selection. Two requests get the same Selection if they have the same scope, the same HTTP method and
the same `Properties`: for example, if their keys are of the same kinds, are on the same plan and have no overrides.

`EditedRule` finds the requests that an edited rule would apply to, before the rule is saved.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

from ratelimits.algorithms.billing_periods import Frozen, PeriodTerms
from ratelimits.models.fields.view_key_texts import source_digest
from ratelimits.models.rules import Rule
from ratelimits.models.versions import KEY_SHARDS
from ratelimits.rules.access import AccessRow
from ratelimits.rules.groups import read as read_groups
from ratelimits.rules.keyed import Billing, Facts, OverrideRow, billing_around
from ratelimits.rules.query_thread import RulesUnavailable
from ratelimits.rules.rows import Rows, RuleRow, rule_row
from ratelimits.rules.selection import (
    ACCOUNT,
    ADDRESS,
    API_KEY,
    GLOBAL_KEY,
    UNREADABLE,
    USER,
    VIEW_KEY,
    AppliedRule,
    Chooser,
    ExplainedRule,
    Properties,
    Selection,
    UnreadableRule,
    belongs_to_key,
    counted_kind,
    covers,
    for_head,
    let_one_bill,
    plain_key,
)

if TYPE_CHECKING:
    from ratelimits.identity import Identity

logger = logging.getLogger(__name__)

#: One lock for all snapshots. If a thread of the parent holds the lock during a fork, the child's copy stays locked. So
#: a forked child makes a new lock.
_lock = threading.Lock()


def _forked() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forked)

#: Maximum number of Selections that a snapshot caches. When this number is reached, the cache is emptied.
MAX_SELECTIONS = 4096
#: Stands in the place of an HTTP method in the cache, for the selections of `Snapshot.select_exact`.
_EXACT = "exact"


_NO_GROUPS: frozenset[str] = frozenset()


class MissingRows(NamedTuple):
    """Rows about keys that were not read yet: all rows of some shards, and the groups of some users."""

    shards: frozenset[int]
    users: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.shards or self.users)


def _keys_of(identity: Identity) -> tuple[tuple[int, str | None], ...]:
    """Return the identity's keys, each with the bit of its kind.

    The account comes last. If several of the other keys are on a plan, the plan of the first one is used. A client can
    invent the value of a view key, so the keys of the caller come before it.
    """
    account = ACCOUNT, identity.account
    keys = (API_KEY, identity.api_key), (USER, identity.user), (ADDRESS, identity.address)
    if not identity.view_keys:
        return (*keys, account)
    return (*keys, *((VIEW_KEY, name) for name in identity.view_keys), account)


def _sources_of(identity: Identity) -> tuple[str, ...]:
    """Return the digests of the sources of the identity's view keys."""
    return tuple(map(source_digest, identity.view_keys)) if identity.view_keys else ()


class Snapshot:
    """The rules at one version. The answers of all methods except `access` never change, and the snapshot caches them.

    Some of these answers are valid only until a certain moment, for example until an override begins or ends. (`access`
    looks at the clock at each call.)

    seen_at     the last moment for which an answer was found, in µs since 1970 UTC
    good_until  the first moment at which an answer is no longer valid. From then on, another snapshot is needed
    clock       returns the present moment, in µs since 1970 UTC
    load        reads missing rows, and returns a snapshot that contains them
    """

    __slots__ = (
        "_access",
        "_billing",
        "_chooser",
        "_clock",
        "_facts",
        "_follow_billing",
        "_groups",
        "_load",
        "_methods",
        "_scopes",
        "_selections",
        "good_until",
        "rows",
        "rule_meters",
        "seen_at",
        "version",
        "versioned",
        "waits",
    )

    def __init__(
        self,
        rows: Rows,
        clock: Callable[[], int],
        load: Callable[[MissingRows], Snapshot],
        *,
        versioned: bool = True,
    ) -> None:
        self.rows = rows
        #: Whether Redis compares this version with its own version.
        self.versioned = versioned
        self.version = rows.version
        self.seen_at = clock()
        # Repeated requests use prepared commands and stored refusals, without a look at blocks and allows. A prepared
        # command or a stored refusal belongs to one snapshot. So a new snapshot is needed when a block or allow comes
        # into force.
        self.good_until = rows.access.next_start(self.seen_at)
        self._clock = clock
        self._access = rows.access or None
        self._load = load
        self._facts: list[Facts | None] = [None] * KEY_SHARDS
        self._selections: dict[tuple[str, str, Properties], Selection] = {}
        self._billing: dict[tuple[str, str | None, Frozen], Billing] = {}
        self._chooser = Chooser(rows, clock, self._seen, self.log_once)
        self._scopes = {scope for row in rows.rules.values() for scope in (row.scope, *row.except_scopes)}
        self._groups = frozenset(row.group for row in rows.rules.values() if row.group)
        self._methods = {method for row in rows.rules.values() for method in row.methods}
        algorithms = [row.algorithm for row in rows.rules.values() if row.algorithm is not None]
        #: Whether a rule counts in the billing periods of accounts. If not, accounts with other terms share Selections.
        self._follow_billing = any(algorithm.follows_billing for algorithm in algorithms)
        #: The meters that rules name, also rules that are off.
        self.rule_meters = frozenset(row.meter for row in rows.rules.values())
        #: Whether a rule can let a request wait.
        self.waits = any(row.max_wait > 0 for row in rows.rules.values())

    def access(self, identity: Identity) -> AccessRow | None:
        """Return the block or allow that decides this identity's requests now; None if the rules decide."""
        return None if self._access is None else self._access.find(identity, self._clock())

    def select(self, scope: str, method: str, identity: Identity) -> Selection:
        """Return the rules that apply to a request of this identity. `method` is the HTTP method.

        If the rows about the identity's keys were read before, this makes no query. If the result is in the cache, this
        needs no lock.
        """
        properties = self._properties_of(identity)
        if properties is None:
            return self.with_rows_of(identity).select(scope, method, identity)
        if scope not in self._scopes:
            scope = "*"
        if method not in self._methods:
            # If no rule names HEAD, use the rules of GET for HEAD, because the same handler answers both.
            method = "GET" if method == "HEAD" and "GET" in self._methods else ""
        cache_key = (scope, method, properties)
        selection = self._selections.get(cache_key)
        if selection is None:
            selection = self._compile(scope, method, properties)
            with _lock:
                if len(self._selections) >= MAX_SELECTIONS:
                    self._selections.clear()
                selection = self._selections.setdefault(cache_key, selection)
        return selection

    def _properties_of(self, identity: Identity) -> Properties | None:
        """Return the properties on which the identity's rules depend; None if rows about its keys are missing."""
        present = sum(UNREADABLE[kind] for kind in identity.unreadable) if identity.unreadable else 0
        key_plan = account_plan = changed_at = counter = 0
        overrides: tuple[OverrideRow, ...] = ()
        facts = self._facts
        for bit, key in _keys_of(identity):
            if key is None:
                continue
            present |= bit
            shard_facts = facts[crc32(key.encode()) % KEY_SHARDS]
            if shard_facts is None:
                return None
            key_facts = shard_facts.get(key)
            if key_facts is None:
                continue
            if bit == ACCOUNT:
                account_plan = key_facts.account.plan if key_facts.account is not None else 0
                counter = key_facts.moved.counter if key_facts.moved is not None else 0
            else:
                key_plan = key_plan or key_facts.plan
            overrides += key_facts.overrides
            changed_at = max(changed_at, key_facts.changed_at)
        groups = _NO_GROUPS
        if self._groups and identity.user is not None:
            groups_of_user = self.rows.groups.get(identity.user)
            if groups_of_user is None:
                return None
            groups = groups_of_user & self._groups
        terms = self.period_terms(identity.account) if self._follow_billing else None
        return present, key_plan, account_plan, changed_at, overrides, groups, _sources_of(identity), terms, counter

    def may_have_rows_about(self, key: str) -> bool:
        """Return whether the database has a row about this key, such as an override; True if the rows were not read.

        Usually `select` has read them.
        """
        facts = self._facts[crc32(key.encode()) % KEY_SHARDS]
        return facts is None or facts.get(key) is not None

    def select_exact(self, scope: str, identity: Identity) -> Selection:
        """Return the rules that name exactly this scope, and no HTTP method. Rules for "*" are left out.

        Use this for outbound calls and for tasks. Rules for "*" are only for requests to the project.
        """
        properties = self._properties_of(identity)
        if properties is None:
            return self.with_rows_of(identity).select_exact(scope, identity)
        cache_key = (scope, _EXACT, properties)
        selection = self._selections.get(cache_key)
        if selection is None:
            selection = self._collect(properties, lambda row: row.scope == scope and not row.methods)
            # Scopes come from the project's code. There are few of them, so the cache needs no maximum here.
            selection = self._selections.setdefault(cache_key, selection)
        return selection

    def applicable(self, scope: str, method: str, identity: Identity) -> tuple[AppliedRule, ...]:
        """Return the rules of `select`, each with the key under which it counts this identity."""
        selection = self.select(scope, method, identity)
        return tuple(
            replace(rule, key=key) for rule, key in zip(selection.rules, selection.keys(identity), strict=True)
        )

    def billing(self, account: str | None) -> Billing:
        """Return the billing periods of an account, such as "account:7". Without an account: calendar months in UTC."""
        timezone, anchor, frozen = PeriodTerms()
        if account is not None:
            shard = crc32(account.encode()) % KEY_SHARDS
            shard_facts = self._facts[shard]
            if shard_facts is None:
                return self._with_rows(frozenset({shard})).billing(account)
            key_facts = shard_facts.get(account)
            if key_facts is not None:
                frozen = key_facts.frozen
                if key_facts.account is not None:
                    timezone, anchor = key_facts.account.timezone, key_facts.account.anchor
        billing = self._billing.get((timezone, anchor, frozen))
        if billing is None:
            now = self._clock()
            billing = billing_around(now, account, timezone, anchor, frozen, self.log_once)
            _previous, _current, next_start, _later = billing.boundaries
            self._seen(now, next_start)
            self._billing[timezone, anchor, frozen] = billing
        return billing

    def period_terms(self, account: str | None) -> PeriodTerms:
        """Return what the billing periods of an account, such as "account:7", depend on. The terms are always valid."""
        timezone, anchor, frozen, _boundaries = self.billing(account)
        return PeriodTerms(timezone, anchor, frozen)

    def used_since(self, account: str) -> int:
        """Return the start (µs since 1970 UTC) of the usage of an account's present customer; 0 for all usage."""
        shard = crc32(account.encode()) % KEY_SHARDS
        shard_facts = self._facts[shard]
        if shard_facts is None:
            return self._with_rows(frozenset({shard})).used_since(account)
        key_facts = shard_facts.get(account)
        return 0 if key_facts is None or key_facts.moved is None else key_facts.moved.since

    def missing(self, identity: Identity) -> MissingRows:
        """Return the rows about this identity that were not read yet."""
        return self._missing(*_shards_and_users([identity]))

    def _missing(self, shards: Collection[int], users: Collection[str]) -> MissingRows:
        groups_read = self.rows.groups
        return MissingRows(
            frozenset(shard for shard in shards if self.rows.shards[shard] is None),
            frozenset(user for user in users if user not in groups_read) if self._groups else frozenset(),
        )

    def with_rows_of(self, *identities: Identity) -> Snapshot:
        """Return this snapshot, or a newer one, with the rows about all keys of the identities."""
        return self._with_rows(*_shards_and_users(identities))

    def _with_rows(self, shards: frozenset[int], users: frozenset[str] = frozenset()) -> Snapshot:
        """Return this snapshot, or a newer one, with the rows about the keys of these shards and users."""
        missing = self._missing(shards, users)
        if missing:
            newer = self._load(missing)
            if newer.rows is not self.rows:
                return newer
        for shard in shards:
            rows = self.rows.shards[shard]
            if self._facts[shard] is None and rows is not None:
                now = self._clock()
                facts = Facts(rows, now)
                self._seen(now, facts.until)
                self._facts[shard] = facts
        return self

    def _seen(self, now: int, until: int) -> None:
        """Note that a value was evaluated at `now` and is valid until `until`."""
        with _lock:
            self.seen_at = max(self.seen_at, now)
            self.good_until = min(self.good_until, until)

    def _compile(self, scope: str, method: str, properties: Properties) -> Selection:
        """Return a new Selection for a scope, a method and these properties of an identity."""
        return self._collect(properties, lambda row: covers(row, scope, method), method)

    def _collect(self, properties: Properties, wanted: Callable[[RuleRow], bool], method: str = "") -> Selection:
        """Return a new Selection of the wanted rules."""
        applied, unreadable = [], []
        for rank, row, rule, _overrides in self._chooser.chosen(properties, wanted):
            if isinstance(rule, AppliedRule):
                applied.append((rank, row, rule))
            elif rule is not None:
                unreadable.append(rule)
        if method == "HEAD":
            applied = for_head(applied)
        rules = let_one_bill([(rank, rule) for rank, _row, rule in applied])
        return Selection(rules, self.version if self.versioned else None, tuple(unreadable))

    def in_any_scope(self, identity: Identity) -> list[ExplainedRule]:
        """Return the rules that apply to some request of this identity, each with the reason why it applies.

        The rules are sorted by name. A rule with the mode `off` is left out if no override gives it a mode. A rule in
        shadow mode is left out if it is not valid. The result is shown to people and is not cached.
        """
        properties = self._properties_of(identity)
        if properties is None:
            return self.with_rows_of(identity).in_any_scope(identity)
        present, *_others, sources, _terms, _counter = properties
        plan_of_rank = ("", "account", "key")  # the ranks 0, 1 and 2 (see `Chooser.chosen`)
        found = []
        for rank, row, rule, overrides in self._chooser.chosen(properties, lambda row: True):
            kind = counted_kind(row, present, sources) or GLOBAL_KEY
            effective = tuple(item for item in overrides if item.mode or (item.numbers and belongs_to_key(kind, item)))
            if rule is not None or any(item.mode == "off" for item in effective):
                found.append(ExplainedRule(row, rule, plan_of_rank[rank], effective))
        return found

    def possible(self, scope: str, method: str, identity: Identity) -> list[AppliedRule | UnreadableRule]:
        """Return every enforced rule, of every plan, that can apply to a request of this identity, without overrides.

        This is for failure policies while the rows about the identity's keys cannot be read. It needs no such rows.
        """
        present = sum(UNREADABLE[kind] for kind in identity.unreadable)
        for bit, key in _keys_of(identity):
            present |= bit if key is not None else 0
        return self._chooser.possible(scope, method, present, _sources_of(identity))

    def log_once(self, message: str) -> None:
        """Log an error about these rows. All snapshots of the same rows together log it only once."""
        if message not in self.rows.logged:
            self.rows.logged.add(message)
            logger.error(message)


def _shards_and_users(identities: Collection[Identity]) -> tuple[frozenset[int], frozenset[str]]:
    """Return the shards of all keys of these identities, and the keys of their users."""
    keys = {key for identity in identities for _bit, key in _keys_of(identity) if key is not None}
    users = {identity.user for identity in identities if identity.user is not None}
    return frozenset(crc32(key.encode()) % KEY_SHARDS for key in keys), frozenset(users)


class EditedRule:
    """A rule with the values that somebody has typed, beside all other rules, plans and overrides in force.

    If its mode is "off", the class treats it as enforced, to show which requests the rule would apply to.
    """

    def __init__(self, current: Snapshot, rule: Rule, identities: Iterable[Identity]) -> None:
        """Put the rule into the current rules. The rows about the keys of all `identities` are read together."""
        identities = list(identities)
        row = rule_row(rule)
        self._pk = row.pk or 0  # 0: it was never saved
        # The version and the moment of the edit are known only after saving. They do not decide to which requests the
        # rule applies, so they can have any value here.
        row = replace(row, pk=self._pk, version=0, edited_at=0, mode="enforce" if row.mode == "off" else row.mode)
        rows = current.with_rows_of(*identities).rows
        groups_of_users = rows.groups
        if row.group:
            users = {identity.user for identity in identities if identity.user is not None}
            groups_of_users = groups_of_users | read_groups(users - groups_of_users.keys())
        rows = replace(rows, rules={**rows.rules, self._pk: row}, groups=groups_of_users)
        self._snapshot = Snapshot(rows, _now, _unread, versioned=False)
        #: The results of `applied`.
        self._cache: dict[tuple[str, str, Identity], tuple[AppliedRule, str] | None] = {}

    def applied(self, scope: str, method: str, identity: Identity) -> tuple[AppliedRule, str] | None:
        """Return the rule as it applies to a request of the identity, and the key under which it counts the request.

        Return None if the rule does not apply to the request.
        """
        request = scope, method, identity
        if request not in self._cache:
            self._cache[request] = self._find(*request)
        return self._cache[request]

    def _find(self, scope: str, method: str, identity: Identity) -> tuple[AppliedRule, str] | None:
        selection = self._snapshot.select(scope, method, identity)
        for rule, key in zip(selection.rules, selection.keys(identity), strict=True):
            if rule.rule == self._pk:
                return rule, plain_key(key)
        return None


def _now() -> int:
    return time.time_ns() // 1000


def _unread(missing: MissingRows) -> Snapshot:
    raise RulesUnavailable("the rows about some keys were not read")
