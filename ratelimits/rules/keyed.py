"""The rows about single keys (overrides, plan memberships and accounts), and what they say at a moment.

The keys are divided into KEY_SHARDS shards. (These are not the shards in which Redis counts usage.) When a key is used
for the first time, the rows about all keys of its shard are read together. They stay in memory. To save memory, equal
values are stored only once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from typing import Any, NamedTuple, TypeVar

from django.db.models import Max, Q

from ratelimits.algorithms.base import MICROSECONDS
from ratelimits.algorithms.billing_periods import Frozen, periods_around
from ratelimits.algorithms.calendar import instant
from ratelimits.engine.clock import clock
from ratelimits.models.accounts import Account, PlanMembership
from ratelimits.models.customers import Name
from ratelimits.models.keys import key_name
from ratelimits.models.overrides import KeyOverride
from ratelimits.models.periods import last_frozen
from ratelimits.models.versions import Tombstone

#: A moment so late that it never comes, in µs.
NEVER = 2**62
#: Number of rows that are fetched from the database at once.
_CHUNK = 2000
#: After a change of a key's plan or overrides, the stored states of its limits are converted to the new parameters. For
#: this, the limits need the moment of the change. But keys share a Selection only if they have the same moment. So a
#: moment that is older than RECENT µs is left out.
RECENT = 3_600_000_000


class OverrideRow(NamedTuple):
    """An override of one key. It was last edited at `edited_at`. Moments are in µs since 1970 UTC.

    `key` is the key as people write it, such as "user:42" or "header:X-Tenant=acme".
    `numbers` has the names and the values of the numbers that replace the rule's numbers. `mode` is "" if the
    override does not change the mode. Without a start `valid_from` is 0, and without an end `valid_until` is NEVER.
    """

    pk: int
    key: str
    rule: str
    numbers: tuple[tuple[str, Any], ...]
    mode: str
    valid_from: int
    valid_until: int
    version: int
    edited_at: int


class MembershipRow(NamedTuple):
    """The plan that a key is on from `valid_from` until `valid_until`. The row was last edited at `edited_at`.

    These moments are in µs since 1970 UTC. Without a start `valid_from` is 0. Without an end `valid_until` is NEVER.
    """

    pk: int
    plan: int
    valid_from: int
    valid_until: int
    version: int
    edited_at: int


class AccountRow(NamedTuple):
    """An account. `plan` is the id of the account's plan; 0 if the account has no plan.

    `anchor` is a local date and time at which a billing period starts, such as "2026-01-31T06:00"; None for calendar
    months. `edited_at` is the moment of the last edit of the account, in µs since 1970 UTC.
    """

    pk: int
    plan: int
    timezone: str
    anchor: str | None
    version: int
    edited_at: int


class MovedAccount(NamedTuple):
    """The present name of a text that was given to another customer.

    counter  the number in the names of its limits in Redis (see `Name.counter`)
    since    the start of its customer's usage, in µs since 1970 UTC
    """

    counter: int
    since: int


Row = TypeVar("Row", bound=OverrideRow | MembershipRow | AccountRow)
_T = TypeVar("_T", bound=Hashable)


@dataclass(frozen=True, slots=True)
class KeyRows:
    """The rows about the keys of one shard, by the key's name (see `key_name`). The newest row of a key is the first.

    deleted_at  the moment at which a row about the key was last deleted, in µs since 1970 UTC
    frozen      for accounts, the periods `frozen` of PeriodTerms
    edges       the moments at which the validity of a row begins or ends, in order
    moved       the present name of each account whose text was given to another customer
    """

    overrides: Mapping[str, tuple[OverrideRow, ...]] = field(default_factory=dict)
    memberships: Mapping[str, tuple[MembershipRow, ...]] = field(default_factory=dict)
    accounts: Mapping[str, tuple[AccountRow, ...]] = field(default_factory=dict)
    deleted_at: Mapping[str, int] = field(default_factory=dict)
    frozen: Mapping[str, Frozen] = field(default_factory=dict)
    edges: tuple[int, ...] = ()
    moved: Mapping[str, MovedAccount] = field(default_factory=dict)


def read(
    using: str, shards: Collection[int], above: int | None = None, tombstones: Iterable[Tombstone] = ()
) -> dict[int, KeyRows]:
    """Return the rows about the keys of these shards, by shard.

    With `above`, return only rows with a newer version. `tombstones` are those of newer versions.
    """
    wanted: dict[str, Any] = {"shard__in": shards} | ({} if above is None else {"version__gt": above})
    stored: dict[Any, Any] = {}

    def once(value: _T) -> _T:
        """Return the first value that is equal to this one, so that equal values are stored only once."""
        first: _T = stored.setdefault(value, value)
        return first

    # The model's field `since` is `edited_at` here.
    last_columns = "valid_from", "valid_until", "version", "since"
    overrides: dict[int, dict[str, tuple[OverrideRow, ...]]] = {}
    columns = "shard", "key", "pk", "rule", *KeyOverride.NUMBERS, "mode", *last_columns
    rows = KeyOverride.objects.using(using).filter(**wanted).order_by("version", "pk").values_list(*columns)
    numbers = cache(_numbers)
    for shard, key, pk, rule, capacity, rate, period, mode, begins, ends, version, edited_at in rows.iterator(_CHUNK):
        override = OverrideRow(
            pk, key, once(rule), numbers(capacity, rate, period), once(mode),
            _micros(begins, 0), _micros(ends, NEVER), once(version), once(edited_at),
        )  # fmt: skip
        _put(overrides, shard, key_name(key), override)
    memberships: dict[int, dict[str, tuple[MembershipRow, ...]]] = {}
    plan_memberships = PlanMembership.objects.using(using).filter(**wanted).order_by("version", "pk")
    for shard, key, pk, plan, begins, ends, version, edited_at in plan_memberships.values_list(
        "shard", "key", "pk", "plan", *last_columns
    ).iterator(_CHUNK):
        membership = MembershipRow(
            pk, once(plan), _micros(begins, 0), _micros(ends, NEVER), once(version), once(edited_at)
        )
        _put(memberships, shard, key_name(key), membership)
    accounts: dict[int, dict[str, tuple[AccountRow, ...]]] = {}
    payers = Account.objects.using(using).filter(**wanted).order_by("version", "pk")
    for shard, identifier, pk, plan, timezone, anchor, version, edited_at in payers.values_list(
        "shard", "identifier", "pk", "plan", "timezone", "billing_anchor", "version", "since"
    ).iterator(_CHUNK):
        account = AccountRow(pk, once(plan or 0), once(timezone), once(anchor or None), once(version), once(edited_at))
        _put(accounts, shard, f"account:{identifier}", account)
    deleted_at: dict[int, dict[str, int]] = {}
    if above is None:  # With `above`, `merge` gets the tombstones from its caller.
        kinds = Tombstone.objects.using(using).filter(kind__in=("keyoverride", "planmembership", "account"))
        deletions = kinds.filter(shard__in=shards).values_list("shard", "key").annotate(Max("since"))
        for shard, key, moment in deletions:
            deleted_at.setdefault(shard, {})[key_name(key)] = moment
    moved: dict[int, dict[str, MovedAccount]] = {}
    if above is None:  # With `above`, `merge` forgets a shard in which a name has changed.
        moved = _read_names(using, shards, accounts)
    terms = {key: (rows[0].timezone, rows[0].anchor) for by_key in accounts.values() for key, rows in by_key.items()}
    # With `above`, read the frozen periods of the accounts whose terms have perhaps changed.
    changed = None if above is None else terms.keys() | {mark.key for mark in tombstones if mark.kind == "account"}
    frozen: dict[int, dict[str, Frozen]] = {}
    for shard, key, span in last_frozen(using, shards, changed, terms, clock.now()):
        frozen.setdefault(shard, {})[key] = once(span)
    all_rows = overrides, memberships, accounts, deleted_at, frozen, moved
    shards_read = set(shards) if above is None else {shard for by_shard in all_rows for shard in by_shard}
    return {
        shard: _rows(
            overrides.get(shard, {}),
            memberships.get(shard, {}),
            accounts.get(shard, {}),
            deleted_at.get(shard, {}),
            frozen.get(shard, {}),
            moved.get(shard, {}),
        )
        for shard in shards_read
    }


def _read_names(
    using: str, shards: Collection[int], accounts: dict[int, dict[str, tuple[AccountRow, ...]]]
) -> dict[int, dict[str, MovedAccount]]:
    """Return the accounts of these shards whose text was given to another customer, by shard and key.

    If a customer has several texts, add its row in the table of accounts to `accounts` for all of these texts.
    """
    moved: dict[int, dict[str, MovedAccount]] = {}
    of_several: list[tuple[int, str, int]] = []
    # Whoever has several texts has one that was given to it.
    given = Name.objects.using(using).filter(~Q(since=0, counter=0), until=None).values("customer")
    names = Name.objects.using(using).filter(shard__in=shards, until=None, customer__in=given)
    for shard, text, customer, counter, since in names.values_list(
        "shard", "identifier", "customer", "counter", "since"
    ).iterator(_CHUNK):
        if since or counter:
            moved.setdefault(shard, {})[f"account:{text}"] = MovedAccount(counter, since * MICROSECONDS)
        of_several.append((shard, text, customer))
    rows = _rows_of_customers(using, {customer for _shard, _text, customer in of_several})
    for shard, text, customer in of_several:
        if customer in rows:
            _put(accounts, shard, f"account:{text}", rows[customer])
    return moved


def _rows_of_customers(using: str, customers: Collection[int]) -> dict[int, AccountRow]:
    """Return the row of each customer in the table of accounts. If raw SQL wrote several, the oldest holds."""
    texts = Name.objects.using(using).filter(customer__in=customers, until=None)
    customer_of = dict(texts.values_list("identifier", "customer")) if customers else {}
    rows = Account.objects.using(using).filter(identifier__in=customer_of).order_by("-pk")
    return {
        customer_of[identifier]: AccountRow(pk, plan or 0, timezone, anchor or None, version, edited_at)
        for identifier, pk, plan, timezone, anchor, version, edited_at in rows.values_list(
            "identifier", "pk", "plan", "timezone", "billing_anchor", "version", "since"
        )
    }


def merge(shards: list[KeyRows | None], changes: Mapping[int, KeyRows], tombstones: Iterable[Tombstone]) -> None:
    """Merge changes into the shards that are in memory: first remove deleted rows, then add the new rows.

    Forget each shard in which a text was given to another customer. It is read again when it is needed.
    """
    tombstones_by_shard: dict[int, list[Tombstone]] = {}
    for tombstone in tombstones:
        if tombstone.shard is not None:
            tombstones_by_shard.setdefault(tombstone.shard, []).append(tombstone)
    for shard, current in enumerate(shards):
        new, tombstones_of_shard = changes.get(shard), tombstones_by_shard.get(shard, [])
        if current is None or (new is None and not tombstones_of_shard):
            continue
        if any(tombstone.kind == "name" for tombstone in tombstones_of_shard):
            shards[shard] = None
            continue
        new = new or KeyRows()
        deleted_at = dict(current.deleted_at)
        for tombstone in tombstones_of_shard:
            deleted_at[key_name(tombstone.key)] = tombstone.since

        def deleted(kind: str, tombstones_of_shard: list[Tombstone] = tombstones_of_shard) -> set[int]:
            return {tombstone.row for tombstone in tombstones_of_shard if tombstone.kind == kind}

        shards[shard] = _rows(
            _merged(current.overrides, new.overrides, deleted("keyoverride")),
            _merged(current.memberships, new.memberships, deleted("planmembership")),
            _merged(current.accounts, new.accounts, deleted("account")),
            deleted_at,
            {**current.frozen, **new.frozen},
            current.moved,
        )


def _merged(
    current: Mapping[str, tuple[Row, ...]], new: Mapping[str, tuple[Row, ...]], deleted: set[int]
) -> dict[str, tuple[Row, ...]]:
    """Return the current rows and the new rows. Leave out current rows that are deleted or replaced by a new row.

    `deleted` has the primary keys of the deleted rows.
    """
    removed = deleted | {row.pk for rows in new.values() for row in rows}
    merged = {}
    for key, rows in current.items():
        unchanged = removed.isdisjoint(row.pk for row in rows)
        remaining = rows if unchanged else tuple(row for row in rows if row.pk not in removed)
        if remaining:
            merged[key] = remaining
    for key, rows in new.items():
        # New rows have a newer version than all current rows, so they come first.
        merged[key] = rows + merged.get(key, ())
    return merged


def _rows(
    overrides: Mapping[str, tuple[OverrideRow, ...]],
    memberships: Mapping[str, tuple[MembershipRow, ...]],
    accounts: Mapping[str, tuple[AccountRow, ...]],
    deleted_at: Mapping[str, int],
    frozen: Mapping[str, Frozen],
    moved: Mapping[str, MovedAccount],
) -> KeyRows:
    times = {(row.valid_from, row.valid_until) for rows in overrides.values() for row in rows}
    times |= {(row.valid_from, row.valid_until) for rows in memberships.values() for row in rows}
    edges = {edge for span in times for edge in span if 0 < edge < NEVER}
    return KeyRows(overrides, memberships, accounts, deleted_at, frozen, tuple(sorted(edges)), moved)


def _put(rows_by_shard: dict[int, dict[str, tuple[Row, ...]]], shard: int, key: str, row: Row) -> None:
    rows_by_key = rows_by_shard.get(shard)
    if rows_by_key is None:
        rows_by_key = rows_by_shard[shard] = {}
    # Rows come in the order of their versions. So put each row before the older rows of its key.
    older = rows_by_key.get(key)
    rows_by_key[key] = (row,) if older is None else (row, *older)


def _numbers(*values: Any) -> tuple[tuple[str, Any], ...]:
    named = zip(KeyOverride.NUMBERS, values, strict=True)
    return tuple((name, value) for name, value in named if value is not None)


def _micros(moment: datetime | None, otherwise: int) -> int:
    return otherwise if moment is None else instant(moment)


class KeyFacts(NamedTuple):
    """The plan, account and overrides of one key. `plan` is the id of the plan; 0 without a plan.

    changed_at  when the plan, the account or an override last changed, in µs since 1970 UTC; 0 if this is longer ago
                than RECENT
    frozen      of an account, the periods `frozen` of PeriodTerms
    moved       the present name of an account whose text was given to another customer
    """

    plan: int
    account: AccountRow | None
    overrides: tuple[OverrideRow, ...]
    changed_at: int
    frozen: Frozen
    moved: MovedAccount | None


class Facts:
    """The KeyFacts of the keys of one shard, valid from `now` until `until` (µs since 1970 UTC).

    Here a shard is a group of keys whose rows are read together. (It is not a shard in Redis.)
    """

    __slots__ = ("_facts_by_key", "_now", "_rows", "until")

    def __init__(self, rows: KeyRows, now: int) -> None:
        self._rows = rows
        self._now = now
        self._facts_by_key: dict[str, KeyFacts] = {}
        later = bisect_right(rows.edges, now)
        self.until = rows.edges[later] if later < len(rows.edges) else NEVER

    def get(self, key: str) -> KeyFacts | None:
        """Return the KeyFacts of a key; None if the database has no rows about it."""
        facts = self._facts_by_key.get(key)
        if facts is None:
            facts = self._find(key)
            if facts is not None:
                self._facts_by_key[key] = facts
        return facts

    def _find(self, key: str) -> KeyFacts | None:
        rows, now = self._rows, self._now
        overrides = rows.overrides.get(key, ())
        memberships = rows.memberships.get(key, ())
        accounts = rows.accounts.get(key, ())
        has_rows = overrides or memberships or accounts
        if not has_rows and key not in rows.deleted_at and not rows.frozen.get(key) and key not in rows.moved:
            return None
        # An account that was given to another customer counts as edited at the next quarter of an hour.
        changes = [rows.deleted_at.get(key, 0), *(min(account.edited_at, now) for account in accounts)]
        times = [(row.edited_at, row.valid_from, row.valid_until) for row in overrides]
        times += [(row.edited_at, row.valid_from, row.valid_until) for row in memberships]
        # The limits of the key also changed when the validity of a row began or ended.
        for edited_at, *edges in times:
            changes += edited_at, *(edge for edge in edges if 0 < edge <= now)
        # If several rows are in force, the newest one counts. It comes first in `overrides` and in `memberships`.
        in_force: dict[str, OverrideRow] = {}
        for override in overrides:
            if override.valid_from <= now < override.valid_until:
                in_force.setdefault(override.rule, override)
        plans = [row.plan for row in memberships if row.valid_from <= now < row.valid_until]
        newest = max(changes)
        return KeyFacts(
            plans[0] if plans else 0,
            accounts[0] if accounts else None,
            tuple(in_force.values()),
            newest if newest > now - RECENT else 0,
            rows.frozen.get(key, ()),
            rows.moved.get(key),
        )


class Billing(NamedTuple):
    """An account's billing periods.

    frozen      the newest frozen periods that the time zone and the anchor alone do not give
    boundaries  starts of the previous period, the current one and the next two, in µs since 1970 UTC
    """

    timezone: str
    anchor: str | None
    frozen: Frozen
    boundaries: tuple[int, int, int, int]


def billing_around(
    now: int, account: str | None, timezone: str, anchor: str | None, frozen: Frozen, log: Callable[[str], None]
) -> Billing:
    """Return the billing periods around `now` (µs since 1970 UTC).

    If the time zone or the anchor is not valid, call `log` with the reason and return calendar months in UTC. The
    periods `frozen` keep their starts and ends in each case.
    """
    try:
        return Billing(timezone, anchor, frozen, periods_around(timezone, anchor, frozen, now))
    except ValueError as error:
        log(f"The billing periods of {account!r} are not valid, so months in UTC are used: {error}")
        return Billing("UTC", None, frozen, periods_around("UTC", None, frozen, now))
