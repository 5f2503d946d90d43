"""Read the present and the past states of customers' account rows, once for many customers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from ratelimits.algorithms.billing_periods import Timeline
from ratelimits.models import Account
from ratelimits.models.accounts.named import NamedCustomer
from ratelimits.models.periods import timelines_of

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


class StateSpan(NamedTuple):
    """A span (µs since 1970 UTC) in which a customer's account row had one state."""

    start: int
    end: int
    state: AccountState


#: The recorded states of one row, in the order of its edits.
_Records = Sequence[AccountState]


class AccountBook:
    """The current and former account rows of some customers, and the customers' billing periods.

    If several texts of a customer have a row, the oldest row holds for the customer.
    """

    def __init__(self, using: str, customers: Iterable[NamedCustomer]) -> None:
        self._using, self._customers = using, list(customers)
        self._texts = {text for customer in self._customers for text in customer.texts}
        rows = Account.objects.using(using).filter(identifier__in=self._texts).values_list("name", *_COLUMNS)
        self._rows: dict[str, AccountState] = {}
        #: The names of accounts, by primary key.
        self._names: dict[int, str] = {}
        for name, *columns in rows:
            state = AccountState(*columns)
            self._rows[state.name], self._names[state.row] = state, name

    @cached_property
    def _timelines(self) -> dict[str, Timeline]:
        return timelines_of(self._using, self._customers)

    def timeline(self, customer: NamedCustomer) -> Timeline:
        """Return the billing periods of a customer."""
        return self._timelines[customer.token]

    def account_name(self, customer: NamedCustomer) -> str:
        """Return the name that the customer's own account row has now; "" without such a row.

        The last text of a customer whom no text names now is perhaps that of another customer.
        """
        states = [self._rows[text] for text in customer.present if text in self._rows]
        return self._names[min(states).row] if states else ""

    def state(self, customer: NamedCustomer, at: int | None) -> AccountState | None:
        """Return the state of a customer's account row at a moment (µs since 1970 UTC; None means now).

        Return None if the customer had no row.
        """
        texts = customer.present if at is None else customer.texts_at(at)
        return min((state for text in texts if (state := self._state(text, at)) is not None), default=None)

    def _state(self, text: str, at: int | None) -> AccountState | None:
        row = self._rows.get(text)
        if row is not None and (at is None or row.since <= at):
            return row
        return next(self._recorded(text, at), None)

    def _recorded(self, text: str, at: int | None, *, first: bool = False) -> Iterator[AccountState]:
        """Yield the recorded states of a text at a moment, newest row first.

        If the first record of a row does not say that the row was added, the row existed before this record. With
        `first`, the record's values are then used for earlier moments too.
        """
        if text in self._rows and text not in self._by_text:
            yield self._rows[text]  # Raw SQL wrote the row, so only its current state is known.
        for records in reversed(self._by_text.get(text, ())):
            earlier = (record for record in reversed(records) if at is None or record.since <= at)
            newest = next(earlier, records[0] if first and records[0].kind != "+" else None)
            if newest is not None and newest.kind != "-" and newest.name == text:
                yield newest

    def spans(self, customer: NamedCustomer, start: int, end: int) -> list[StateSpan]:
        """Return the spans, between two moments, in which the customer's account row had one state."""
        row = self._rows.get(customer.account)
        if row is not None and row.since <= start and len(customer.names) == 1 and customer.was_always(0):
            return [StateSpan(start, end, row)]  # Most customers: the history need not be read.
        moments = {start, end}
        for text in customer.texts:
            moments.update(record.since for records in self._by_text.get(text, ()) for record in records)
        for span in customer.spans(start, end):
            moments |= {span.start, span.end}
        found: list[StateSpan] = []
        for since, until in pairwise(sorted(at for at in moments if start <= at <= end)):
            states = [state for text in customer.texts_at(since) for state in self._recorded(text, since, first=True)]
            if not states:
                continue
            state = min(states)
            if found and found[-1].end == since and found[-1].state == state:
                since = found.pop().start
            found.append(StateSpan(since, until, state))
        return found

    @cached_property
    def _by_text(self) -> dict[str, list[_Records]]:
        """Return all records of each row that ever had one of the texts, by text, oldest row first."""
        history: Any = Account.history
        with_text = history.using(self._using).filter(identifier__in=self._texts)
        records = history.using(self._using).filter(id__in=with_text.values("id")).order_by("version", "history_id")
        by_row: dict[int, list[AccountState]] = defaultdict(list)
        for row in records.values_list(*_COLUMNS, "history_type"):
            by_row[row[0]].append(AccountState(*row))
        by_text: dict[str, list[_Records]] = defaultdict(list)
        for states in sorted(by_row.values(), key=lambda records: records[0].since):
            for text in {state.name for state in states}:
                by_text[text].append(states)
        return by_text
