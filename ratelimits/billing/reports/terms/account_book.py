"""Read the present and the past states of customers' account rows, once for many customers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from ratelimits.algorithms.billing_periods import Timeline
from ratelimits.models import Account
from ratelimits.models.accounts.named import NamedCustomer
from ratelimits.models.periods import frozen_periods

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


class _Record(NamedTuple):
    """A recorded state of a row. `customer` is the primary key of the customer whom the row was about."""

    customer: int | None
    state: AccountState


class AccountBook:
    """The current and former account rows of some customers, and the customers' billing periods.

    The history says about which customer a row was. So it does not matter under which texts a customer has had rows.
    """

    def __init__(self, using: str, customers: Iterable[NamedCustomer]) -> None:
        self._using, self._customers = using, list(customers)
        token_of = {text: customer.token for customer in self._customers for text in customer.present}
        rows = Account.objects.using(using).filter(identifier__in=token_of).order_by("-pk")
        #: The row that a customer has now, and the name in it, by token. If raw SQL wrote several, the oldest holds.
        self._rows: dict[str, AccountState] = {}
        self._names: dict[str, str] = {}
        for name, *columns in rows.values_list("name", *_COLUMNS):
            state = AccountState(*columns)
            self._rows[token_of[state.name]], self._names[token_of[state.name]] = state, name

    @cached_property
    def _timelines(self) -> dict[str, Timeline]:
        frozen = frozen_periods(self._using, [customer.pk for customer in self._customers if customer.pk is not None])
        found: dict[str, Timeline] = {}
        for customer in self._customers:
            row = self._rows.get(customer.token)
            timezone, anchor = ("UTC", "") if row is None else (row.timezone, row.anchor)
            found[customer.token] = Timeline(timezone, anchor, frozen.get(customer.pk or 0, ()))
        return found

    def timeline(self, customer: NamedCustomer) -> Timeline:
        """Return the billing periods of a customer."""
        return self._timelines[customer.token]

    def account_name(self, customer: NamedCustomer) -> str:
        """Return the name that the customer's account row has now; "" without such a row."""
        return self._names.get(customer.token, "")

    def state(self, customer: NamedCustomer, at: int | None) -> AccountState | None:
        """Return the state of a customer's account row at a moment (µs since 1970 UTC; None means now).

        Return None if the customer had no row.
        """
        row = self._rows.get(customer.token)
        return row if at is None or (row is not None and row.since <= at) else self._recorded(customer, at)

    def _recorded(self, customer: NamedCustomer, at: int, *, first: bool = False) -> AccountState | None:
        """Return the recorded state of a customer's row at a moment; None if it had no row.

        If the first record of a row does not say that the row was added, the row existed before this record. With
        `first`, the record's values are then used for earlier moments too.
        """
        row, rows = self._rows.get(customer.token), self._records.get(customer.token, {})
        if row is not None and (row.since <= at or row.row not in rows):
            return row  # If it has no record, raw SQL wrote it, and only its current state is known.
        states = []
        for records in rows.values():
            oldest = records[0] if first and records[0].state.kind != "+" else None
            newest = next((record for record in reversed(records) if record.state.since <= at), oldest)
            if newest is not None and newest.customer == customer.pk and newest.state.kind != "-":
                states.append(newest.state)
        return min(states, default=None)  # Only raw SQL writes several at a time.

    def spans(self, customer: NamedCustomer, start: int, end: int) -> list[StateSpan]:
        """Return the spans, between two moments, in which the customer's account row had one state."""
        row = self._rows.get(customer.token)
        if row is not None and row.since <= start:
            return [StateSpan(start, end, row)]  # Most customers: the history need not be read.
        rows = self._records.get(customer.token, {}).values()
        moments = {start, end} | {record.state.since for records in rows for record in records}
        found: list[StateSpan] = []
        for since, until in pairwise(sorted(at for at in moments if start <= at <= end)):
            state = self._recorded(customer, since, first=True)
            if state is None:
                continue
            if found and found[-1].end == since and found[-1].state == state:
                since = found.pop().start
            found.append(StateSpan(since, until, state))
        return found

    @cached_property
    def _records(self) -> dict[str, dict[int, list[_Record]]]:
        """Return all records of each row that was ever recorded about one of the customers, by token and row."""
        token_of = {customer.pk: customer.token for customer in self._customers if customer.pk is not None}
        history: Any = Account.history
        about = history.using(self._using).filter(customer__in=token_of)
        records = history.using(self._using).filter(id__in=about.values("id")).order_by("version", "history_id")
        by_row: dict[int, list[_Record]] = defaultdict(list)
        for customer, *row in records.values_list("customer", *_COLUMNS, "history_type"):
            record = _Record(customer, AccountState(*row))
            by_row[record.state.row].append(record)
        found: dict[str, dict[int, list[_Record]]] = defaultdict(dict)
        for pk, of_row in by_row.items():
            for customer in {record.customer for record in of_row}:
                if customer is not None and customer in token_of:
                    found[token_of[customer]][pk] = of_row
        return found
