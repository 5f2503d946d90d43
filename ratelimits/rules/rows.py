"""Read the rules at one version into frozen rows. At first, read all rows. Later, read only changed rows.

Rules, plans, blocks and allows are read first. Rows about single keys (overrides, memberships, accounts) are divided
into KEY_SHARDS shards. (These are not the shards in Redis.) When a key is used for the first time, all rows of its
shard are read. The other keys of this shard then need no query, even if they have no rows.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from django.db.models import Max

from ratelimits.algorithms.limits import Algorithm, Lasting, algorithm_from_json, fields_of
from ratelimits.models.accounts import Plan, meters_of_plans
from ratelimits.models.fields.rule_fields import IPV4_PREFIX, IPV6_PREFIX
from ratelimits.models.fields.scopes import names_in, split_scope
from ratelimits.models.rules import Rule
from ratelimits.models.versions import KEY_SHARDS, ConfigVersion, Tombstone
from ratelimits.rules import access, groups, keyed
from ratelimits.rules.access import NO_ACCESS, AccessIndex
from ratelimits.rules.keyed import KeyRows

logger = logging.getLogger(__name__)

#: Maximum number of attempts to read all rows without an edit in between.
_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class RuleRow:
    """A rule.

    plan           the id of the rule's plan; 0 for a default rule, which belongs to no plan
    except_scopes  the scopes in which a rule for "*" does not apply
    callers        "everyone", "anonymous" or "authenticated"
    group          the name of the group to whose members the rule applies; "" for no group
    parameters     the algorithm and its numbers, as in a rule file; {} if the row is not valid
    view_key       which key of the view the rule counts, such as "header:X-Tenant"; "" for the first key of each view
    on_failure     the failure policy; "" for the project's FAILURE_POLICY
    lasting        in which cases a key's count is restored from the ledger (see `Lasting`)
    counts_since   the moment since which the rule exists, in µs since 1970 UTC
    edited_at      the moment of the last edit, in µs since 1970 UTC
    algorithm      None if the row is not valid. Then `unreadable` says why
    """

    pk: int
    name: str
    plan: int
    scope: str
    methods: frozenset[str]
    except_scopes: frozenset[str]
    callers: str
    group: str
    key_kind: str
    view_key: str
    ipv4_prefix: int
    ipv6_prefix: int
    meter: str
    parameters: Mapping[str, Any]
    algorithm: Algorithm | None
    mode: str
    bills: bool
    on_failure: str
    max_wait: Decimal
    prefetch: int
    refusal_status: int
    refusal_text: str
    lasting: Lasting
    counts_since: int
    version: int
    edited_at: int
    unreadable: str = ""

    def with_numbers(self, changes: Mapping[str, Any]) -> Algorithm:
        """Return the algorithm with some numbers changed. Raise ValueError if the result is not valid."""
        if self.algorithm is None:
            raise ValueError(self.unreadable)
        if not changes:
            return self.algorithm
        unknown = changes.keys() - fields_of(self.algorithm.id)
        if unknown:
            raise ValueError(f"{self.algorithm.id} has no {' and no '.join(sorted(unknown))}")
        return algorithm_from_json({**self.parameters, **changes})


#: The last deletion of a rule with this plan and this name: {(id of the plan, name): (version, moment)}. The moment is
#: in µs since 1970 UTC.
DeletedAt = Mapping[tuple[int, str], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of the database at `version`.

    rules       rules by id
    plans       slugs of plans by id
    plan_meters  the meters that plans name, such as those with an included quantity or a price
    deleted_at  the last deletions of rules
    access      blocks and allows
    shards      the rows about keys, by shard; None for a shard that was not read yet
    groups      the names of the groups of each user that was read, by key such as "user:42"
    logged      messages that were logged. Each message is logged only once
    """

    version: int
    rules: Mapping[int, RuleRow] = field(default_factory=dict)
    plans: Mapping[int, str] = field(default_factory=dict)
    deleted_at: DeletedAt = field(default_factory=dict)
    access: AccessIndex = NO_ACCESS
    shards: list[KeyRows | None] = field(default_factory=lambda: [None] * KEY_SHARDS)
    groups: groups.Groups = field(default_factory=dict)
    plan_meters: frozenset[str] = frozenset()
    logged: set[str] = field(default_factory=set, compare=False, repr=False)


def rule_row(rule: Rule) -> RuleRow:
    """Return the row of a rule. The rule need not be saved. Log why a row is not valid."""
    unreadable = rule.unreadable()
    if unreadable:
        logger.error(
            "Rule %s (%s) is not valid, so its failure policy decides. The reason: %s", rule.pk, rule, unreadable
        )
    scope, methods = split_scope(rule.scope)
    return RuleRow(
        rule.pk,
        rule.name,
        rule.plan_id or 0,
        scope,
        methods,
        frozenset(names_in(rule.except_scopes)) if scope == "*" else frozenset(),
        rule.callers,
        rule.group,
        rule.key_kind,
        "" if unreadable else rule.canonical_view_key(),
        IPV4_PREFIX if rule.ipv4_prefix is None else rule.ipv4_prefix,
        IPV6_PREFIX if rule.ipv6_prefix is None else rule.ipv6_prefix,
        rule.meter,
        {} if unreadable else rule.parameters(),
        None if unreadable else rule.to_algorithm(),
        rule.mode,
        rule.bills and not unreadable,
        rule.on_failure if rule.on_failure in Rule.OnFailure.values else "",
        Decimal(0) if unreadable else rule.max_wait or Decimal(0),
        rule.prefetch or 0,
        rule.refusal_status,
        rule.refusal_text,
        rule.restored(),
        rule.counts_since,
        rule.version,
        rule.since,
        unreadable,
    )


def read(using: str, current: Rows | None) -> Rows:
    """Return the rows at the version in force. If the current rows have this version, return them.

    If possible, read only changed rows, otherwise all rows. Read the version before and after the rows. If an edit was
    committed in between, read again, at most `_ATTEMPTS` times in all. An edit during the last attempt is found by the
    next call of this function.
    """
    for _attempt in range(_ATTEMPTS):
        version, complete_from = ConfigVersion.read(using)
        if current is not None and current.version == version:
            return current
        # `ratelimits_reload` and the repair of a restored database raise `complete_from`: perhaps rows changed without
        # a new version. So a process whose version is below `complete_from` must read all rows.
        if current is None or not (complete_from <= current.version < version):
            rows = _read_all(using, version)
        else:
            rows = _read_changes(using, current, version)
        version_after, _complete_from = ConfigVersion.read(using)
        if version_after == version:
            break
    return rows


def _read_all(using: str, version: int) -> Rows:
    rules = [rule_row(rule) for rule in Rule.objects.using(using).select_related("plan").order_by("pk")]
    tombstones = Tombstone.objects.using(using).filter(kind="rule").values_list("plan", "rule")
    return Rows(
        version,
        {row.pk: row for row in rules},
        dict(Plan.objects.using(using).values_list("pk", "slug")),
        {
            (plan or 0, name): (version_of_deletion, moment)
            for plan, name, version_of_deletion, moment in tombstones.annotate(Max("version"), Max("since"))
        },
        AccessIndex(access.read(using)),
        plan_meters=meters_of_plans(using),
    )


def _read_changes(using: str, current: Rows, version: int) -> Rows:
    """Return the rows at `version`: the current rows with all edits and deletions after their version."""
    tombstones = list(Tombstone.objects.using(using).filter(version__gt=current.version).order_by("version"))
    rules, plans, deleted_at = dict(current.rules), dict(current.plans), dict(current.deleted_at)
    for tombstone in tombstones:
        if tombstone.kind == "rule":
            rules.pop(tombstone.row, None)
            deleted_at[tombstone.plan or 0, tombstone.rule] = tombstone.version, tombstone.since
        elif tombstone.kind == "plan":
            plans.pop(tombstone.row, None)
    for rule in Rule.objects.using(using).select_related("plan").filter(version__gt=current.version):
        rules[rule.pk] = rule_row(rule)
    plans.update(Plan.objects.using(using).filter(version__gt=current.version).values_list("pk", "slug"))
    loaded = [shard for shard, rows in enumerate(current.shards) if rows is not None]
    shards = list(current.shards)
    if loaded:
        keyed.merge(shards, keyed.read(using, loaded, current.version, tombstones), tombstones)
    deleted = [tombstone.row for tombstone in tombstones if tombstone.kind == "access"]
    index = current.access.changed(access.read(using, above=current.version), deleted)
    return Rows(
        version,
        rules,
        plans,
        deleted_at,
        index,
        shards,
        groups.unchanged(current.groups, tombstones),
        plan_meters=meters_of_plans(using),
    )
