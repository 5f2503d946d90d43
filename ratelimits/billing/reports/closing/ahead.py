"""Read the data of many accounts with one query, before they are needed. A query for each account would be slow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from itertools import islice
from operator import or_
from typing import Generic, TypeVar

from django.db.models import Q

from ratelimits.algorithms.billing_periods import Span
from ratelimits.billing.reports.build import GROUP, Group, between, grouped
from ratelimits.usage.periods import within

T = TypeVar("T")
AccountAndSpan = tuple[str, Span]
#: Maximum number of groups of ledger lines in memory. An account with more groups is read separately, as a stream.
_MAX_GROUPS = 5000
#: Maximum number of different spans in one query, because databases limit the depth of a condition.
_MAX_SPANS = 50
#: `SpanCache` also reads the data of this time (µs) before and after a span, so that near spans need no further read.
_MARGIN = 32 * 86_400 * 1_000_000


class GroupsAhead:
    """Reads the groups of ledger lines, for as many accounts at once as memory allows.

    A group is the sum of the ledger lines that become one report line (see `build.grouped`).

    `chain` has, for each shard, the position of the last batch whose lines are read. If it is None, all lines are read.

    `spans` has, for each account text, the spans of its billing periods that are not on a report yet.

    Call `of` for the accounts in the order of the code points of their names, because the database returns the groups
    in this order.
    """

    def __init__(self, using: str, spans: Mapping[str, Iterable[Span]], chain: Mapping[str, int] | None) -> None:
        self._using, self._chain = using, chain
        #: The accounts and spans to read. A round has at most one span of each account, because a query returns only
        #: the account of a group. Nearly always there is one round.
        self._unread: list[list[AccountAndSpan]] = []
        self._round_of: dict[AccountAndSpan, int] = {}
        for account in sorted(spans):
            for number, span in enumerate(sorted(spans[account])):
                self._unread += [[]] if number == len(self._unread) else []
                self._unread[number].append((account, span))
                self._round_of[account, span] = number
        #: How many accounts to read at once. If their groups do not fit in memory, later reads take fewer accounts.
        self._max_accounts = len(spans)
        #: The groups in memory, by round.
        self._groups: dict[int, dict[AccountAndSpan, list[Group]]] = {}

    def of(self, account: str, span: Span) -> list[Group] | None:
        """Return the groups of an account in a billing period. Return None if the caller must read the groups."""
        number = self._round_of.get((account, span))
        if number is None:
            return None
        unread = self._unread[number]
        if (account, span) in unread:
            self._read(number, unread[unread.index((account, span)) :])
        return self._groups[number].get((account, span))

    def _read(self, number: int, unread: list[AccountAndSpan]) -> None:
        """Read the groups of the next accounts. If only one account would be read, leave it to the caller."""
        span_of, names = self._next(unread)
        groups: list[Group] = []
        if len(span_of) > 1:
            condition = reduce(or_, (Q(account__in=accounts) & within(*span) for span, accounts in names.items()))
            if self._chain is not None:
                # No report has usage of these periods, so the first batch of each shard is read too.
                condition &= between({}, self._chain)
            stream = grouped(condition, self._using, columns=("account", *GROUP))
            groups = list(islice(stream, _MAX_GROUPS + 1))
        if len(groups) > _MAX_GROUPS:  # Perhaps not all groups of the last account were read, so leave it out.
            last = groups[-1]["account"]
            span_of = {name: span for name, span in span_of.items() if name < last}
            groups = [group for group in groups if group["account"] < last]
            self._max_accounts = max(len(span_of), 1)
        elif len(span_of) == 1:
            span_of = {}
        self._groups[number] = {pair: [] for pair in span_of.items()}
        for group in groups:
            self._groups[number][group["account"], span_of[group["account"]]].append(group)
        # If `span_of` is empty, the first account is alone or has too many groups. The caller reads this account.
        self._unread[number] = unread[max(len(span_of), 1) :]

    def _next(self, unread: list[AccountAndSpan]) -> tuple[dict[str, Span], dict[Span, list[str]]]:
        """Return the accounts to read now, with their spans. Return also the accounts that have a span, by the span."""
        span_of: dict[str, Span] = {}
        names: dict[Span, list[str]] = {}
        for name, span in unread[: self._max_accounts]:
            if span not in names and len(names) == _MAX_SPANS:
                break
            span_of[name] = span
            names.setdefault(span, []).append(name)
        return span_of, names


class SpanCache(Generic[T]):
    """Caches the data of a span of time. One read is enough for spans that are near each other."""

    def __init__(self, read: Callable[[int, int], T]) -> None:
        self._read = read
        #: The cached span (its start and its end) and its data.
        self._cached: tuple[int, int, T] | None = None

    def of(self, start: int, end: int) -> T:
        """Return the data of a span that contains the time from `start` to `end` (µs since 1970 UTC)."""
        if self._cached is not None:
            cached_start, cached_end, data = self._cached
            if cached_start <= start and end <= cached_end:
                return data
            start, end = min(start, cached_start), max(end, cached_end)
        start, end = start - _MARGIN, end + _MARGIN
        data = self._read(start, end)
        self._cached = start, end, data
        return data
