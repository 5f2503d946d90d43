"""What a plan includes in one billing period of an account, whatever became of the account in that period.

Without proration that is all that the account's plan includes at the period's end, or the last plan that the account
had in it; names that one account had one after the other share it. With RATELIMITS["PRORATION"] "time" each plan
includes as much as the time that the account was on it is of a month. Either way the names share the prices of the plan
at the period's end, or of the last one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

from ratelimits.conf import conf
from ratelimits.models import Account
from ratelimits.reports.periods import period_at
from ratelimits.reports.terms import Terms, TermsBook


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


def included_in(using: str, names: Collection[str], start: int, end: int) -> dict[str, Included]:
    """Return what the billing period between these moments (µs since 1970 UTC) includes for each account."""
    rows = Account.objects.using(using).filter(identifier__in=names, since__lte=start)
    quiet = set(rows.values_list("identifier", flat=True))
    stays = _stays(using, set(names) - quiet, start, end)
    at_end = TermsBook(using, end - 1).of({*names, *(stay.name for stay in stays)})
    granted = {name: _granted(name, terms, stays) for name, terms in at_end.items()}
    whole = {name: _whole(using, name, at_end[name], granted, stays, end) for name in names}
    if conf.PRORATION == "time":
        return {name: _by_time(using, name, at_end[name], stays, start, end, whole[name]) for name in names}
    return whole


def _stays(using: str, names: Collection[str], start: int, end: int) -> list[_Stay]:
    """Return the times, within the period, of all account rows that had one of these names, under whatever name."""
    if not names:
        return []
    history: Any = Account.history
    named = history.using(using).filter(identifier__in=names, since__lt=end)
    records = history.using(using).filter(id__in=named.values("id"), since__lt=end).order_by("version", "history_id")
    by_row: dict[int, list[Any]] = defaultdict(list)
    for record in records:
        by_row[record.id].append(record)
    return [stay for found in by_row.values() for stay in _stays_of(found, start, end)]


def _stays_of(records: list[Any], start: int, end: int) -> Iterator[_Stay]:
    # What was before the first record is not known: a row that it does not make was there.
    moments = [records[0].since if records[0].history_type == "+" else 0, *(each.since for each in records[1:]), end]
    for record, (since, until) in zip(records, pairwise(moments), strict=True):
        since, until = max(since, start), min(until, end)
        if record.history_type != "-" and since < until:
            about = record.plan_id, record.timezone, record.billing_anchor or ""
            yield _Stay(record.id, record.identifier, since, until, *about)


def _granted(name: str, terms: Terms, stays: Iterable[_Stay]) -> _Stay | int:
    """Return the account row whose plan at the end is the name's, or the last stay with a plan; 0: there is none."""
    if terms.plan:
        return terms.row
    rows = {stay.row for stay in stays if stay.name == name}
    planned = (stay for stay in stays if stay.row in rows and stay.plan is not None)
    return max(planned, key=lambda stay: (stay.until, stay.since), default=0)


def _whole(
    using: str, name: str, terms: Terms, granted: Mapping[str, _Stay | int], stays: Iterable[_Stay], end: int
) -> Included:
    mine = granted[name]
    row = mine.row if isinstance(mine, _Stay) else mine
    names = frozenset(
        stay.name for stay in stays if row and stay.row == row and stay.name != name and _row(granted[stay.name]) == row
    )
    if isinstance(mine, _Stay):
        assert mine.plan is not None
        plan, included = TermsBook(using, mine.until - 1).plan(mine.plan)
        return Included(plan, included, names, names, (plan, mine.until - 1))
    return Included(terms.plan, terms.included, names, names, (terms.plan, end - 1))


def _row(granted: _Stay | int) -> int:
    return granted.row if isinstance(granted, _Stay) else granted


def _by_time(
    using: str, name: str, terms: Terms, stays: Iterable[_Stay], start: int, end: int, whole: Included
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
        slug, included = TermsBook(using, stay.until - 1).plan(stay.plan)
        plan = terms.plan or slug
        for meter, quantity in included.items():
            sums[meter] += Fraction(quantity * (stay.until - stay.since), month)
    shares = {meter: int(total + Fraction(1, 2)) for meter, total in sums.items()}
    return Included(plan, shares, whole.names, priced=whole.priced)


def _month(terms: Iterable[tuple[str, str]], start: int, end: int) -> int:
    """Return the length (µs) of the month that a period is, or is a part of: its own if it is one under some terms."""
    last = [period_at(timezone, anchor, end - 1) for timezone, anchor in terms]
    if any((month.start, month.end) == (start, end) for month in last):
        return end - start
    month = next((month for month in last if month.end == end), last[0])
    return month.end - month.start
