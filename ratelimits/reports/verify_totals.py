"""Verifying what stands between ledger and reports: running totals, what reports cover, adjustments and gaps."""

from __future__ import annotations

import heapq
from collections.abc import Generator, Iterator
from itertools import groupby
from typing import Any

from django.db.models import Max, Sum

from ratelimits.models import (
    Adjustment,
    ArchivedRange,
    ChainMark,
    DurabilityGap,
    Line,
    PeriodUsage,
    Report,
    ReportLine,
    ShardState,
)
from ratelimits.reports.build import CHUNK, SUMS, Allowance, adjustment_line, between, in_order
from ratelimits.reports.closing import start_of
from ratelimits.reports.gaps import describe
from ratelimits.reports.periods import iso
from ratelimits.reports.rows import ADJUSTMENT

_SUBJECT = ("account", "period", "meter", "rule")
#: What an adjustment's line has of it. How much of it is included depends on the lines before.
_OF_ADJUSTMENT = (
    *("key", "meter", "charge_class", "corrects_line_id", "consumed_quantity", "refunded_quantity"),
    *("admitted_count", "denied_count", "usage_period", "rule_id", "charge_period_start", "charge_period_end"),
)


def verify_totals(using: str, *sources: str) -> Generator[str]:
    """Say what of the totals, and of the positions that reports cover, is not what ledger and reports make of it.

    `sources` are the databases that the ledger's lines are in, by default `using`. Accounts are read in streams; one
    in which something differs is read once more by itself, since it may have been drained or closed in between.
    """
    for account, findings in _by_account(using, sources or (using,), None):
        if findings:
            for _account, again in _by_account(using, sources or (using,), account):
                yield from again
    yield from _verify_marks(using)
    yield from _verify_adjustments(using)
    yield from _verify_gaps(using)


def _by_account(using: str, sources: tuple[str, ...], account: str | None) -> Iterator[tuple[str, list[str]]]:
    """Yield each account that has usage or a report, and what does not hold of it."""
    about = {} if account is None else {"account": account}
    states = {str(state.shard): state.tallied for state in ShardState.objects.using(using)}
    archived = set(ArchivedRange.objects.using(using).order_by().values_list("shard", flat=True))
    whole = archived if len(sources) == 1 else set()
    sums = [_sums(source, states, about) for source in sources]
    usage = PeriodUsage.objects.using(using).filter(**about).order_by(*in_order(using, "account"))
    reports = Report.objects.using(using).filter(**about).order_by(*in_order(using, "account"), "pk")
    streams: Iterator[tuple[str, int, Any]] = heapq.merge(
        *(((row["account"], 0, row) for row in each) for each in sums),
        ((row.account, 1, row) for row in usage.iterator(CHUNK)),
        ((row.account, 2, row) for row in reports.iterator(CHUNK)),
        key=lambda found: found[:2],
    )
    for name, rows in groupby(streams, key=lambda found: found[0]):
        held = _Account(using, name)
        for _name, kind, row in rows:
            (held.add_lines, held.add_usage, held.add_report)[kind](row)
        yield name, list(held.findings(whole))


def _sums(using: str, states: dict[str, int], about: dict[str, str]) -> Iterator[dict[str, Any]]:
    lines = Line.objects.using(using).filter(between({}, states), **about).values(*_SUBJECT, "batch__shard")
    found: Iterator[dict[str, Any]] = (
        lines.order_by(*in_order(using, "account"))
        .annotate(**{name: Sum(name) for name in SUMS}, newest=Max("batch__first_position"))
        .iterator(CHUNK)
    )
    return found


class _Account:
    """What ledger, totals and reports say of one account."""

    def __init__(self, using: str, name: str) -> None:
        self._using, self._name = using, name or "anonymous"
        self._lines: dict[tuple[Any, ...], tuple[list[int], int]] = {}
        self._usage: dict[tuple[Any, ...], PeriodUsage] = {}
        #: Billing period (s) and shard to the position up to which the newest report has the usage.
        self._covered: dict[tuple[int, int], int] = {}

    def add_lines(self, row: dict[str, Any]) -> None:
        key = (row["period"], row["meter"], row["rule"], row["batch__shard"])
        had, newest = self._lines.get(key, ([0] * len(SUMS), 0))
        self._lines[key] = [one + row[name] for one, name in zip(had, SUMS, strict=True)], max(newest, row["newest"])

    def add_usage(self, row: PeriodUsage) -> None:
        self._usage[row.period, row.meter, row.rule, row.shard] = row

    def add_report(self, report: Report) -> None:
        for period in report.since:
            for shard, position in report.chain.items():
                self._covered[int(period), int(shard)] = position

    def findings(self, archived: set[int]) -> Iterator[str]:
        """`archived` are the shards some of whose lines are not at hand."""
        for key in sorted(self._lines.keys() | self._usage.keys()):
            sums, newest = self._lines.get(key, ([0] * len(SUMS), 0))
            total = self._usage.get(key)
            period, meter, rule, shard = key
            name = f"the total of {self._name} ({meter}, rule {rule}) from {iso(period * 10**6)} in shard {shard:02d}"
            if total is None:
                yield f"{name} is gone: the ledger has {dict(zip(SUMS, sums, strict=True))}"
                continue
            said = [getattr(total, column) for column in SUMS]
            for column, one, other in zip(SUMS, said, sums, strict=True):
                if one < other or (one > other and shard not in archived):
                    yield f"{name} says {one} {column}, the ledger's lines {other}"
            if total.position < newest:
                yield f"{name} ends at position {total.position}, and has usage of position {newest}"
            covered = self._covered.get((period, shard))
            if total.covered != covered and not (total.covered is None and total.position > (covered or 0)):
                yield f"{name} says that reports cover it up to position {total.covered}, the reports say {covered}"


def _verify_marks(using: str) -> Iterator[str]:
    """Each end of a report is marked, and each mark is the end of a report."""
    marks = set(ChainMark.objects.using(using).values_list("shard", "position"))
    ends: set[tuple[int, int]] = set()
    for chain in Report.objects.using(using).order_by().values_list("chain", flat=True).iterator(CHUNK):
        ends.update((int(shard), position) for shard, position in chain.items())
    # Read again: a report may have been finalised in between.
    marks |= set(ChainMark.objects.using(using).values_list("shard", "position"))
    for shard, position in sorted(ends - marks):
        yield f"position {position} of shard {shard:02d}, at which a report ends, is not marked as such"
    for shard, position in sorted(marks - ends):
        yield f"position {position} of shard {shard:02d} is marked as the end of a report, and no report ends there"


def _verify_adjustments(using: str) -> Iterator[str]:
    """Each adjustment that a report has is a line of it, and each such line an adjustment."""
    lines = ReportLine.objects.using(using)
    adjustments = Adjustment.objects.using(using).exclude(report=None).select_related("report").order_by("pk")
    made: dict[int, set[str]] = {}
    for adjustment in adjustments.iterator(CHUNK):
        report = adjustment.report
        assert report is not None
        again = adjustment_line(report, adjustment, Allowance({}))
        made.setdefault(report.pk, set()).add(again.line_id)
        line = lines.filter(report=report, line_id=again.line_id, charge_category=ADJUSTMENT).first()
        if line is None:
            yield f"adjustment {adjustment.reference} ({adjustment}) has no line on report {report}"
            continue
        for name in _OF_ADJUSTMENT:
            if getattr(line, name) != getattr(again, name):
                yield (
                    f"report {report}: line {line.line_id} has {name} {getattr(line, name)},"
                    f" adjustment {adjustment.reference} says {getattr(again, name)}"
                )
        if (adjustment.account, start_of(adjustment)) != (report.account, report.period_start):
            yield f"adjustment {adjustment.reference} ({adjustment}) is of another account or period than {report}"
    adjusted = lines.filter(charge_category=ADJUSTMENT).select_related("report").order_by("pk")
    for line in adjusted.iterator(CHUNK):
        if line.line_id not in made.get(line.report_id, ()):
            text = f"{line.consumed_quantity:+,} {line.meter}"
            yield f"report {line.report}: line {line.line_id} ({text}) has no adjustment"


def _verify_gaps(using: str) -> Iterator[str]:
    """Each gap that a report prints is declared."""
    declared = {_told(describe(gap)) for gap in DurabilityGap.objects.using(using).iterator(CHUNK)}
    reports = Report.objects.using(using).exclude(gaps="").order_by("account", "pk")
    for report in reports.iterator(CHUNK):
        for text in report.gaps.split("; "):
            if not text.startswith("witness ") and _told(text) not in declared:
                yield f"report {report} prints a durability gap that is declared no more: {text}"


def _told(text: str) -> tuple[str, ...]:
    """Kind and span of a printed gap, and its fsync policy: what is known of it later may be added to the rest."""
    kind, span, *more = text.split(" ")
    return kind, span, *(each for each in more if each.startswith("appendfsync="))
