"""Reading for many accounts at once what the closing of each would otherwise read by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from itertools import islice
from operator import or_
from typing import Generic, TypeVar

from django.db.models import Q

from ratelimits.reports.build import Group, between, grouped

T = TypeVar("T")
#: Groups of ledger lines that are held at once. An account that has more is read by itself, in a stream.
_HELD = 5000
#: Periods of different starts that one query reads: databases bound the depth of a condition.
_STARTS = 50
#: What is read around a span of time (µs), so that the spans of other accounts lie within it.
_AROUND = 32 * 86_400 * 1_000_000


class GroupsAhead:
    """The groups of accounts' ledger lines up to the positions `chain`, read for as many accounts as fit.

    `periods` are, by account, the starts (s since 1970 UTC) of periods that are on no report yet. Accounts are asked
    for in the order of their names' code points, which is that of the groups in the database.
    """

    def __init__(self, using: str, periods: Mapping[str, Iterable[int]], chain: Mapping[str, int]) -> None:
        self._using, self._periods, self._chain = using, periods, chain
        self._rest = sorted(periods)
        self._at_once = len(self._rest)
        self._held: dict[tuple[str, int], list[Group]] = {}

    def of(self, account: str, period: int) -> list[Group] | None:
        """Return the groups of an account's period; None if they were not read ahead, and are to be read alone."""
        if account in self._rest:
            self._rest = self._rest[self._rest.index(account) :]
            self._read()
        return self._held.get((account, period))

    def _read(self) -> None:
        names, starts = self._next()
        self._held, groups = {}, []
        if len(names) > 1:
            those = reduce(or_, (Q(period=start, account__in=having) for start, having in sorted(starts.items())))
            groups = list(islice(grouped(those & between({}, self._chain), self._using), _HELD + 1))
            if len(groups) > _HELD:  # the account of the last one may have more
                cut = groups[-1]["account"]
                names, groups = [name for name in names if name < cut], [one for one in groups if one["account"] < cut]
                self._at_once = max(len(names), 1)
            self._held = {(name, period): [] for name in names for period in self._periods[name]}
        for group in groups:
            self._held[group["account"], group["period"]].append(group)
        self._rest = self._rest[max(len(names), 1) :]

    def _next(self) -> tuple[list[str], dict[int, list[str]]]:
        """Return the accounts to read now, and which of them have a period that starts then."""
        names: list[str] = []
        starts: dict[int, list[str]] = {}
        for name in self._rest[: self._at_once]:
            if names and len(starts.keys() | set(self._periods[name])) > _STARTS:
                break
            names.append(name)
            for period in self._periods[name]:
                starts.setdefault(period, []).append(name)
        return names, starts


class Around(Generic[T]):
    """What is read of a span of time in µs since 1970 UTC: once for spans that lie near each other."""

    def __init__(self, read: Callable[[int, int], T]) -> None:
        self._read = read
        self._held: tuple[int, int, T] | None = None

    def of(self, start: int, end: int) -> T:
        """Return what was read of that span, and of more around it."""
        if self._held is None or start < self._held[0] or end > self._held[1]:
            first, last = (start, end) if self._held is None else (min(start, self._held[0]), max(end, self._held[1]))
            self._held = first - _AROUND, last + _AROUND, self._read(first - _AROUND, last + _AROUND)
        return self._held[2]
