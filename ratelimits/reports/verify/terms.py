"""Verify the frozen billing periods, and the periods, plans, included quantities and prices of reports.

The reports are compared with the history of the configuration. If raw SQL wrote a row, its history begins only when
`ratelimits_reload` records the row. Older reports cannot be compared with this row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, islice
from typing import Any

from ratelimits.algorithms.billing_periods import month_of, periods_around
from ratelimits.models import Account, Customer, FrozenPeriod, Name, Plan, PlanPrice, Report, ReportLine
from ratelimits.models.customers import waiting_text
from ratelimits.models.ledger.sums import ExactSum
from ratelimits.models.raw.adoption import ADOPTION_REASONS, never_recorded
from ratelimits.reports.included import Included, IncludedBook
from ratelimits.reports.periods import SECOND, iso
from ratelimits.reports.terms import AccountTerms
from ratelimits.reports.terms.price_book import PriceBook

#: Maximum number of rows that are read at once, and of reports that are verified together.
_CHUNK = 500
#: The time zone and the anchor day of a name without an account row.
_DEFAULT_TERMS = ("UTC", "")


def verify_terms(using: str, checked: Counter[str]) -> Iterator[str]:
    """Yield an error for each report that contradicts its account's terms, and for each wrong billing period.

    Terms are the account's plan, its time zone and its anchor day (on which its billing months start). The start, the
    end, the plan, the included quantities and the prices of a report are compared. `checked` counts the periods.
    """
    book = PriceBook(using)
    first = Report.objects.using(using).filter(version=1).order_by("period_start", "period_end", "account")
    by_period = groupby(first.iterator(_CHUNK), key=lambda report: (report.period_start, report.period_end))
    for (start, end), group in by_period:
        while reports := list(islice(group, _CHUNK)):
            yield from _verify_reports(using, reports)
            terms = AccountTerms(using, {report.account for report in reports})
            yield from _verify_included(using, reports, terms, start, end)
            yield from _verify_prices(using, reports, IncludedBook(terms), start, end, book)
    yield from _verify_periods(using, checked)


@dataclass(slots=True)
class _Months:
    """The billing months that are possible for an account: those of all time zones and anchor days that it has had."""

    #: Each time zone that the account has had, with the anchor day that the account had at the same time.
    terms: set[tuple[str, str]]
    #: Terms before this moment (µs) are not known.
    since: int

    def can_start(self, at: int) -> bool:
        """Return whether one of these billing months starts at the moment `at` (µs since 1970 UTC).

        A month with the default terms is always possible too.
        """
        return any(_starts(*terms, at) for terms in (*self.terms, _DEFAULT_TERMS))


def _months(using: str, names: Collection[str]) -> dict[str, _Months]:
    """Return, for each name, the billing months of this name and of all related names (see `_related`)."""
    related = _related(using, names)
    months = {related_names: _Months(set(), 0) for related_names in related.values()}
    history: Any = Account.history
    columns = ("id", "identifier", "timezone", "billing_anchor", "history_type", "history_change_reason", "since")
    records = history.using(using).filter(identifier__in=related)
    records = records.order_by("id", "version", "history_id").values_list(*columns, named=True)
    with_history = set()
    for pk, records_of_row in groupby(records, key=lambda record: record.id):
        first, *later = records_of_row
        with_history.add(pk)
        group = months[related[first.identifier]]
        group.terms |= {(record.timezone, record.billing_anchor) for record in (first, *later)}
        # In two cases, the states of the row before its first record are unknown: if this record does not say that the
        # row was added, or if raw SQL wrote the row and the app recorded it later (ADOPTION_REASONS).
        if first.history_type != "+" or first.history_change_reason in ADOPTION_REASONS:
            group.since = max(group.since, first.since)
    for account in Account.objects.using(using).filter(identifier__in=related).exclude(pk__in=with_history):
        # All terms of this account are unknown: 2**63 is later than every moment.
        months[related[account.identifier]].since = 2**63
    return {name: months[related[name]] for name in names}


def _related(using: str, names: Collection[str]) -> dict[str, frozenset[str]]:
    """Return, for each name, all related names. Two names are related if one account row has had both.

    Two names that are related to a third name are related too. Related names are verified together for two reasons: a
    new name continues the billing period of the former name, and several rows can have had the same name.
    """
    history: Any = Account.history
    groups = {name: frozenset({name}) for name in names}
    # The primary keys of the account rows that were read, and the names whose account rows are not read yet.
    rows: set[int] = set()
    added = set(names)
    while added:
        new = set(history.using(using).filter(identifier__in=added).values_list("id", flat=True)) - rows
        rows |= new
        pairs = history.using(using).filter(id__in=new).order_by("id").values_list("id", "identifier").distinct()
        added = set()
        for _pk, group in groupby(pairs, key=lambda pair: pair[0]):
            together = {name for _id, name in group}
            added |= together - groups.keys()
            joined = together.union(*(groups.get(name, ()) for name in together))
            groups |= dict.fromkeys(joined, frozenset(joined))
    return groups


@lru_cache(maxsize=16_384)
def _starts(timezone: str, anchor: str, at: int) -> bool:
    """Return whether a billing month with this time zone and anchor day starts at the moment `at` (µs)."""
    try:
        return periods_around(timezone, anchor or None, (), at)[1] == at
    except (ValueError, OverflowError):
        return False


def _verify_reports(using: str, reports: list[Report]) -> Iterator[str]:
    """Compare the reports with the frozen periods."""
    rows = FrozenPeriod.objects.using(using).filter(customer__token__in={report.customer_id for report in reports})
    frozen = {(row.customer.token, row.start): row for row in rows.select_related("customer")}
    for report in reports:
        row = frozen.get((report.customer_id, report.period_start))
        if row is None:
            yield f"report {report} is about a period from {_when(report.period_start)}, which is not frozen"
        elif (row.end, row.timezone, row.label) != (report.period_end, report.timezone, report.label):
            yield (
                f"report {report} ends at {_when(report.period_end)} and belongs to the month {report.label} in"
                f" {report.timezone}, but the row of its billing period says {_when(row.end)}, {row.label} and"
                f" {row.timezone}"
            )


def _verify_included(using: str, reports: list[Report], terms: AccountTerms, start: int, end: int) -> Iterator[str]:
    for report in reports:
        candidates = _candidates(terms, report.account, start, end)
        if any(_matches(using, report, candidate, start, end) for candidate in candidates):
            continue
        expected = IncludedBook(terms).of(report.account, start, end)
        if _is_known(using, report, expected, end):
            yield (
                f"report {report} includes {_described(report.plan, report.included)}, but its account's terms give"
                f" {_described(expected.plan, expected.included)}"
            )


def _candidates(terms: AccountTerms, name: str, start: int, end: int) -> Iterator[Included]:
    """Yield the included quantities for each value of PRORATION, because a report does not store this value."""
    for proration in (None, "none", "time"):  # None: the present setting, which is the most likely one
        yield IncludedBook(terms).of(name, start, end, proration)
    # Older versions of the app used only the terms at the end of a period.
    at_end = terms.at(name, end - 1)
    yield Included(at_end.plan, at_end.included)


def _matches(using: str, report: Report, expected: Included, start: int, end: int) -> bool:
    """Return whether a report has the expected plan and the expected quantities.

    The expected quantities are compared without the units that earlier reports of the account's other names include.
    """
    if report.plan != expected.plan:
        return False
    used: Counter[str] = Counter()
    if expected.shared:
        lines = ReportLine.objects.using(using).filter(report__account__in=expected.shared, report__lt=report.pk)
        lines = lines.filter(usage_period__gte=start // SECOND, usage_period__lt=end // SECOND)
        used.update(dict(lines.values_list("meter").order_by().annotate(ExactSum("included_quantity"))))
    included: Any = {meter: quantity - used[meter] for meter, quantity in expected.included.items()}
    return bool(report.included == included)


def _is_known(using: str, report: Report, expected: Included, end: int) -> bool:
    """Return whether the history has the account, the report's plan and the expected plan at the period's end.

    If a row has never existed, return True for it: it cannot have lost its history.
    """
    accounts: Any = Account.history
    records = accounts.using(using).filter(identifier=report.account)
    rows = Account.objects.using(using).filter(identifier=report.account)
    if not records.filter(since__lt=end).exists() and (records.exists() or rows.exists()):
        return False
    plans: Any = Plan.history
    for slug in {report.plan, expected.plan} - {""}:
        records = plans.using(using).filter(slug=slug)
        known = records.filter(since__lt=end).exists()
        if not known and (records.exists() or Plan.objects.using(using).filter(slug=slug).exists()):
            return False
    return True


def _verify_prices(
    using: str, reports: list[Report], included_book: IncludedBook, start: int, end: int, book: PriceBook
) -> Iterator[str]:
    """Compare the prices on each report with the prices that its plan had at the end of the report's period."""
    for report in reports:
        included = included_book.of(report.account, start, end)
        if included.names:
            continue  # The account had several names. Perhaps the report has the prices of another name.
        expected = book.of(*included.price_source)
        recorded = report.prices.get("periods", {}).get(str(report.period_start // SECOND), {})
        if recorded != expected and _prices_are_known(using, report):
            has, should_have = (", ".join(record.get("meters", ())) or "nothing" for record in (recorded, expected))
            yield (
                f"report {report} has prices of {has}, but at the end of the period the plan {report.plan!r} had"
                f" other prices, of {should_have}"
            )


def _prices_are_known(using: str, report: Report) -> bool:
    """Return whether the history has all prices that the report's plan had at the end of the period."""
    if not _is_known(using, report, Included(report.plan, {}), report.period_end):
        return False
    plans: Any = Plan.history
    ids = set(plans.using(using).filter(slug=report.plan).values_list("id", flat=True))
    records: Any = PlanPrice.history
    adopted = records.using(using).filter(history_type="+", history_change_reason__in=ADOPTION_REASONS)
    late = adopted.filter(plan_id__in=ids, since__gte=report.period_end)
    return not late.exists() and not never_recorded(PlanPrice, using).filter(plan__in=ids).exists()


def _described(plan: str, included: Any) -> str:
    return f"{included} of {plan!r}" if plan or included else "nothing"


def _verify_periods(using: str, checked: Counter[str]) -> Iterator[str]:
    """Yield an error for each frozen period that no terms give, that overlaps another, or whose month is wrong."""
    rows = FrozenPeriod.objects.using(using).order_by("customer", "start").iterator(_CHUNK)
    by_customer = ((pk, list(group)) for pk, group in groupby(rows, key=lambda row: row.customer_id))
    while customers := list(islice(by_customer, _CHUNK)):
        texts = _texts_of(using, [pk for pk, _periods in customers])
        months = _months(using, {text for names in texts.values() for text in names})
        for pk, periods in customers:
            checked["billing periods"] += len(periods)
            yield from _verify_timeline(texts[pk][0], periods, _joined([months[text] for text in texts[pk]]))


def _texts_of(using: str, customers: Collection[int]) -> dict[int, list[str]]:
    """Return all texts that a customer's terms can have been written under: its names, the newest first."""
    texts: dict[int, list[str]] = {}
    names = Name.objects.using(using).filter(customer__in=customers).order_by("-since", "identifier")
    for pk, text in names.values_list("customer", "identifier"):
        texts.setdefault(pk, []).append(text)
    for customer in Customer.objects.using(using).filter(pk__in=customers).defer("salt"):
        assert customer.pk is not None
        texts.setdefault(customer.pk, []).append(waiting_text(customer))
    return texts


def _joined(months: Collection[_Months]) -> _Months:
    """Return the billing months that are possible with the terms of any of these months."""
    return _Months({terms for one in months for terms in one.terms}, max(one.since for one in months))


def _verify_timeline(account: str, periods: list[FrozenPeriod], months: _Months) -> Iterator[str]:
    """Verify the frozen periods of one account."""
    end_before = 0
    for period in periods:
        name = f"the billing period of {account or 'anonymous'} from {_when(period.start)} to {_when(period.end)}"
        if not end_before <= period.start < period.end:
            yield f"{name} overlaps the period before it, or ends before its start"
        for what, at in (("starts", period.start), ("ends", period.end)):
            if at >= months.since and not months.can_start(at):
                yield f"{name} {what} when no billing month of its account starts"
        if period.label != (label := _label(period)):
            yield f"{name} belongs to the month {period.label}, but its last moment is in {label}"
        end_before = period.end


def _label(period: FrozenPeriod) -> str:
    """Return the month of a period's last moment; a text about the end if it is outside the calendar."""
    try:
        return month_of(period.end - 1, period.timezone)
    except OverflowError:
        return f"{period.end} µs"


def _when(at: int) -> str:
    """Return a moment (µs since 1970 UTC) as text, even if it is outside the calendar."""
    try:
        return iso(at)
    except OverflowError:
        return f"{at} µs"
