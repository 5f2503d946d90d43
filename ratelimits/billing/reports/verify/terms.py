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
from ratelimits.billing.models import PlanPrice, Report
from ratelimits.billing.reports.included import Included, IncludedBook
from ratelimits.billing.reports.terms import AccountTerms
from ratelimits.billing.reports.terms.price_book import PriceBook
from ratelimits.models import Account, FrozenPeriod, Plan
from ratelimits.models.accounts.named import NamedCustomer, named, of_tokens
from ratelimits.models.raw.adoption import ADOPTION_REASONS, never_recorded
from ratelimits.usage.periods import SECOND, iso

#: Maximum number of rows that are read at once, and of reports that are verified together.
_CHUNK = 500
#: The time zone and the anchor day of a name without an account row.
_DEFAULT_TERMS = ("UTC", "")


def verify_terms(using: str, checked: Counter[str]) -> Iterator[str]:
    """Yield an error for each report that contradicts its customer's terms, and for each wrong billing period.

    Terms are the plan of the customer's account, its time zone and its anchor day (on which its billing months start).
    The start, the end, the plan, the included quantities and the prices of a report are compared. `checked` counts the
    periods.
    """
    book = PriceBook(using)
    first = Report.objects.using(using).filter(version=1).order_by("period_start", "period_end", "account")
    by_period = groupby(first.iterator(_CHUNK), key=lambda report: (report.period_start, report.period_end))
    for (start, end), group in by_period:
        while reports := list(islice(group, _CHUNK)):
            yield from _verify_reports(using, reports)
            customers = of_tokens(using, {report.customer_id for report in reports})
            terms = AccountTerms(using, customers.values())
            for report in reports:
                customer = customers[report.customer_id]
                yield from _verify_included(using, report, customer, terms, start, end)
                yield from _verify_prices(using, report, customer, IncludedBook(terms), book)
    yield from _verify_periods(using, checked)


@dataclass(slots=True)
class _Months:
    """The billing months that are possible for a customer: those of all time zones and anchor days that it has had."""

    #: Each time zone that the customer's row has had, with the anchor day that it had at the same time.
    terms: set[tuple[str, str]]
    #: Terms before this moment (µs) are not known.
    since: int

    def can_start(self, at: int) -> bool:
        """Return whether one of these billing months starts at the moment `at` (µs since 1970 UTC).

        A month with the default terms is always possible too.
        """
        return any(_starts(*terms, at) for terms in (*self.terms, _DEFAULT_TERMS))


def _months(using: str, customers: Collection[NamedCustomer]) -> dict[int, _Months]:
    """Return, for each customer, the billing months of the rows that were about it."""
    months = {customer.pk: _Months(set(), 0) for customer in customers if customer.pk is not None}
    history: Any = Account.history
    columns = ("id", "customer", "timezone", "billing_anchor", "history_type", "history_change_reason", "since")
    records = history.using(using).filter(customer__in=months)
    records = records.order_by("id", "customer", "version", "history_id").values_list(*columns, named=True)
    with_history = set()
    for (pk, customer), records_of_row in groupby(records, key=lambda record: (record.id, record.customer)):
        first, *later = records_of_row
        with_history.add(pk)
        months[customer].terms |= {(record.timezone, record.billing_anchor) for record in (first, *later)}
        # In two cases, the states of the row before its first record are unknown: if this record does not say that the
        # row was added, or if raw SQL wrote the row and the app recorded it later (ADOPTION_REASONS).
        if first.history_type != "+" or first.history_change_reason in ADOPTION_REASONS:
            months[customer].since = max(months[customer].since, first.since)
    pk_of = {text: one.pk for one in customers if one.pk is not None for text in one.present}
    rows = Account.objects.using(using).filter(identifier__in=pk_of).exclude(pk__in=with_history)
    for text in rows.values_list("identifier", flat=True):
        # All terms of this account are unknown: 2**63 is later than every moment.
        months[pk_of[text]].since = 2**63
    return months


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


def _verify_included(
    using: str, report: Report, customer: NamedCustomer, terms: AccountTerms, start: int, end: int
) -> Iterator[str]:
    candidates = _candidates(terms, customer, start, end)
    if any((report.plan, report.included) == (one.plan, one.included) for one in candidates):
        return
    expected = IncludedBook(terms).of(customer, start, end)
    if _is_known(using, report, customer, expected, end):
        yield (
            f"report {report} includes {_described(report.plan, report.included)}, but its account's terms give"
            f" {_described(expected.plan, expected.included)}"
        )


def _candidates(terms: AccountTerms, customer: NamedCustomer, start: int, end: int) -> Iterator[Included]:
    """Yield the included quantities for each value of PRORATION, because a report does not store this value."""
    for proration in (None, "none", "time"):  # None: the present setting, which is the most likely one
        yield IncludedBook(terms).of(customer, start, end, proration)
    # Older versions of the app used only the terms at the end of a period.
    at_end = terms.at(customer, end - 1)
    yield Included(at_end.plan, at_end.included)


def _is_known(using: str, report: Report, customer: NamedCustomer, expected: Included, end: int) -> bool:
    """Return whether the history has the account, the report's plan and the expected plan at the period's end.

    If a row has never existed, return True for it: it cannot have lost its history.
    """
    accounts: Any = Account.history
    records = accounts.using(using).filter(customer=customer.pk)
    rows = Account.objects.using(using).filter(identifier__in=customer.present)
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
    using: str, report: Report, customer: NamedCustomer, included_book: IncludedBook, book: PriceBook
) -> Iterator[str]:
    """Compare the prices on a report with the prices that its plan had at the end of the report's period."""
    expected = book.of(*included_book.of(customer, report.period_start, report.period_end).price_source)
    recorded = report.prices.get("periods", {}).get(str(report.period_start // SECOND), {})
    if recorded != expected and _prices_are_known(using, report, customer):
        has, should_have = (", ".join(record.get("meters", ())) or "nothing" for record in (recorded, expected))
        yield (
            f"report {report} has prices of {has}, but at the end of the period the plan {report.plan!r} had"
            f" other prices, of {should_have}"
        )


def _prices_are_known(using: str, report: Report, customer: NamedCustomer) -> bool:
    """Return whether the history has all prices that the report's plan had at the end of the period."""
    if not _is_known(using, report, customer, Included(report.plan, {}), report.period_end):
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
        by_pk = {customer.pk: customer for customer in named(using, [pk for pk, _periods in customers])}
        months = _months(using, by_pk.values())
        for pk, periods in customers:
            checked["billing periods"] += len(periods)
            yield from _verify_timeline(by_pk[pk].account, periods, months[pk])


def _verify_timeline(account: str, periods: list[FrozenPeriod], months: _Months) -> Iterator[str]:
    """Verify the frozen periods of one customer."""
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
