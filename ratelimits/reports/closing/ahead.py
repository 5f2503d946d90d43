"""Reading ahead: one query reads the ledger lines of many accounts, because one query per account is slow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from itertools import islice
from operator import or_
from typing import Generic, TypeVar

from django.db.models import Q

from ratelimits.reports.build import Group, between, grouped

T = TypeVar("T")
#: Maximum number of groups of ledger lines in memory. An account with more is read separately, as a stream.
_MAX_GROUPS = 5000
#: Maximum number of different period starts in one query, since databases limit the depth of a condition.
_MAX_STARTS = 50
#: Time (µs) that is read before and after a span of one account, so that the spans of other accounts lie within it.
_MARGIN = 32 * 86_400 * 1_000_000


class GroupsAhead:
    """Reads the groups of ledger lines up to the positions `chain`, for as many accounts at once as fit in memory.

    `periods` has, for each account, the starts (s since 1970 UTC) of periods that are not on a report yet. Ask for the
    accounts in the order of their names' code points: the database returns the groups in this order.
    """

    def __init__(self, using: str, periods: Mapping[str, Iterable[int]], chain: Mapping[str, int]) -> None:
        self._using, self._periods, self._chain = using, periods, chain
        self._rest = sorted(periods)
        self._at_once = len(self._rest)
        self._values: dict[tuple[str, int], list[Group]] = {}

    def of(self, account: str, period: int) -> list[Group] | None:
        """Return the groups of an account's period; None if they were not read ahead and must be read separately."""
        if account in self._rest:
            self._rest = self._rest[self._rest.index(account) :]
            self._read()
        return self._values.get((account, period))

    def _read(self) -> None:
        names, starts = self._next()
        self._values, groups = {}, []
        if len(names) > 1:
            condition = reduce(or_, (Q(period=start, account__in=some) for start, some in sorted(starts.items())))
            groups = list(islice(grouped(condition & between({}, self._chain), self._using), _MAX_GROUPS + 1))
            if len(groups) > _MAX_GROUPS:  # The account of the last group may have more groups.
                last = groups[-1]["account"]
                names = [name for name in names if name < last]
                groups = [group for group in groups if group["account"] < last]
                self._at_once = max(len(names), 1)
            self._values = {(name, period): [] for name in names for period in self._periods[name]}
        for group in groups:
            self._values[group["account"], group["period"]].append(group)
        self._rest = self._rest[max(len(names), 1) :]

    def _next(self) -> tuple[list[str], dict[int, list[str]]]:
        """Return the accounts to read now, and the starts of their periods with the accounts that have each period."""
        names: list[str] = []
        starts: dict[int, list[str]] = {}
        for name in self._rest[: self._at_once]:
            if names and len(starts.keys() | set(self._periods[name])) > _MAX_STARTS:
                break
            names.append(name)
            for period in self._periods[name]:
                starts.setdefault(period, []).append(name)
        return names, starts


class Around(Generic[T]):
    """A cache of values for spans of time (µs since 1970 UTC): one read serves all spans that are near each other."""

    def __init__(self, read: Callable[[int, int], T]) -> None:
        self._read = read
        self._values: tuple[int, int, T] | None = None

    def of(self, start: int, end: int) -> T:
        """Return the value of a span that contains this one; read it if it is not in the cache."""
        if self._values is None or start < self._values[0] or end > self._values[1]:
            first, last = (
                (start, end) if self._values is None else (min(start, self._values[0]), max(end, self._values[1]))
            )
            self._values = first - _MARGIN, last + _MARGIN, self._read(first - _MARGIN, last + _MARGIN)
        return self._values[2]
