"""Account rows as they are and as they were: read for many accounts at once, however many moments are asked for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from ratelimits.algorithms.billing_periods import Span
from ratelimits.models import Account
from ratelimits.models.kept import kept_periods

_COLUMNS = ("id", "identifier", "since", "plan_id", "timezone", "billing_anchor")


class State(NamedTuple):
    """What an account row says, or said from `since` (µs since 1970 UTC) on; `kind` is its record's, "" without one."""

    row: int
    name: str
    since: int
    plan: int | None
    timezone: str
    anchor: str
    kind: str = ""


#: The recorded states of one row, in the order of its edits.
Records = Sequence[State]


class AccountBook:
    """The rows of some accounts, those that they had before, and the billing periods that were kept for them."""

    def __init__(self, using: str, names: Iterable[str]) -> None:
        self._using, self._names = using, set(names)
        self._rows: dict[str, State] = {}
        self._kept: dict[str, Span] = {}
        self._read(self._names)

    def _read(self, names: Collection[str]) -> None:
        rows = Account.objects.using(self._using).filter(identifier__in=names).values_list(*_COLUMNS)
        self._rows |= {state.name: state for state in (State(*row) for row in rows)}
        self._kept |= kept_periods(self._using, names)

    def kept(self, name: str) -> Span | None:
        """Return the billing period that was kept for an account when its terms changed."""
        return self._kept.get(name)

    def is_unchanged(self, name: str, since: int) -> bool:
        """Return whether the account's row is since a moment (µs since 1970 UTC) what it is now."""
        row = self._rows.get(name)
        return row is not None and row.since <= since

    def state(self, name: str, at: int | None) -> State | None:
        """Return what an account's row says, or said at a moment in µs since 1970 UTC; None where there was none."""
        row = self._rows.get(name)
        if row is not None and (at is None or row.since <= at):
            return row
        rows = self.rows(name)
        if not rows:
            return row  # written past the models: nothing better is known of it than what it says
        held = None
        for records in rows:
            newest = next((each for each in reversed(records) if at is None or each.since <= at), None)
            if newest is not None and newest.kind != "-" and newest.name == name:
                held = newest
        return held

    def rows(self, name: str) -> Sequence[Records]:
        """Return the records of all rows that ever had a name, under whatever name; the oldest row first."""
        return self._by_name.get(name, ()) if name else ()

    @cached_property
    def _by_name(self) -> dict[str, list[Records]]:
        rows = self._records(self._names)
        # Other names of these rows may share an allowance with them, and may have had rows of their own.
        others = {state.name for records in rows.values() for state in records} - self._names
        if others:
            self._read(others)
            rows |= self._records(others)
        found: dict[str, list[Records]] = defaultdict(list)
        for records in sorted(rows.values(), key=lambda records: records[0].since):
            for name in {state.name for state in records}:
                found[name].append(records)
        return found

    def _records(self, names: Collection[str]) -> dict[int, list[State]]:
        history: Any = Account.history
        named = history.using(self._using).filter(identifier__in=names)
        records = history.using(self._using).filter(id__in=named.values("id")).order_by("version", "history_id")
        found: dict[int, list[State]] = defaultdict(list)
        for row in records.values_list(*_COLUMNS, "history_type"):
            state = State(*row)
            found[state.row].append(state)
        return found
