"""What holds for single keys at a moment: their plan, their account and the overrides that are in force."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from ratelimits.algorithms.billing_periods import Span
from ratelimits.rules.keyed import NEVER, AccountRow, KeyRows, OverrideRow

#: For this long, in µs, a key whose plan or override changed is told from others on its plan, so that its limits
#: know since when they hold. Not for longer, since such keys share no Selection with others.
RECENT = 3_600_000_000


class KeyFacts(NamedTuple):
    """What holds for one key now. `moved`: when that last changed, if recently, in µs since 1970 UTC, else 0.

    `kept`: the billing period of an account that its last change of terms left as it was.
    """

    plan: int
    account: AccountRow | None
    overrides: tuple[OverrideRow, ...]
    moved: int
    kept: Span | None


class Facts:
    """What holds at `now`, until `until`, for the keys of a shard; found out when it is asked for."""

    __slots__ = ("_known", "_now", "_rows", "until")

    def __init__(self, rows: KeyRows, now: int) -> None:
        self._rows = rows
        self._now = now
        self._known: dict[str, KeyFacts] = {}
        later = bisect_right(rows.edges, now)
        self.until = rows.edges[later] if later < len(rows.edges) else NEVER

    def get(self, key: str) -> KeyFacts | None:
        """What holds for a key; None if nothing is said of it."""
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
