"""Make the statements to export: finalised reports from stored lines, and provisional reports from the ledger."""

from __future__ import annotations

import heapq
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from django.db.models import Exists, Max, OuterRef

from ratelimits.algorithms.billing_periods import Period, Span
from ratelimits.billing.models import Adjustment, Report, ReportLine
from ratelimits.billing.reports.build import (
    CHUNK,
    Allowance,
    Group,
    adjustment_line,
    grouped,
    in_order,
    of_customer,
    of_period,
    unused_line,
    usage_lines,
)
from ratelimits.billing.reports.closing.ahead import GroupsAhead
from ratelimits.billing.reports.closing.close import in_account_order, shards_of
from ratelimits.billing.reports.closing.closing_data import ClosingData
from ratelimits.billing.reports.closing.customer_periods import CustomerPeriods, MissingPeriodError
from ratelimits.billing.reports.closing.labelled import with_open_periods, with_untallied
from ratelimits.billing.reports.gaps import Gaps
from ratelimits.billing.reports.included import Included
from ratelimits.billing.reports.limits import Limits
from ratelimits.billing.reports.lost_replies import LostReplies
from ratelimits.billing.reports.rows import FINAL, PROVISIONAL, VERSION, Row, RowMaker
from ratelimits.billing.reports.statements.unused import candidates
from ratelimits.billing.reports.terms import RuleBook
from ratelimits.conf import conf
from ratelimits.models.accounts.named import NamedCustomer, named_now
from ratelimits.usage.periods import checked_month, span_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Statement:
    """A report and its rows. The rows can be read only once.

    `unused` says that the customer has neither usage nor adjustments in the period, so the period gets no final report.
    `included` says what the plan includes. It is None for a final report, and if `unused` is true. `account_name` is
    the current name of the customer's account, for a report that is not final.
    """

    report: Report
    status: str
    rows: Iterable[Row]
    included: Included | None = None
    unused: bool = False
    account_name: str = ""


def statements(
    month: str,
    *,
    account: str | None = None,
    using: str | None = None,
    all_accounts: bool = False,
    columns_version: int | None = None,
) -> Iterator[Statement]:
    """Return the statements of a month's billing periods, sorted by account and start. The month is like "2026-11".

    A billing period belongs to the month of its last moment, in its own time zone (`Period.label`).

    If `account` is given, return only the statements of the customer whom this text names now. A finalised report
    appears only once, in its newest version. If `all_accounts` is true, each customer in the table of accounts without
    any statement gets a statement with one line of zeros. `columns_version` is the version of the provisional reports'
    columns. Its default is the version that `columns_of` returns.

    Read the rows of a statement before the next statement, because the rows are not stored in memory. Raise ValueError
    if `month` is not a month.
    """
    using = using or conf.DATABASE
    start, end = span_of(month)
    customer = None if account is None else named_now(using, [account])[account]
    version = columns_version or columns_of(month, account=account, using=using)
    used = heapq.merge(
        _final(using, month, customer),
        _provisional(using, month, customer, start, end, version),
        key=lambda statement: _order(statement.report),
    )
    return _with_unused(used, _unused(using, month, customer, start, end, version)) if all_accounts else used


def _order(report: Report) -> tuple[str, str, int]:
    return report.account, report.customer_id, report.period_start


def newest_columns(reports: Iterable[Report]) -> int:
    """Return the version of the columns in a file with these reports: the newest version among them."""
    return max(report.columns_version for report in reports)


def columns_of(month: str, *, account: str | None = None, using: str | None = None) -> int:
    """Return the version of the columns in a month's file: the newest version among the month's finalised reports.

    So if a month was closed before a column was added, its file does not get this column. If the month has no finalised
    report, return VERSION. Raise ValueError if `month` is not a month.
    """
    using = using or conf.DATABASE
    reports = Report.objects.using(using).filter(label=checked_month(month))
    if account is not None:
        reports = reports.filter(customer__token=named_now(using, [account])[account].token)
    newest: int | None = reports.aggregate(newest=Max("columns_version"))["newest"]
    return newest or VERSION


def statement(report: Report) -> Statement:
    """Return the statement of a report version: it has the lines of this version and of all earlier versions."""
    return Statement(report, FINAL, _final_rows(report))


def rows(statements: Iterable[Statement]) -> Iterator[Row]:
    """Yield the rows of all statements, one statement after another."""
    for statement in statements:
        yield from statement.rows


def _final(using: str, month: str, customer: NamedCustomer | None) -> Iterator[Statement]:
    """Yield the statements of closed periods: each has the newest version of a report."""
    reports = Report.objects.using(using).filter(label=month)
    if customer is not None:
        reports = reports.filter(customer__token=customer.token)
    newer = Report.objects.filter(
        customer=OuterRef("customer"), period_start=OuterRef("period_start"), version__gt=OuterRef("version")
    )
    newest = reports.exclude(Exists(newer)).order_by(*in_order(using, "account", "customer_id", "period_start"))
    yield from map(statement, newest.iterator(chunk_size=CHUNK))


def versions(report: Report) -> Iterator[Report]:
    """Yield the versions of a report up to this one, oldest first."""
    using = report._state.db or conf.DATABASE
    reports = Report.objects.using(using).filter(customer__token=report.customer_id, period_start=report.period_start)
    yield from reports.filter(version__lte=report.version).order_by("version")


def _final_rows(report: Report) -> Iterator[Row]:
    for version in versions(report):
        yield from version_rows(version)


def version_rows(report: Report) -> Iterator[Row]:
    """Return an iterator over the rows that a version added."""
    return (row for row, _period in version_lines(report))


def version_lines(report: Report) -> Iterator[tuple[Row, str]]:
    """Yield the rows that a version added.

    Each row comes with the start of the billing period of its usage (s since 1970 UTC, as text).
    """
    make = RowMaker(report, FINAL)
    lines = ReportLine.objects.using(report._state.db or conf.DATABASE).filter(report=report).order_by("number")
    # Read only values, because making a model instance for each line would take most of an export's time.
    for usage_period, *values in lines.values_list("usage_period", *make.fields).iterator(chunk_size=CHUNK):
        yield make.of_values(values), str(usage_period)


def _provisional(
    using: str, month: str, customer: NamedCustomer | None, start: int, end: int, version: int
) -> Iterator[Statement]:
    """Yield the statements of open periods. `start` and `end` (µs since 1970 UTC) are those of `span_of`."""
    rules = RuleBook(using)
    texts = None if customer is None else {name.text for name in customer.names}
    gaps, lost_replies = Gaps.between(using, start, end), LostReplies(using, start, end, texts)
    limits = Limits(using, rules)
    for open_period, period_groups in _open_periods(using, month, customer, start, end):
        payer, period, included = open_period.customer, open_period.period, open_period.included
        report = draft(payer, period, included, open_period.shards, gaps, version)
        allowance = Allowance(included.included)
        lost = lost_replies.of(payer, period.start, period.end)
        lines = chain(
            # `Limits.of` adds to each group the limit that its line shows.
            usage_lines(report, limits.of(period_groups, payer), rules, {period.start: allowance}, lost),
            (adjustment_line(report, adjustment, allowance) for adjustment in open_period.adjustments),
        )
        made = map(RowMaker(report, PROVISIONAL).from_line, lines)
        yield Statement(report, PROVISIONAL, made, included, account_name=open_period.account_name)


class _OpenPeriod(NamedTuple):
    """A customer's billing period without a report, the plan's included quantities in it, and its adjustments.

    `shards` are the shards of the customer, and `account_name` is the current name of its account.
    """

    customer: NamedCustomer
    period: Period
    included: Included
    adjustments: list[Adjustment]
    shards: list[int]
    account_name: str


def _open_periods(
    using: str, month: str, customer: NamedCustomer | None, start: int, end: int
) -> Iterator[tuple[_OpenPeriod, Iterator[Group]]]:
    """Yield the open periods of a month that have usage or adjustments, each with its groups, sorted by account.

    The groups are sums of ledger lines that are on no report.
    """
    untallied = with_untallied(using, start, end, customer)
    for chunk in in_account_order(using, with_open_periods(using, month, customer) | untallied.pks, untallied.texts):
        # The last argument has the locked shards. There are none, because nothing is written here.
        data, shards = ClosingData(using, chunk, {}), shards_of(using, chunk)
        found: list[_OpenPeriod] = []
        for one in chunk:
            periods = CustomerPeriods(data, one, untallied.bins_of(one))
            try:
                of_month = [period for period in periods.open() if period.label == month]
            except MissingPeriodError as error:  # One customer must not stop the whole export.
                logger.error("The open periods of account %r are left out: %s", one.account, error)
                continue
            for period in of_month:
                included, adjustments = data.included(one, period), periods.adjustments(period)
                about = shards[one.token], data.account_name(one)
                found.append(_OpenPeriod(one, period, included, adjustments, *about))
        ahead = _groups_ahead(using, found)
        for each in found:
            period, span = each.period, (each.period.start, each.period.end)
            text = each.customer.only_text(*span)
            groups: Iterable[Group] | None = None if text is None else ahead.of(text, span)
            if groups is None:
                groups = grouped(of_customer(each.customer, *span), using)
            period_groups = of_period(groups, period.start)
            first = next(period_groups, None)
            # A line can have no usage that a report shows. Then only an adjustment makes a report.
            if first is not None or each.adjustments:
                yield each, period_groups if first is None else chain([first], period_groups)


def _groups_ahead(using: str, found: Iterable[_OpenPeriod]) -> GroupsAhead:
    """Return the groups of the customers that have only one text in their period."""
    spans: dict[str, set[Span]] = defaultdict(set)
    for each in found:
        text = each.customer.only_text(each.period.start, each.period.end)
        if text is not None:
            spans[text].add((each.period.start, each.period.end))
    return GroupsAhead(using, spans, None)


def _unused(
    using: str, month: str, customer: NamedCustomer | None, start: int, end: int, version: int
) -> Iterator[Statement]:
    """Yield a statement without usage for each customer in the table of accounts.

    `_with_unused` leaves out the statements of customers that have another statement.
    """
    gaps = Gaps.between(using, start, end)
    for payer, shards, period, terms in candidates(using, month, customer):
        report = draft(payer, period, Included(terms.plan, terms.included), shards, gaps, version)
        rows = (RowMaker(report, PROVISIONAL).from_line(unused_line(report)),)
        yield Statement(report, PROVISIONAL, rows, unused=True)


def _with_unused(used: Iterator[Statement], unused: Iterator[Statement]) -> Iterator[Statement]:
    """Yield all statements in `used`, and those in `unused` whose customer has no statement in `used`."""
    # For each customer, `merge` yields the statements in `used` first, because they are its first argument.
    marked = ((statement, True) for statement in used), ((statement, False) for statement in unused)
    last = None
    for statement, is_used in heapq.merge(*marked, key=lambda pair: _order(pair[0].report)[:2]):
        if is_used or statement.report.customer_id != last:
            yield statement
        last = statement.report.customer_id


def draft(
    customer: NamedCustomer,
    period: Period,
    included: Included,
    shards: list[int],
    gaps: Gaps,
    columns_version: int = VERSION,
) -> Report:
    """Return the provisional report of a billing period. Do not save this report."""
    return Report(
        customer=customer.row,
        account=customer.account,
        period_start=period.start,
        period_end=period.end,
        timezone=period.timezone,
        label=period.label,
        version=0,
        plan=included.plan,
        included=dict(included.included),
        gaps=gaps.text(shards, customer, period.start, period.end),
        columns_version=columns_version,
    )
