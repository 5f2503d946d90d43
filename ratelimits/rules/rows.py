"""What the database says at one version, as frozen rows; read whole once, and then by what changed.

Rules and plans are few and read at once. What is about single keys (overrides, memberships, accounts) is read by
shards, each whole, so that a key of which nothing is said costs no query either.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from typing import Any

from django.db.models import Max

from ratelimits.engine.calendar import instant
from ratelimits.engine.limits import Algorithm, algorithm_from_json, fields_of
from ratelimits.models.accounts import Account, Plan, PlanMembership
from ratelimits.models.overrides import KeyOverride
from ratelimits.models.rules import Rule, split_scope
from ratelimits.models.versions import KEY_SHARDS, ConfigVersion, Tombstone

logger = logging.getLogger(__name__)

#: A moment that never comes, in µs.
NEVER = 2**62
_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class RuleRow:
    """A rule; `plan` 0 is the default."""

    pk: int
    name: str
    plan: int
    scope: str
    methods: frozenset[str]
    key_kind: str
    meter: str
    parameters: Mapping[str, Any]
    algorithm: Algorithm
    mode: str
    bills: bool
    on_failure: str
    max_wait: Decimal
    version: int
    since: int

    def with_numbers(self, changes: Mapping[str, Any]) -> Algorithm:
        """The algorithm under other numbers; ValueError says why it makes no sense."""
        foreign = changes.keys() - fields_of(self.algorithm.id)
        if foreign:
            raise ValueError(f"{self.algorithm.id} has no {' and no '.join(sorted(foreign))}")
        return algorithm_from_json({**self.parameters, **changes})


@dataclass(frozen=True, slots=True)
class OverrideRow:
    """An override of one key; moments in µs since 1970 UTC."""

    pk: int
    key: str
    rule: str
    numbers: tuple[tuple[str, Any], ...]
    mode: str
    valid_from: int
    valid_until: int
    version: int
    since: int


@dataclass(frozen=True, slots=True)
class MembershipRow:
    """A key's plan."""

    pk: int
    key: str
    plan: int
    valid_from: int
    valid_until: int
    since: int


@dataclass(frozen=True, slots=True)
class AccountRow:
    """An account; `plan` 0 is none."""

    pk: int
    key: str
    plan: int
    timezone: str
    anchor: str | None
    since: int


@dataclass(frozen=True, slots=True)
class KeyRows:
    """What the database says of the keys of one shard; `scars`: when something about a key last went away."""

    overrides: Mapping[int, OverrideRow] = field(default_factory=dict)
    memberships: Mapping[int, MembershipRow] = field(default_factory=dict)
    accounts: Mapping[int, AccountRow] = field(default_factory=dict)
    scars: Mapping[str, int] = field(default_factory=dict)


Scars = Mapping[tuple[int, str], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Rows:
    """What the database says at `version`.

    `scars`: for (plan, rule name), the version and moment at which such a rule last went away. `shards` is filled
    by the loader as keys are met: None is not read yet.
    """

    version: int
    rules: Mapping[int, RuleRow] = field(default_factory=dict)
    plans: Mapping[int, str] = field(default_factory=dict)
    scars: Scars = field(default_factory=dict)
    shards: list[KeyRows | None] = field(default_factory=lambda: [None] * KEY_SHARDS)


def _micros(moment: datetime | None, otherwise: int) -> int:
    return otherwise if moment is None else instant(moment)


def _rule(rule: Rule) -> RuleRow | None:
    try:
        parameters, algorithm = rule.parameters(), rule.to_algorithm()
    except ValueError as error:
        logger.error("Rule %s (%s) makes no sense and is not in force: %s", rule.pk, rule, error)
        return None
    scope, methods = split_scope(rule.scope)
    return RuleRow(
        rule.pk,
        rule.name,
        rule.plan_id or 0,
        scope,
        methods,
        rule.key_kind,
        rule.meter,
        parameters,
        algorithm,
        rule.mode,
        rule.bills,
        rule.on_failure,
        rule.max_wait or Decimal(0),
        rule.version,
        rule.since,
    )


def _override(row: KeyOverride) -> OverrideRow:
    return OverrideRow(
        row.pk,
        row.key,
        row.rule,
        tuple(row.changes().items()),
        row.mode,
        _micros(row.valid_from, 0),
        _micros(row.valid_until, NEVER),
        row.version,
        row.since,
    )


def _membership(row: PlanMembership) -> MembershipRow:
    since, until = _micros(row.valid_from, 0), _micros(row.valid_until, NEVER)
    return MembershipRow(row.pk, row.key, row.plan_id, since, until, row.since)


def _account(row: Account) -> AccountRow:
    return AccountRow(row.pk, row.key, row.plan_id or 0, row.timezone, row.billing_anchor or None, row.since)


def read(using: str, held: Rows | None) -> Rows:
    """The rows at the version in force: those held, those held and what changed since, or all of them.

    The version is read before the rows, and once more behind them: what an editor committed in between is read again.
    """
    for _attempt in range(_ATTEMPTS):
        version, complete = ConfigVersion.read(using)
        if held is not None and held.version == version:
            return held
        if held is None or not complete <= held.version < version:
            rows = _read_all(using, version)
        else:
            rows = _read_changes(using, held, version)
        if ConfigVersion.read(using)[0] == version:
            break
    return rows


def _read_all(using: str, version: int) -> Rows:
    rules = [row for rule in Rule.objects.using(using).order_by("pk") if (row := _rule(rule)) is not None]
    graves = Tombstone.objects.using(using).filter(kind="rule").values_list("plan", "rule")
    return Rows(
        version,
        {row.pk: row for row in rules},
        dict(Plan.objects.using(using).values_list("pk", "slug")),
        {(p or 0, name): (v, since) for p, name, v, since in graves.annotate(Max("version"), Max("since"))},
    )


def _read_changes(using: str, held: Rows, version: int) -> Rows:
    graves = list(Tombstone.objects.using(using).filter(version__gt=held.version).order_by("version"))
    rules, plans, scars = dict(held.rules), dict(held.plans), dict(held.scars)
    for grave in graves:
        if grave.kind == "rule":
            rules.pop(grave.row, None)
            scars[grave.plan or 0, grave.rule] = grave.version, grave.since
        elif grave.kind == "plan":
            plans.pop(grave.row, None)
    for rule in Rule.objects.using(using).filter(version__gt=held.version):
        rules.pop(rule.pk, None)
        row = _rule(rule)
        if row is not None:
            rules[row.pk] = row
    plans.update(Plan.objects.using(using).filter(version__gt=held.version).values_list("pk", "slug"))
    loaded = [shard for shard, rows in enumerate(held.shards) if rows is not None]
    shards = list(held.shards)
    if loaded:
        _merge(shards, read_shards(using, loaded, above=held.version), graves)
    return Rows(version, rules, plans, scars, shards)


def _merge(shards: list[KeyRows | None], changes: Mapping[int, KeyRows], graves: Collection[Tombstone]) -> None:
    """Put what changed into the shards that are held: first what went away, then what is there."""
    by_shard: dict[int, list[Tombstone]] = {}
    for grave in graves:
        if grave.shard is not None:
            by_shard.setdefault(grave.shard, []).append(grave)
    for shard, rows in enumerate(shards):
        new, gone = changes.get(shard), by_shard.get(shard)
        if rows is None or (new is None and gone is None):
            continue
        new = new or KeyRows()
        overrides, memberships = dict(rows.overrides), dict(rows.memberships)
        accounts, scars = dict(rows.accounts), dict(rows.scars)
        tables: dict[str, dict[int, Any]] = {
            "keyoverride": overrides,
            "planmembership": memberships,
            "account": accounts,
        }
        for grave in gone or ():
            tables[grave.kind].pop(grave.row, None)
            scars[grave.key] = grave.since
        overrides.update(new.overrides)
        memberships.update(new.memberships)
        accounts.update(new.accounts)
        shards[shard] = KeyRows(overrides, memberships, accounts, scars)


def read_shards(using: str, shards: Collection[int], above: int | None = None) -> dict[int, KeyRows]:
    """What is said of the keys of these shards; with `above`, only what changed after that version."""
    wanted: dict[str, Any] = {"shard__in": shards} | ({} if above is None else {"version__gt": above})
    found: dict[int, KeyRows] = {shard: KeyRows({}, {}, {}, {}) for shard in shards} if above is None else {}

    def of(shard: int) -> Any:
        return found.setdefault(shard, KeyRows({}, {}, {}, {}))

    for override in KeyOverride.objects.using(using).filter(**wanted).order_by():
        of(override.shard).overrides[override.pk] = _override(override)
    for membership in PlanMembership.objects.using(using).filter(**wanted).order_by():
        of(membership.shard).memberships[membership.pk] = _membership(membership)
    for account in Account.objects.using(using).filter(**wanted).order_by():
        of(account.shard).accounts[account.pk] = _account(account)
    if above is None:
        graves = Tombstone.objects.using(using).filter(kind__in=("keyoverride", "planmembership", "account"))
        for shard, key, since in graves.filter(shard__in=shards).values_list("shard", "key").annotate(Max("since")):
            of(shard).scars[key] = since
    return found
