"""Read the data of many accounts with one query, before they are needed. A query for each account would be slow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from itertools import islice
from operator import or_
from typing import Generic, TypeVar

from django.db.models import Q

from ratelimits.reports.build import Group, between, grouped

T = TypeVar("T")
#: Maximum number of groups of ledger lines in memory. An account with more groups is read separately, as a stream.
_MAX_GROUPS = 5000
#: Maximum number of different period starts in one query, because databases limit the depth of a condition.
_MAX_STARTS = 50
#: `SpanCache` also reads the data of this time (µs) before and after a span, so that near spans need no further read.
_MARGIN = 32 * 86_400 * 1_000_000


class GroupsAhead:
    """Reads the groups of ledger lines, for as many accounts at once as memory allows.

    A group is the sum of the ledger lines that become one report line (see `build.grouped`).

    `chain` has, for each shard, the position of the last batch whose lines are read.

    `periods` has, for each account, the starts (s since 1970 UTC) of periods that are not on a report yet.

    Call `of` for the accounts in the order of the code points of their names, because the database returns the groups
    in this order.
    """

    def __init__(self, using: str, periods: Mapping[str, Iterable[int]], chain: Mapping[str, int]) -> None:
        self._using, self._periods, self._chain = using, periods, chain
        self._unread = sorted(periods)
        #: How many accounts to read at once. If their groups do not fit in memory, later reads take fewer accounts.
        self._max_accounts = len(self._unread)
        #: The groups in memory, by account and period.
        self._groups: dict[tuple[str, int], list[Group]] = {}

    def of(self, account: str, period: int) -> list[Group] | None:
        """Return the groups of an account in the period that starts at `period` (s since 1970 UTC).

        Return None if the caller must read the groups.
        """
        if account in self._unread:
            self._unread = self._unread[self._unread.index(account) :]
            self._read()
        return self._groups.get((account, period))

    def _read(self) -> None:
        """Read the groups of the next accounts. If only one account would be read, leave it to the caller."""
        names, starts = self._next()
        self._groups, groups = {}, []
        if len(names) > 1:
            conditions = (Q(period=start, account__in=accounts) for start, accounts in sorted(starts.items()))
            condition = reduce(or_, conditions)
            # No report has usage of these periods, so the first batch of each shard is read too.
            since: dict[str, int] = {}
            groups = list(islice(grouped(condition & between(since, self._chain), self._using), _MAX_GROUPS + 1))
            if len(groups) > _MAX_GROUPS:  # Perhaps not all groups of the last account were read, so leave it out.
                last = groups[-1]["account"]
                names = [name for name in names if name < last]
                groups = [group for group in groups if group["account"] < last]
                self._max_accounts = max(len(names), 1)
            self._groups = {(name, period): [] for name in names for period in self._periods[name]}
        for group in groups:
            self._groups[group["account"], group["period"]].append(group)
        # If `names` is empty, the first account has too many groups. The caller reads this account.
        self._unread = self._unread[max(len(names), 1) :]

    def _next(self) -> tuple[list[str], dict[int, list[str]]]:
        """Return the accounts to read now. Return also the accounts that have a period, by the period's start."""
        names: list[str] = []
        starts: dict[int, list[str]] = {}
        for name in self._unread[: self._max_accounts]:
            if names and len(starts.keys() | set(self._periods[name])) > _MAX_STARTS:
                break
            names.append(name)
            for period in self._periods[name]:
                starts.setdefault(period, []).append(name)
        return names, starts


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
