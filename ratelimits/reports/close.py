"""Closing: a billing period whose usage is complete becomes a report, and what comes later a further version of it.

A report covers its account's ledger lines up to a position in the digest chain of each shard, so that it can be made
again from them. All that a closing reads and writes of an account is one transaction under those shards' row locks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from itertools import chain as chained
from itertools import islice
from time import time_ns

from django.db import transaction
from django.db.models import F, Q, Sum

from ratelimits.conf import conf
from ratelimits.engine.keys import shard_of
from ratelimits.models import Adjustment, ChainMark, PeriodUsage, Report, ReportLine, ShardState
from ratelimits.reports import signing, witness
from ratelimits.reports.build import CHUNK, Allowance, Group, adjustment_line, between, grouped, row, usage_lines
from ratelimits.reports.gaps import Gaps
from ratelimits.reports.limits import Limits
from ratelimits.reports.periods import SECOND, Period, period_at, period_from
from ratelimits.reports.rows import FINAL, USAGE
from ratelimits.reports.terms import RuleBook, Terms, TermsBook
from ratelimits.reports.unknown import Unknown

logger = logging.getLogger(__name__)

#: No billing month is shorter, so a period that began later cannot have ended.
_SHORTEST = 27 * 86_400 * SECOND

Positions = Mapping[str, int]


def finalise(now: int | None = None, *, account: str | None = None) -> list[Report]:
    """Close every billing period that can be closed, and give closed ones with late usage or adjustments a new version.

    A period is closed when the watermarks of its shards have passed its end plus GRACE_SECONDS. `now` is µs since 1970
    UTC, by default this machine's clock; it only says which periods to look at. Doing it again changes nothing.
    """
    using = conf.DATABASE
    now = time_ns() // 1000 if now is None else now
    usage = PeriodUsage.objects.using(using)
    due = usage.filter(covered=None, period__lte=(now - _SHORTEST) // SECOND)
    late = usage.filter(position__gt=F("covered"))
    adjusted = Adjustment.objects.using(using).filter(report=None)
    names = {name for rows in (due, late, adjusted) for name in rows.order_by().values_list("account", flat=True)}
    written: list[Report] = []
    for name in sorted(names if account is None else names & {account}):
        written += _close_account(using, name)
    return written


def _close_account(using: str, account: str) -> list[Report]:
    # Before the transaction, whose first statement is to lock: SQLite does not let a reader become a writer.
    rows = PeriodUsage.objects.using(using).filter(account=account)
    shards = set(rows.order_by().values_list("shard", flat=True).distinct())
    shards.add(shard_of(f"account:{account}" if account else "anonymous", conf.SHARDS))
    with transaction.atomic(using=using, durable=True):
        reports = _Closing(using, account, shards).close()
    for report in reports:
        logger.info("report %s was finalised", report)
    return reports


def start_of(adjustment: Adjustment) -> int:
    """The µs since 1970 UTC at which the period of an adjustment starts."""
    return int(adjustment.period_start.timestamp()) * SECOND


class _Closing:
    """One account, its shards locked."""

    def __init__(self, using: str, account: str, shards: set[int]) -> None:
        self.using, self.account = using, account
        locked = [ShardState.lock(using, shard) for shard in sorted(shards)]
        self.states = [state for state in locked if state is not None]
        self.usage = list(PeriodUsage.objects.using(using).filter(account=account))
        self.reports = list(Report.objects.using(using).filter(account=account).order_by("pk"))
        self.closed = {report.period_start for report in self.reports}
        adjustments = Adjustment.objects.using(using).filter(account=account, report=None)
        self.adjustments = list(adjustments.order_by("created_at", "reference"))
        self.rules = RuleBook(using)
        self.limits = Limits(using, self.rules)
        self.chain = {str(state.shard): state.tallied for state in self.states}

    def close(self) -> list[Report]:
        """Write what can be written."""
        starts = {row.period * SECOND for row in self.usage} | {start_of(a) for a in self.adjustments}
        late = {start for start in starts & self.closed if self._is_late(start)}
        written = []
        for start in sorted(starts):
            mine = [adjustment for adjustment in self.adjustments if start_of(adjustment) == start]
            if start in self.closed:
                versioned = {start} & late if conf.LATE_USAGE == "version" else set()
                if versioned or mine:
                    written.append(self._next_version(start, mine, versioned))
            else:
                period, terms = self._period(start)
                if self._complete(period):
                    carried = late if conf.LATE_USAGE == "period" else set()
                    written.append(self._first_version(period, terms, mine, carried))
                    late = late - carried
        return written

    def _covered(self, start: int) -> Positions:
        """The positions up to which some report has the usage of a period."""
        having = [report for report in self.reports if str(start // SECOND) in report.since]
        covered: Positions = having[-1].chain if having else {}
        return covered

    def _is_late(self, start: int) -> bool:
        covered = self._covered(start)
        rows = (usage for usage in self.usage if usage.period * SECOND == start)
        return any(usage.position > covered.get(str(usage.shard), 0) for usage in rows)

    def _complete(self, period: Period) -> bool:
        end = period.end + conf.GRACE_SECONDS * SECOND
        return bool(self.states) and all(
            state.watermark >= end and not state.frozen and state.tallied == state.position for state in self.states
        )

    def _period(self, start: int) -> tuple[Period, Terms]:
        """The period that starts then by the terms that held, and the terms at its end."""
        held = [TermsBook(self.using, at).of([self.account])[self.account] for at in (start, start + _SHORTEST, None)]
        known = (terms for terms in held if period_at(terms.timezone, terms.anchor, start).start == start)
        then = next(known, held[-1])
        period = period_from(then.timezone, then.anchor, start)
        return period, TermsBook(self.using, period.end - 1).of([self.account])[self.account]

    def _first_version(self, period: Period, terms: Terms, adjustments: list[Adjustment], late: set[int]) -> Report:
        report = self._report(period, 1, {period.start} | late)
        report.plan, report.included = terms.plan, dict(terms.included)
        unknown = Unknown(self.using, period.start, period.end, self.account)
        groups = chained.from_iterable(self._groups(start, report.since) for start in sorted({period.start} | late))
        lost = unknown.of(self.account, period.start, period.end)
        allowance = Allowance(report.included)
        lines = usage_lines(report, self.limits.of(groups), self.rules, allowance, lost)
        return self._write(report, chained(lines, self._adjusted(report, adjustments, allowance)), adjustments)

    def _next_version(self, start: int, adjustments: list[Adjustment], late: set[int]) -> Report:
        versions = [report for report in self.reports if report.period_start == start]
        before = max(versions, key=lambda report: report.version)
        period = Period(start, before.period_end, before.timezone)
        report = self._report(period, before.version + 1, late)
        report.plan, report.included, report.previous_digest = before.plan, before.included, before.digest
        rows = ReportLine.objects.using(self.using).filter(report__in=versions).values_list("meter").order_by()
        sums = list(rows.annotate(Sum("included_quantity"), Sum("overage_quantity")))
        allowance = Allowance(
            report.included, {name: used for name, used, _over in sums}, {name: over for name, _used, over in sums}
        )
        groups = chained.from_iterable(self._groups(start, report.since) for start in sorted(late))
        lines = usage_lines(report, self.limits.of(groups), self.rules, allowance)
        return self._write(report, chained(lines, self._adjusted(report, adjustments, allowance)), adjustments)

    def _groups(self, start: int, since: Mapping[str, Positions]) -> Iterator[Group]:
        period = start // SECOND
        own = Q(account=self.account, period=period) & between(since[str(period)], self.chain)
        return grouped(own, self.using)

    def _report(self, period: Period, version: int, taken: set[int]) -> Report:
        gaps = Gaps.between(self.using, period.start, period.end)
        texts = [gaps.text(state.shard, self.account, period.start, period.end) for state in self.states]
        texts.append(witness.text(self.using, self.account, period.start, period.end))
        return Report(
            account=self.account,
            period_start=period.start,
            period_end=period.end,
            timezone=period.timezone,
            version=version,
            since={str(start // SECOND): self._covered(start) for start in sorted(taken)},
            chain=self.chain,
            chain_head=signing.chain_head(self.chain, self.using),
            gaps="; ".join(dict.fromkeys(text for text in texts if text)),
        )

    def _adjusted(self, report: Report, adjustments: list[Adjustment], allowance: Allowance) -> Iterator[ReportLine]:
        return (adjustment_line(report, adjustment, allowance) for adjustment in adjustments)

    def _known(self, names: set[str]) -> set[str]:
        """Which of these lines were reported: usage that came late may have no line that it corrects."""
        found = ReportLine.objects.using(self.using).filter(line_id__in=names) if names else ReportLine.objects.none()
        return set(found.values_list("line_id", flat=True))

    def _write(self, report: Report, lines: Iterator[ReportLine], adjustments: list[Adjustment]) -> Report:
        report.save(using=self.using, force_insert=True)
        digest, number = signing.Digest(report), 0
        while chunk := list(islice(lines, CHUNK)):
            corrected = self._known({line.corrects_line_id for line in chunk} - {""})
            for number, line in enumerate(chunk, number + 1):  # noqa: B020
                line.report, line.number = report, number
                if line.corrects_line_id not in corrected and line.charge_category == USAGE:
                    line.corrects_line_id = ""
                digest.add(row(report, line, FINAL))
            ReportLine.objects.using(self.using).bulk_create(chunk)
        report.line_count, report.digest = number, digest.hexdigest()
        report.signature = signing.signature(report.digest)
        report.save(using=self.using, update_fields=["line_count", "digest", "signature"])
        pks = [adjustment.pk for adjustment in adjustments]
        Adjustment.objects.using(self.using).filter(pk__in=pks).update(report=report)
        marks = [ChainMark(shard=int(shard), position=position) for shard, position in self.chain.items()]
        ChainMark.objects.using(self.using).bulk_create(marks, ignore_conflicts=True)
        usage = PeriodUsage.objects.using(self.using).filter(account=self.account, period__in=map(int, report.since))
        for shard, position in self.chain.items():
            usage.filter(shard=int(shard)).update(covered=position)
        self.reports.append(report)
        return report
