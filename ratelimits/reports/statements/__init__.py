"""Make the statements to export: finalised reports from stored lines, and provisional reports from the ledger."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, groupby, islice
from typing import NamedTuple

from django.db.models import Exists, Max, OuterRef, Q

from ratelimits.algorithms.billing_periods import Period, Span
from ratelimits.conf import conf
from ratelimits.models import Adjustment, Customer, Report, ReportLine
from ratelimits.reports.build import (
    CHUNK,
    Allowance,
    Group,
    adjustment_line,
    grouped,
    in_order,
    of_period,
    of_text,
    unused_line,
    usage_lines,
)
from ratelimits.reports.closing.account_periods import AccountPeriods, MissingPeriodError
from ratelimits.reports.closing.close import home_shard
from ratelimits.reports.closing.closing_data import ClosingData
from ratelimits.reports.closing.labelled import untallied_bins, with_open_periods
from ratelimits.reports.gaps import Gaps
from ratelimits.reports.included import Included
from ratelimits.reports.limits import Limits
from ratelimits.reports.lost_replies import LostReplies
from ratelimits.reports.periods import SECOND, checked_month, span_of, within
from ratelimits.reports.rows import FINAL, PROVISIONAL, VERSION, Row, RowMaker
from ratelimits.reports.statements.unused import candidates
from ratelimits.reports.terms import RuleBook

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Statement:
    """A report and its rows. The rows can be read only once.

    `unused` says that the account has neither usage nor adjustments in the period, so the period gets no final report.
    `included` says what the plan includes. It is None for a final report, and if `unused` is true.
    """

    report: Report
    status: str
    rows: Iterable[Row]
    included: Included | None = None
    unused: bool = False


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

    If `account` is given, return only the statements of this account. A finalised report appears only once, in its
    newest version. If `all_accounts` is true, each account without any statement gets a statement with one line of
    zeros. `columns_version` is the version of the provisional reports' columns. Its default is the version that
    `columns_of` returns.

    Read the rows of a statement before the next statement, because the rows are not stored in memory. Raise ValueError
    if `month` is not a month.
    """
    using = using or conf.DATABASE
    start, end = span_of(month)
    version = columns_version or columns_of(month, account=account, using=using)
    used = heapq.merge(
        _final(using, month, account),
        _provisional(using, month, account, start, end, version),
        key=lambda statement: (statement.report.account, statement.report.period_start),
    )
    return _with_unused(used, _unused(using, month, account, start, end, version)) if all_accounts else used


def newest_columns(reports: Iterable[Report]) -> int:
    """Return the version of the columns in a file with these reports: the newest version among them."""
    return max(report.columns_version for report in reports)


def columns_of(month: str, *, account: str | None = None, using: str | None = None) -> int:
    """Return the version of the columns in a month's file: the newest version among the month's finalised reports.

    So if a month was closed before a column was added, its file does not get this column. If the month has no finalised
    report, return VERSION. Raise ValueError if `month` is not a month.
    """
    reports = Report.objects.using(using or conf.DATABASE).filter(label=checked_month(month))
    if account is not None:
        reports = reports.filter(account=account)
    newest: int | None = reports.aggregate(newest=Max("columns_version"))["newest"]
    return newest or VERSION


def statement(report: Report) -> Statement:
    """Return the statement of a report version: it has the lines of this version and of all earlier versions."""
    return Statement(report, FINAL, _final_rows(report))


def rows(statements: Iterable[Statement]) -> Iterator[Row]:
    """Yield the rows of all statements, one statement after another."""
    for statement in statements:
        yield from statement.rows


def _final(using: str, month: str, account: str | None) -> Iterator[Statement]:
    """Yield the statements of closed periods: each has the newest version of a report."""
    reports = Report.objects.using(using).filter(label=month)
    if account is not None:
        reports = reports.filter(account=account)
    newer = Report.objects.filter(
        account=OuterRef("account"), period_start=OuterRef("period_start"), version__gt=OuterRef("version")
    )
    newest = reports.exclude(Exists(newer)).order_by(*in_order(using, "account", "period_start"))
    yield from map(statement, newest.iterator(chunk_size=CHUNK))


def versions(report: Report) -> Iterator[Report]:
    """Yield the versions of a report up to this one, oldest first."""
    using = report._state.db or conf.DATABASE
    reports = Report.objects.using(using).filter(account=report.account, period_start=report.period_start)
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
    using: str, month: str, account: str | None, start: int, end: int, version: int
) -> Iterator[Statement]:
    """Yield the statements of open periods. `start` and `end` (µs since 1970 UTC) are those of `span_of`."""
    rules = RuleBook(using)
    accounts = None if account is None else [account]
    gaps, lost_replies = Gaps.between(using, start, end), LostReplies(using, start, end, accounts)
    # The allowances that several names of an account share, by these names and the start of the billing period.
    shared: dict[tuple[frozenset[str], int], Allowance] = {}
    limits = Limits(using, rules)
    for open_period, period_groups in _open_periods(using, month, account, start, end):
        first_group = next(period_groups)
        report = draft(first_group, open_period.customer, open_period.period, open_period.included, gaps, version)
        allowance = Allowance(open_period.included.included)
        if open_period.included.shared:
            names = frozenset({report.account}) | open_period.included.shared
            allowance = shared.setdefault((names, open_period.period.start), allowance)
        with_usage = (group for group in chain([first_group], period_groups) if "meter" in group)
        lost = lost_replies.of(report.account, open_period.spans)
        lines = chain(
            # `Limits.of` adds to each group the limit that its line shows.
            usage_lines(report, limits.of(with_usage), rules, {open_period.period.start: allowance}, lost),
            (adjustment_line(report, adjustment, allowance) for adjustment in open_period.adjustments),
        )
        yield Statement(report, PROVISIONAL, map(RowMaker(report, PROVISIONAL).from_line, lines), open_period.included)


class _OpenPeriod(NamedTuple):
    """A customer's billing period without a report, the plan's included quantities in it, and its adjustments.

    `spans` are the spans whose usage belongs to the period.
    """

    customer: Customer
    period: Period
    included: Included
    adjustments: list[Adjustment]
    spans: list[Span]


def _open_periods(
    using: str, month: str, account: str | None, start: int, end: int
) -> Iterator[tuple[_OpenPeriod, Iterator[Group]]]:
    """Yield the open periods of a month that have usage or adjustments, each with its groups, sorted by account.

    The groups are sums of ledger lines that are on no report.
    """
    bins = untallied_bins(using, start, end, account)
    names = iter(sorted({*with_open_periods(using, month, account), *bins}))
    while chunk := list(islice(names, CHUNK)):
        # The last argument has the locked shards. There are none, because nothing is written here.
        data = ClosingData(using, chunk, {})
        found: dict[tuple[str, int], _OpenPeriod] = {}
        for name in chunk:
            periods = AccountPeriods(data, name, bins.get(name, ()))
            try:
                of_month = [period for period in periods.open() if period.label == month]
            except MissingPeriodError as error:  # One account must not stop the whole export.
                logger.error("The open periods of account %r are left out: %s", name, error)
                continue
            for period in of_month:
                included = data.included(name, period.start, period.end)
                adjustments = periods.adjustments(period)
                spans = data.timeline(name).spans(period.start, period.end)
                customer = data.customer_of(name, period)
                found[name, period.start] = _OpenPeriod(customer, period, included, adjustments, spans)
        groups = _groups(data, {key: one.period for key, one in found.items()})
        # A period can have adjustments but no usage, so each adjusted period gets a group without usage.
        without_usage = (
            _group_without_usage(name, period_start // SECOND)
            for (name, period_start), one in sorted(found.items())
            if one.adjustments
        )
        merged = heapq.merge(groups, without_usage, key=_account_and_period)
        for (name, start_in_seconds), period_groups in groupby(merged, key=_account_and_period):
            yield found[name, start_in_seconds * SECOND], period_groups


def _groups(data: ClosingData, periods: Mapping[tuple[str, int], Period]) -> Iterator[Group]:
    """Yield the groups of ledger lines of these periods, by account and start (µs), sorted by account and period."""
    accounts: dict[Span, list[str]] = {}
    moved = []
    for (name, _start), period in periods.items():
        timeline = data.timeline(name)
        if timeline.was_moved:
            moved.append(of_period(grouped(of_text(name, period, timeline), data.using), period.start))
            continue
        accounts.setdefault((period.start, period.end), []).append(name)
    streams = (
        of_period(grouped(Q(account__in=names) & within(*span), data.using), span[0])
        for span, names in accounts.items()
    )
    return heapq.merge(*streams, *moved, key=_account_and_period)


def _group_without_usage(account: str, period: int) -> Group:
    """Return a group that stands only for an account and a period. Other groups also have a "meter" and sums."""
    return {"account": account, "period": period, "first_shard": home_shard(account)}


def _account_and_period(group: Group) -> tuple[str, int]:
    return group["account"], group["period"]


def _unused(using: str, month: str, account: str | None, start: int, end: int, version: int) -> Iterator[Statement]:
    """Yield a statement without usage for each account.

    `_with_unused` leaves out the statements of accounts that have another statement.
    """
    gaps = Gaps.between(using, start, end)
    for group, customer, period, terms in candidates(using, month, account):
        report = draft(group, customer, period, Included(terms.plan, terms.included), gaps, version)
        rows = (RowMaker(report, PROVISIONAL).from_line(unused_line(report)),)
        yield Statement(report, PROVISIONAL, rows, unused=True)


def _with_unused(used: Iterator[Statement], unused: Iterator[Statement]) -> Iterator[Statement]:
    """Yield all statements in `used`, and those in `unused` whose account has no statement in `used`."""
    # For each account, `merge` yields the statements in `used` first, because they are its first argument.
    marked = ((statement, True) for statement in used), ((statement, False) for statement in unused)
    last_account = None
    for statement, is_used in heapq.merge(*marked, key=lambda pair: pair[0].report.account):
        if is_used or statement.report.account != last_account:
            yield statement
        last_account = statement.report.account


def draft(
    group: Group,
    customer: Customer,
    period: Period,
    included: Included,
    gaps: Gaps,
    columns_version: int = VERSION,
) -> Report:
    """Return the provisional report that a group of ledger lines belongs to. Do not save this report."""
    return Report(
        customer=customer,
        account=group["account"],
        period_start=period.start,
        period_end=period.end,
        timezone=period.timezone,
        label=period.label,
        version=0,
        plan=included.plan,
        included=dict(included.included),
        gaps=gaps.text(group["first_shard"], group["account"], period.start, period.end),
        columns_version=columns_version,
    )
