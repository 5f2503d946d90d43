"""What a plan includes in one billing period of an account, whatever became of the account in that period.

Without proration that is all that the account's plan includes at the period's end, or the last plan that the account
had in it; names that one account had one after the other share it. With RATELIMITS["PRORATION"] "time" each plan
includes as much as the time that the account was on it is of a month. Either way the names share the prices of the plan
at the period's end, or of the last one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, pairwise

from ratelimits.conf import conf
from ratelimits.reports.periods import period_at
from ratelimits.reports.terms import AccountTerms, Terms
from ratelimits.reports.terms.account_book import Records


@dataclass(frozen=True, slots=True)
class Included:
    """What a billing period includes by meter, and of which plan.

    names   the other names that the account had in the period
    shared  those of them that share what is included
    priced  the slug of the plan whose prices hold, and the moment (µs) at which they are read
    """

    plan: str
    included: Mapping[str, int]
    names: frozenset[str] = frozenset()
    shared: frozenset[str] = frozenset()
    priced: tuple[str, int] = ("", 0)


@dataclass(frozen=True, slots=True)
class _Stay:
    """A time, from `since` to `until` (µs), that an account row had a name and a plan (None: no plan)."""

    row: int
    name: str
    since: int
    until: int
    plan: int | None
    timezone: str
    anchor: str


class IncludedBook:
    """What billing periods include, for accounts whose terms are read once."""

    def __init__(self, terms: AccountTerms) -> None:
        self._terms = terms

    def of(self, name: str, start: int, end: int, proration: str | None = None) -> Included:
        """Return what an account's billing period between these moments (µs since 1970 UTC) includes.

        `proration` is that of the settings, unless it is given.
        """
        terms, stays = self._terms.at(name, end - 1), self._stays(name, start, end)
        whole = self._whole(name, terms, stays, start, end)
        return (
            self._by_time(name, terms, stays, start, end, whole) if (proration or conf.PRORATION) == "time" else whole
        )

    def _whole(self, name: str, terms: Terms, stays: Sequence[_Stay], start: int, end: int) -> Included:
        granted = _granted(name, terms, stays)
        row = _row(granted)
        others = {stay.name for stay in stays if row and stay.row == row} - {name}
        names = frozenset(other for other in others if _row(self._granted(other, start, end)) == row)
        if isinstance(granted, _Stay):
            assert granted.plan is not None
            plan, included = self._terms.plans.of(granted.plan, granted.until - 1)
            return Included(plan, included, names, names, (plan, granted.until - 1))
        return Included(terms.plan, terms.included, names, names, (terms.plan, end - 1))

    def _granted(self, name: str, start: int, end: int) -> _Stay | int:
        return _granted(name, self._terms.at(name, end - 1), self._stays(name, start, end))

    def _stays(self, name: str, start: int, end: int) -> list[_Stay]:
        """Return the times within a period of all rows that ever had a name; none where its row was the same all along.

        They are under whatever name the rows had then.
        """
        accounts = self._terms.accounts
        if accounts.is_unchanged(name, start):
            return []
        return list(chain.from_iterable(_stays_of(records, start, end) for records in accounts.rows(name)))

    def _by_time(
        self, name: str, terms: Terms, stays: Iterable[_Stay], start: int, end: int, whole: Included
    ) -> Included:
        """Add up what each plan includes in the share of a month that the account was on it, rounded half up."""
        mine = sorted((stay for stay in stays if stay.name == name), key=lambda stay: stay.since)
        month = _month([(terms.timezone, terms.anchor), *((stay.timezone, stay.anchor) for stay in mine)], start, end)
        sums: dict[str, Fraction] = defaultdict(Fraction)
        plan = terms.plan
        if not mine:
            for meter, quantity in terms.included.items():
                sums[meter] += Fraction(quantity * (end - start), month)
        for stay in mine:
            if stay.plan is None:
                continue
            slug, included = self._terms.plans.of(stay.plan, stay.until - 1)
            plan = terms.plan or slug
            for meter, quantity in included.items():
                sums[meter] += Fraction(quantity * (stay.until - stay.since), month)
        shares = {meter: int(total + Fraction(1, 2)) for meter, total in sums.items()}
        return Included(plan, shares, whole.names, priced=whole.priced)


def _stays_of(recorded: Records, start: int, end: int) -> Iterator[_Stay]:
    records = [state for state in recorded if state.since < end]
    if not records:
        return
    # What was before the first record is not known: a row that it does not make was there.
    moments = [records[0].since if records[0].kind == "+" else 0, *(each.since for each in records[1:]), end]
    for record, (since, until) in zip(records, pairwise(moments), strict=True):
        since, until = max(since, start), min(until, end)
        if record.kind != "-" and since < until:
            yield _Stay(record.row, record.name, since, until, record.plan, record.timezone, record.anchor)


def _granted(name: str, terms: Terms, stays: Sequence[_Stay]) -> _Stay | int:
    """Return the account row whose plan at the end is the name's, or the last stay with a plan; 0: there is none."""
    if terms.plan:
        return terms.row
    rows = {stay.row for stay in stays if stay.name == name}
    planned = (stay for stay in stays if stay.row in rows and stay.plan is not None)
    return max(planned, key=lambda stay: (stay.until, stay.since), default=0)


def _row(granted: _Stay | int) -> int:
    return granted.row if isinstance(granted, _Stay) else granted


def _month(terms: Iterable[tuple[str, str]], start: int, end: int) -> int:
    """Return the length (µs) of the month that a period is, or is a part of: its own if it is one under some terms."""
    last = [period_at(timezone, anchor, end - 1) for timezone, anchor in terms]
    if any((month.start, month.end) == (start, end) for month in last):
        return end - start
    month = next((month for month in last if month.end == end), last[0])
    return month.end - month.start
