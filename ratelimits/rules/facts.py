"""What holds for single keys at a moment: their plan, their account and the overrides that are in force."""

from __future__ import annotations

from typing import NamedTuple

from ratelimits.rules.rows import NEVER, AccountRow, KeyRows, MembershipRow, OverrideRow

#: For this long, in µs, a key whose plan or override changed is told from others on its plan, so that its limits
#: know since when they hold. Not for longer, since such keys share no Selection with others.
RECENT = 3_600_000_000


class KeyFacts(NamedTuple):
    """What holds for one key now. `moved`: when that last changed, if recently, in µs since 1970 UTC, else 0."""

    plan: int
    account: AccountRow | None
    overrides: tuple[OverrideRow, ...]
    moved: int


def facts_at(rows: KeyRows, now: int) -> tuple[dict[str, KeyFacts], int]:
    """What holds at `now` for each key of a shard of which anything is said, and until when."""
    until = NEVER
    plans: dict[str, int] = {}
    accounts: dict[str, AccountRow] = {}
    overrides: dict[str, list[OverrideRow]] = {}
    moved = dict(rows.scars)

    def holds(row: OverrideRow | MembershipRow) -> bool:
        nonlocal until
        edges = [edge for edge in (row.valid_from, row.valid_until) if 0 < edge < NEVER]
        until = min([until, *(edge for edge in edges if edge > now)])
        moved[row.key] = max([moved.get(row.key, 0), row.since, *(edge for edge in edges if edge <= now)])
        return row.valid_from <= now < row.valid_until

    for membership in rows.memberships.values():
        if holds(membership):
            plans[membership.key] = membership.plan
    for override in sorted(rows.overrides.values(), key=lambda row: -row.version):
        if holds(override) and all(other.rule != override.rule for other in overrides.get(override.key, ())):
            overrides.setdefault(override.key, []).append(override)
    for account in rows.accounts.values():
        accounts[account.key] = account
        moved[account.key] = max(moved.get(account.key, 0), account.since)
    moved = {key: since for key, since in moved.items() if since > now - RECENT}
    return {
        key: KeyFacts(plans.get(key, 0), accounts.get(key), tuple(overrides.get(key, ())), moved.get(key, 0))
        for key in plans.keys() | accounts.keys() | overrides.keys() | moved.keys()
    }, until
