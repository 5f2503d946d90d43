"""Find the plan, the account and the overrides that apply to a single key at a moment."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from ratelimits.algorithms.billing_periods import Frozen
from ratelimits.rules.keyed import NEVER, AccountRow, KeyRows, MovedAccount, OverrideRow

#: After a change of a key's plan or overrides, the stored states of its limits are converted to the new parameters. For
#: this, the limits need the moment of the change. But keys share a Selection only if they have the same moment. So a
#: moment that is older than RECENT µs is left out.
RECENT = 3_600_000_000


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
