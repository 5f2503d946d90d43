"""Find the requests that an edited rule would apply to, before the rule is saved."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from ratelimits.models.rules import Rule
from ratelimits.rules import groups
from ratelimits.rules.query_thread import RulesUnavailable
from ratelimits.rules.rows import rule_row
from ratelimits.rules.selection import AppliedRule, plain_key
from ratelimits.rules.snapshot import MissingRows, Snapshot

if TYPE_CHECKING:
    from ratelimits.identity import Identity

#: The id of a rule that was never saved.
NEW = 0


class EditedRule:
    """A rule with the values that somebody has typed, beside all other rules, plans and overrides in force.

    If its mode is "off", the class treats it as enforced, to show which requests the rule would apply to.
    """

    def __init__(self, current: Snapshot, rule: Rule, identities: Iterable[Identity]) -> None:
        """Put the rule into the current rules. The rows about the keys of all `identities` are read together."""
        identities = list(identities)
        row = rule_row(rule)
        self._pk = row.pk or NEW
        # The version and the moment of the edit are known only after saving. They do not decide to which requests the
        # rule applies, so they can have any value here.
        row = replace(row, pk=self._pk, version=0, edited_at=0, mode="enforce" if row.mode == "off" else row.mode)
        rows = current.with_rows_of(*identities).rows
        groups_of_users = rows.groups
        if row.group:
            users = {identity.user for identity in identities if identity.user is not None}
            groups_of_users = groups_of_users | groups.read(users - groups_of_users.keys())
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
