"""Find the quantities that an account's plan includes in a billing period.

The account can have several plans in one period. Without proration, its plan at the end of the period gives the
quantities. If the account has no plan at the end, the last plan that it had in the period gives the quantities. If the
account was renamed in the period, its names share the quantities.

With proration (RATELIMITS["PRORATION"] is "time"), each plan gives a share of its quantities: the share of the month in
which the account was on this plan.

In both cases the prices are those of the plan at the end of the period. If the account has no plan at the end, they are
the prices of the last plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, pairwise

from ratelimits.algorithms.billing_periods import Timeline
from ratelimits.conf import conf
from ratelimits.reports.terms import AccountTerms, Terms
from ratelimits.reports.terms.account_book import Records


@dataclass(frozen=True, slots=True)
class Included:
    """The quantities that an account's plan or plans include in a billing period.

    plan          the slug of the plan at the end of the period, or else of the last plan in the period
    included      the included quantities, by meter
    names         the other names that the account had in the period
    shared        the names with which this name shares the included quantities: all `names`, or none with proration
    price_source  the slug of the plan whose prices apply, and the moment (µs since 1970 UTC) at which the plan had
                  these prices
    """

    plan: str
    included: Mapping[str, int]
    names: frozenset[str] = frozenset()
    shared: frozenset[str] = frozenset()
    price_source: tuple[str, int] = ("", 0)


@dataclass(frozen=True, slots=True)
class _RowSpan:
    """The span from `since` to `until` (µs since 1970 UTC) in which an account row did not change.

    `row` is the primary key of the account row. `plan` is the primary key of its plan; None if it had no plan.
    """

    row: int
    name: str
    since: int
    until: int
    plan: int | None
    timezone: str
    anchor: str


class IncludedBook:
    """Finds the included quantities of billing periods. The terms of the accounts are read only once."""

    def __init__(self, terms: AccountTerms) -> None:
        self._terms = terms

    def of(self, name: str, start: int, end: int, proration: str | None = None) -> Included:
        """Return the included quantities of an account's billing period from `start` to `end` (µs since 1970 UTC).

        If `proration` is given, it replaces the setting PRORATION.
        """
        terms, spans = self._terms.at(name, end - 1), self._spans(name, start, end)
        unprorated = self._without_proration(name, terms, spans, start, end)
        if (proration or conf.PRORATION) == "time":
            return self._with_proration(name, terms, spans, start, end, unprorated)
        return unprorated

    def _without_proration(self, name: str, terms: Terms, spans: Sequence[_RowSpan], start: int, end: int) -> Included:
        """Return the quantities of the plan at the end of the period.

        If the account has no plan at the end, return the quantities of its last plan in the period.
        """
        source = _source_of_plan(name, terms, spans)
        row = _row_of(source)
        # At the end of the period, a former name can belong to another account row. Then this name has the plan of that
        # other row, so it is left out.
        others = {span.name for span in spans if row and span.row == row} - {name}
        names = frozenset(other for other in others if _row_of(self._source_of_plan(other, start, end)) == row)
        if isinstance(source, _RowSpan):
            assert source.plan is not None
            plan, included = self._terms.plans.of(source.plan, source.until - 1)
            return Included(plan, included, names, shared=names, price_source=(plan, source.until - 1))
        return Included(terms.plan, terms.included, names, shared=names, price_source=(terms.plan, end - 1))

    def _source_of_plan(self, name: str, start: int, end: int) -> _RowSpan | int:
        return _source_of_plan(name, self._terms.at(name, end - 1), self._spans(name, start, end))

    def _spans(self, name: str, start: int, end: int) -> list[_RowSpan]:
        """Return the spans, within a period, of all account rows that ever had this name.

        The result includes the spans in which such a row had another name. Return [] if the account's row has not
        changed since the start of the period.
        """
        accounts = self._terms.accounts
        if accounts.is_unchanged(name, start):
            return []
        return list(chain.from_iterable(_row_spans(records, start, end) for records in accounts.rows(name)))

    def _with_proration(
        self, name: str, terms: Terms, spans: Iterable[_RowSpan], start: int, end: int, unprorated: Included
    ) -> Included:
        """Return the sum of all plans' shares for each meter, rounded half up.

        `unprorated` is the result without proration. The result with proration has the same names and prices.
        """
        under_name = sorted((span for span in spans if span.name == name), key=lambda span: span.since)
        all_terms = [(terms.timezone, terms.anchor), *((span.timezone, span.anchor) for span in under_name)]
        month = _month_length(all_terms, start, end)
        sums: dict[str, Fraction] = defaultdict(Fraction)
        plan = terms.plan
        if not under_name:  # The account's row did not change in the period.
            for meter, quantity in terms.included.items():
                sums[meter] += Fraction(quantity * (end - start), month)
        for span in under_name:
            if span.plan is None:
                continue
            slug, included = self._terms.plans.of(span.plan, span.until - 1)
            plan = terms.plan or slug
            for meter, quantity in included.items():
                sums[meter] += Fraction(quantity * (span.until - span.since), month)
        # `int` cuts the fraction off. With 1/2 added before, halves are rounded up.
        shares = {meter: int(total + Fraction(1, 2)) for meter, total in sums.items()}
        # Each name of the account has its own shares, so the names share nothing: `shared` is empty.
        return Included(plan, shares, unprorated.names, price_source=unprorated.price_source)


def _row_spans(recorded: Records, start: int, end: int) -> Iterator[_RowSpan]:
    """Yield the spans of one account row within a period."""
    records = [record for record in recorded if record.since < end]
    if not records:
        return
    # If the first record does not say that the row was added ("+"), the row existed before this record. The row's
    # earlier values are not known, so the record's values are used for the time before the record too.
    first, *later = records
    moments = [first.since if first.kind == "+" else 0, *(record.since for record in later), end]
    for record, (since, until) in zip(records, pairwise(moments), strict=True):
        since, until = max(since, start), min(until, end)
        if record.kind != "-" and since < until:
            yield _RowSpan(record.row, record.name, since, until, record.plan, record.timezone, record.anchor)


def _source_of_plan(name: str, terms: Terms, spans: Sequence[_RowSpan]) -> _RowSpan | int:
    """Return where the account's plan comes from.

    If `terms` has a plan, return the primary key of the account row. Otherwise return the last span with a plan; 0 if
    no span has a plan.
    """
    if terms.plan:
        return terms.row
    rows = {span.row for span in spans if span.name == name}
    with_plan = (span for span in spans if span.row in rows and span.plan is not None)
    return max(with_plan, key=lambda span: (span.until, span.since), default=0)


def _row_of(source: _RowSpan | int) -> int:
    """Return the primary key of the account row in a result of `_source_of_plan`; 0 if there is none."""
    return source.row if isinstance(source, _RowSpan) else source


def _month_length(terms: Iterable[tuple[str, str]], start: int, end: int) -> int:
    """Return the length (µs) of the billing month that contains a billing period. Most periods are a whole month.

    Each of the `terms` is a time zone and an anchor day.
    """
    months = [Timeline(timezone, anchor).at(end - 1) for timezone, anchor in terms]
    if any((month.start, month.end) == (start, end) for month in months):
        return end - start
    # The period is only a part of a month, because the terms changed. Prefer a month that ends when the period ends.
    month = next((month for month in months if month.end == end), months[0])
    return month.end - month.start
