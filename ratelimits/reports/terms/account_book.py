"""Read the present and the past states of account rows, once for many accounts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from ratelimits.algorithms.billing_periods import DatedTimeline
from ratelimits.models import Account
from ratelimits.models.periods import timelines

_COLUMNS = ("id", "identifier", "since", "plan_id", "timezone", "billing_anchor")


class AccountState(NamedTuple):
    """The state of an account row from `since` (µs since 1970 UTC) on.

    `row` and `plan` are primary keys. If the state is from the row's history, `kind` is "+" (added), "~" (changed) or
    "-" (deleted). If the state is from the row itself, `kind` is "".
    """

    row: int
    name: str
    since: int
    plan: int | None
    timezone: str
    anchor: str
    kind: str = ""


#: The recorded states of one row, in the order of its edits.
Records = Sequence[AccountState]


class AccountBook:
    """The current and former rows of some accounts, and the accounts' billing periods."""

    def __init__(self, using: str, names: Iterable[str]) -> None:
        self._using, self._names = using, set(names)
        self._rows: dict[str, AccountState] = {}
        #: The billing periods of accounts, and the accounts whose periods were not read yet.
        self._timelines: dict[str, DatedTimeline] = {}
        self._without_timeline: set[str] = set()
        self._read(self._names)

    def _read(self, names: Collection[str]) -> None:
        rows = Account.objects.using(self._using).filter(identifier__in=names).values_list(*_COLUMNS)
        self._rows |= {state.name: state for state in (AccountState(*row) for row in rows)}
        self._without_timeline.update(names)

    def timeline(self, name: str) -> DatedTimeline:
        """Return the billing periods of an account."""
        if self._without_timeline:
            self._timelines |= timelines(self._using, self._without_timeline)
            self._without_timeline = set()
        return self._timelines[name]

    def is_unchanged(self, name: str, since: int) -> bool:
        """Return whether the account's row has not changed since a moment (µs since 1970 UTC)."""
        row = self._rows.get(name)
        return row is not None and row.since <= since

    def state(self, name: str, at: int | None) -> AccountState | None:
        """Return the state of an account's row at a moment (µs since 1970 UTC; None means now).

        Return None if the account had no row.
        """
        row = self._rows.get(name)
        if row is not None and (at is None or row.since <= at):
            return row
        rows = self.rows(name)
        if not rows:
            return row  # The row was written with raw SQL, so only its current state is known.
        state = None
        for records in rows:
            newest = next((record for record in reversed(records) if at is None or record.since <= at), None)
            if newest is not None and newest.kind != "-" and newest.name == name:
                state = newest
        return state

    def rows(self, name: str) -> Sequence[Records]:
        """Return all records of each row that ever had this name, oldest row first."""
        return self._by_name.get(name, ()) if name else ()

    @cached_property
    def _by_name(self) -> dict[str, list[Records]]:
        rows = self._records(self._names)
        # Perhaps the rows also had other names. All names of a row can share an allowance, so read these names too.
        other_names = {state.name for records in rows.values() for state in records} - self._names
        if other_names:
            self._read(other_names)
            rows |= self._records(other_names)
        by_name: dict[str, list[Records]] = defaultdict(list)
        for records in sorted(rows.values(), key=lambda records: records[0].since):
            for name in {state.name for state in records}:
                by_name[name].append(records)
        return by_name

    def _records(self, names: Collection[str]) -> dict[int, list[AccountState]]:
        """Return all recorded states of each row that ever had one of these names, by primary key."""
        history: Any = Account.history
        with_name = history.using(self._using).filter(identifier__in=names)
        records = history.using(self._using).filter(id__in=with_name.values("id")).order_by("version", "history_id")
        by_row: dict[int, list[AccountState]] = defaultdict(list)
        for row in records.values_list(*_COLUMNS, "history_type"):
            state = AccountState(*row)
            by_row[state.row].append(state)
        return by_row
