"""Make the statements to export: finalised reports from stored lines, and provisional reports from the ledger."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, groupby, islice
from typing import NamedTuple

from django.db.models import Exists, Max, OuterRef, Q

from ratelimits.conf import conf
from ratelimits.models import Adjustment, Report, ReportLine
from ratelimits.reports.adjusting import of_open_periods
from ratelimits.reports.build import (
    CHUNK,
    Allowance,
    Group,
    adjustment_line,
    grouped,
    in_order,
    unused_line,
    usage_lines,
)
from ratelimits.reports.closing.account_periods import AccountPeriods
from ratelimits.reports.closing.close import home_shard
from ratelimits.reports.closing.closing_data import ClosingData
from ratelimits.reports.closing.labelled import uncovered_starts
from ratelimits.reports.gaps import Gaps
from ratelimits.reports.included import Included
from ratelimits.reports.limits import Limits
from ratelimits.reports.lost_replies import LostReplies
from ratelimits.reports.periods import SECOND, Period, checked_month, span_of
from ratelimits.reports.rows import FINAL, PROVISIONAL, VERSION, Row, RowMaker
from ratelimits.reports.statements.unused import candidates
from ratelimits.reports.terms import RuleBook


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

    Each row comes with the start of the period under which its usage was counted (s since 1970 UTC, as text).
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
    condition = Q(period__in=uncovered_starts(using, start, end, account))
    if account is not None:
        condition &= Q(account=account)
    rules = RuleBook(using)
    accounts = None if account is None else [account]
    gaps, lost_replies = Gaps.between(using, start, end), LostReplies(using, start, end, accounts)
    adjusted = of_open_periods(using, start, end, **({} if account is None else {"account": account}))
    # A period can have adjustments but no usage, so each adjusted period gets a group without usage.
    without_usage = (_group_without_usage(name, period) for name, period in adjusted)
    # The allowances that several names of an account share, by these names and the start of the billing period.
    shared: dict[tuple[frozenset[str], int], Allowance] = {}
    # `Limits.of` adds to each group the limit that its line shows.
    groups = heapq.merge(Limits(using, rules).of(grouped(condition, using)), without_usage, key=_account_and_period)
    open_groups = _open_groups(using, groups)
    for _key, pairs in groupby(open_groups, key=_open_period_and_account):
        first_group, open_period = next(pairs)
        if open_period.period.label == month:
            report = draft(first_group, open_period.period, open_period.included, gaps, version)
            allowance = Allowance(open_period.included.included)
            if open_period.included.shared:
                names = frozenset({report.account}) | open_period.included.shared
                allowance = shared.setdefault((names, open_period.period.start), allowance)
            period_groups = chain([first_group], (group for group, _open_period in pairs))
            with_usage = (group for group in period_groups if "meter" in group)
            lost = lost_replies.of(report.account, report.period_start, report.period_end)
            lines = chain(
                usage_lines(report, with_usage, rules, {open_period.period.start: allowance}, lost),
                (adjustment_line(report, adjustment, allowance) for adjustment in open_period.adjustments),
            )
            yield Statement(
                report, PROVISIONAL, map(RowMaker(report, PROVISIONAL).from_line, lines), open_period.included
            )


class _OpenPeriod(NamedTuple):
    """A billing period without a report, the quantities that the plan includes in it, and its adjustments."""

    period: Period
    included: Included
    adjustments: list[Adjustment]


def _open_groups(using: str, groups: Iterator[Group]) -> Iterator[tuple[Group, _OpenPeriod]]:
    """Yield the groups of ledger lines that are not on a report, each with its billing period.

    Each group gets one more value, "billing_start": the start of this billing period (µs since 1970 UTC).
    """
    while chunk := list(islice(groups, CHUNK)):
        starts_by_account: dict[str, set[int]] = {}
        for group in chunk:
            starts = starts_by_account.setdefault(group["account"], set())
            if "meter" in group:  # The group has usage. AccountPeriods cannot find this usage if it is not tallied yet.
                starts.add(group["period"] * SECOND)
        # The last argument has the locked shards. There are none, because nothing is written here.
        data = ClosingData(using, list(starts_by_account), {})
        # `lenient` is true, because one account whose time zone no longer exists must not stop the whole export.
        periods = {name: AccountPeriods(data, name, starts, lenient=True) for name, starts in starts_by_account.items()}
        open_by_member = {name: account_periods.open_by_member() for name, account_periods in periods.items()}
        for group in chunk:
            name, start = group["account"], group["period"] * SECOND
            if start in open_by_member[name]:
                billing_period, period = open_by_member[name][start]
                included = data.included(name, period.start, period.end)
                yield (
                    {**group, "billing_start": period.start},
                    _OpenPeriod(period, included, periods[name].adjustments(billing_period)),
                )


def _group_without_usage(account: str, period: int) -> Group:
    """Return a group that stands only for an account and a period. Other groups also have a "meter" and sums."""
    return {"account": account, "period": period, "first_shard": home_shard(account)}


def _open_period_and_account(group_and_period: tuple[Group, _OpenPeriod]) -> tuple[Period, str]:
    group, open_period = group_and_period
    return open_period.period, group["account"]


def _account_and_period(group: Group) -> tuple[str, int]:
    return group["account"], group["period"]


def _unused(using: str, month: str, account: str | None, start: int, end: int, version: int) -> Iterator[Statement]:
    """Yield a statement without usage for each account.

    `_with_unused` leaves out the statements of accounts that have another statement.
    """
    gaps = Gaps.between(using, start, end)
    for group, period, terms in candidates(using, month, account):
        report = draft(group, period, Included(terms.plan, terms.included), gaps, version)
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


def draft(group: Group, period: Period, included: Included, gaps: Gaps, columns_version: int = VERSION) -> Report:
    """Return the provisional report that a group of ledger lines belongs to. Do not save this report."""
    return Report(
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
