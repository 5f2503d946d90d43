"""Find what applies to single keys at a moment: their plan, their account and the overrides in force."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from ratelimits.algorithms.billing_periods import Span
from ratelimits.rules.keyed import NEVER, AccountRow, KeyRows, OverrideRow

#: For this long (µs) a key whose plan or override changed is kept apart from others on its plan, so that its limits
#: know since when they apply. No longer, since such a key shares no Selection with others.
RECENT = 3_600_000_000


class KeyFacts(NamedTuple):
    """What applies to one key now. `plan` is 0 without a plan.

    moved  when this last changed, in µs since 1970 UTC; 0 if that was not recently
    kept   the account's billing period that its last change of terms left as it was, or None
    """

    plan: int
    account: AccountRow | None
    overrides: tuple[OverrideRow, ...]
    moved: int
    kept: Span | None


class Facts:
    """What applies to the keys of a shard from `now` until `until` (µs). Each key is looked up at its first use."""

    __slots__ = ("_known", "_now", "_rows", "until")

    def __init__(self, rows: KeyRows, now: int) -> None:
        self._rows = rows
        self._now = now
        self._known: dict[str, KeyFacts] = {}
        later = bisect_right(rows.edges, now)
        self.until = rows.edges[later] if later < len(rows.edges) else NEVER

    def get(self, key: str) -> KeyFacts | None:
        """Return what applies to a key; None if the database has nothing about it."""
        facts = self._known.get(key)
        if facts is None:
            facts = self._find(key)
            if facts is not None:
                self._known[key] = facts
        return facts

    def _find(self, key: str) -> KeyFacts | None:
        rows, now = self._rows, self._now
        of_key = rows.overrides.get(key, ()), rows.memberships.get(key, ()), rows.accounts.get(key, ())
        if not any(of_key) and key not in rows.deleted_at and key not in rows.kept:
            return None
        overrides, memberships, accounts = of_key
        moved = [rows.deleted_at.get(key, 0), *(account.since for account in accounts)]
        times = [(one.since, one.valid_from, one.valid_until) for one in overrides]
        times += [(one.since, one.valid_from, one.valid_until) for one in memberships]
        for since, *edges in times:
            moved += since, *(edge for edge in edges if 0 < edge <= now)
        in_force: dict[str, OverrideRow] = {}
        for override in overrides:
            if override.valid_from <= now < override.valid_until:
                in_force.setdefault(override.rule, override)
        plans = [one.plan for one in memberships if one.valid_from <= now < one.valid_until]
        newest = max(moved)
        return KeyFacts(
            plans[0] if plans else 0,
            accounts[0] if accounts else None,
            tuple(in_force.values()),
            newest if newest > now - RECENT else 0,
            rows.kept.get(key),
        )
