"""Closing one account: which of its periods are complete, and the reports that they become."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from itertools import chain as chained
from itertools import islice
from typing import Any

from django.db.models import Q, Sum

from ratelimits import signatures
from ratelimits.conf import conf
from ratelimits.models import Adjustment, Report, ReportLine, ShardState
from ratelimits.reports import amounts, signing
from ratelimits.reports.adjusting import start_of
from ratelimits.reports.books import Books
from ratelimits.reports.build import (
    CHUNK,
    Allowance,
    Group,
    adjustment_line,
    between,
    gap_line,
    grouped,
    row,
    usage_lines,
)
from ratelimits.reports.late_gaps import says_more
from ratelimits.reports.periods import SECOND, Period, iso, period_at, period_from
from ratelimits.reports.rows import FINAL, USAGE
from ratelimits.reports.terms import Terms
from ratelimits.reports.unknown import KeyAndMeter
from ratelimits.usage import crash
from ratelimits.usage.watermark import is_ahead

#: No billing month is shorter, so a period that began later cannot have ended.
SHORTEST = 27 * 86_400 * SECOND

Positions = Mapping[str, int]


class Closing:
    """One account's closing at `now` (µs since 1970 UTC); its shards are locked, its books read.

    `gapped` are the starts of closed periods that a gap touches which was declared, or has changed, since.
    """

    def __init__(
        self, books: Books, account: str, shards: list[int], now: int, gapped: Collection[int] = frozenset()
    ) -> None:
        self._books, self._using, self.account, self._now = books, books.using, account, now
        self._states = [books.states[shard] for shard in sorted(shards) if shard in books.states]
        self._usage = books.usage(account)
        self._reports = list(books.reports(account))
        self._closed = {report.period_start for report in self._reports}
        self._adjustments = books.adjustments(account)
        self._gapped = self._closed & set(gapped)
        self._headless = False
        self.chain = {str(state.shard): state.tallied for state in self._states}

    def close(self) -> list[Report]:
        """Write the reports that can be written."""
        starts = self._gapped | {row.period * SECOND for row in self._usage} | {start_of(a) for a in self._adjustments}
        late = {start for start in starts & self._closed if self._is_late(start)}
        written = []
        for start in sorted(starts):
            mine = [adjustment for adjustment in self._adjustments if start_of(adjustment) == start]
            if start in self._closed:
                versioned = {start} & late if conf.LATE_USAGE == "version" else set()
                if versioned or mine or (start in self._gapped and self._lacks(start)):
                    written.append(self._next_version(start, mine, versioned))
            elif start <= self._now - SHORTEST:
                period, terms = self.period(start)
                if not self.open_because(period):
                    carried = late if conf.LATE_USAGE == "period" else set()
                    written.append(self._first_version(period, terms, mine, carried))
                    late = late - carried
        return written

    def open_starts(self) -> list[int]:
        """Return when the periods start (µs since 1970 UTC) that have usage or adjustments and no report yet."""
        starts = {row.period * SECOND for row in self._usage} | {start_of(a) for a in self._adjustments}
        return sorted(starts - self._closed)

    def open_because(self, period: Period) -> str:
        """Return why a period cannot be closed yet, as a sentence; "" if it can."""
        end = period.end + conf.GRACE_SECONDS * SECOND
        if self._now < end:
            return f"it can be closed from {iso(end)} on, by this machine's clock"
        if not self._states:
            return "nothing of its shard has reached the ledger yet: is a worker draining?"
        return next(filter(None, (_not_yet(state, end, self._now) for state in self._states)), "")

    def why(self, period: Period) -> str:
        """Return what a period without a report waits for, as a sentence."""
        waits = self.open_because(period)
        if waits:
            return waits
        try:
            self._head()
        except signing.BrokenChainError as error:
            return f"{error}: restore it from a backup, or close by force"
        return "nothing: the next ratelimits_finalise closes it"

    def _head(self) -> str:
        try:
            return self._books.chain_head(self.chain)
        except signing.BrokenChainError:
            if self._headless:
                return ""  # verifying the report names the batch for as long as it is missing
            raise

    def close_one(self, start: int) -> Report:
        """Write the first report of a period, complete or not; without a chain's head where a batch is missing."""
        period, terms = self.period(start)
        self._headless = True
        mine = [adjustment for adjustment in self._adjustments if start_of(adjustment) == start]
        return self._first_version(period, terms, mine, set())

    def period(self, start: int) -> tuple[Period, Terms]:
        """Return the period that starts then by the terms that held, and the terms at its end."""
        held = [self._books.terms(self.account, at) for at in (start, start + SHORTEST, None)]
        known = (terms for terms in held if period_at(terms.timezone, terms.anchor, start).start == start)
        then = next(known, held[-1])
        ends = [row.period_end for row in self._usage if row.period * SECOND == start and row.period_end is not None]
        if ends:
            period = Period(start, max(ends) * SECOND, then.timezone)
        else:
            period = period_from(then.timezone, then.anchor, start)
        return period, self._books.terms(self.account, period.end - 1)

    def _versions(self, start: int) -> list[Report]:
        """The versions of a period's report, oldest first."""
        versions = (report for report in self._reports if report.period_start == start)
        return sorted(versions, key=lambda report: report.version)

    def _lacks(self, start: int) -> bool:
        """Whether a closed period's report lacks a gap, or lost replies, that are known now."""
        versions = self._versions(start)
        shards = [state.shard for state in self._states]
        now = self._books.gaps(self.account, shards, start, versions[-1].period_end)
        return says_more(versions[-1].gaps, now) or bool(self._late_unknown(versions))

    def _late_unknown(self, versions: list[Report]) -> Counter[KeyAndMeter]:
        """The lost replies of a closed period that no version of its report has, by key and meter."""
        lines = ReportLine.objects.using(self._using).filter(report__in=versions, unknown_count__gt=0).order_by()
        sums = lines.values_list("key", "meter").annotate(Sum("unknown_count"))
        known = Counter({(key, meter): count for key, meter, count in sums})
        lost: Counter[KeyAndMeter] = self._books.unknown(self.account, versions[0].period_start, versions[0].period_end)
        return lost - known

    def _covered(self, start: int) -> Positions:
        """The positions up to which some report has the usage of a period."""
        having = [report for report in self._reports if str(start // SECOND) in report.since]
        covered: Positions = having[-1].chain if having else {}
        return covered

    def _is_late(self, start: int) -> bool:
        covered = self._covered(start)
        rows = (usage for usage in self._usage if usage.period * SECOND == start)
        return any(usage.position > covered.get(str(usage.shard), 0) for usage in rows)

    def _first_version(self, period: Period, terms: Terms, adjustments: list[Adjustment], late: set[int]) -> Report:
        report = self._report(period, 1, {period.start} | late)
        report.plan, report.included = terms.plan, dict(terms.included)
        groups = chained.from_iterable(self._groups(start, report.since) for start in sorted({period.start} | late))
        lost = self._books.unknown(self.account, period.start, period.end)
        allowance = Allowance(report.included)
        lines = usage_lines(report, self._books.limits.of(groups), self._books.rules, allowance, lost)
        return self._write(report, chained(lines, self._adjusted(report, adjustments, allowance)), adjustments)

    def _next_version(self, start: int, adjustments: list[Adjustment], late: set[int]) -> Report:
        versions = self._versions(start)
        before = versions[-1]
        period = Period(start, before.period_end, before.timezone)
        report = self._report(period, before.version + 1, late)
        report.plan, report.included, report.previous_digest = before.plan, before.included, before.digest
        rows = ReportLine.objects.using(self._using).filter(report__in=versions).values_list("meter").order_by()
        sums = list(rows.annotate(Sum("included_quantity"), Sum("overage_quantity")))
        allowance = Allowance(
            report.included, {name: used for name, used, _over in sums}, {name: over for name, _used, over in sums}
        )
        groups = chained.from_iterable(self._groups(start, report.since) for start in sorted(late))
        lost = self._late_unknown(versions)
        lines = usage_lines(report, self._books.limits.of(groups), self._books.rules, allowance, lost)
        if not (late or lost or adjustments):
            lines = iter([gap_line(report)])
        return self._write(report, chained(lines, self._adjusted(report, adjustments, allowance)), adjustments)

    def _groups(self, start: int, since: Mapping[str, Positions]) -> Iterator[Group]:
        period = start // SECOND
        own = Q(account=self.account, period=period) & between(since[str(period)], self.chain)
        return grouped(own, self._using)

    def _report(self, period: Period, version: int, taken: set[int]) -> Report:
        shards = [state.shard for state in self._states]
        return Report(
            account=self.account,
            period_start=period.start,
            period_end=period.end,
            timezone=period.timezone,
            version=version,
            since={str(start // SECOND): self._covered(start) for start in sorted(taken)},
            chain=self.chain,
            chain_head=self._head(),
            gaps=self._books.gaps(self.account, shards, period.start, period.end),
        )

    def _adjusted(self, report: Report, adjustments: list[Adjustment], allowance: Allowance) -> Iterator[ReportLine]:
        return (adjustment_line(report, adjustment, allowance) for adjustment in adjustments)

    def _known(self, names: set[str]) -> set[str]:
        """Which of these lines were reported: usage that came late may have no line that it corrects."""
        if not names:
            return set()
        found = ReportLine.objects.using(self._using).filter(line_id__in=names)
        return set(found.values_list("line_id", flat=True))

    def _prices(self, report: Report) -> dict[str, Any]:
        """What the report's lines cost; {} where no plan has prices."""
        own = self._books.prices.of(report.plan, report.period_end - 1) if report.version == 1 else {}
        periods = amounts.recorded(report, self._reports, own)
        return {"account_name": self._books.account_name(self.account), "periods": periods} if periods else {}

    def _write(self, report: Report, lines: Iterator[ReportLine], adjustments: list[Adjustment]) -> Report:
        report.prices = self._prices(report)
        totals = amounts.Totals(report, self._reports)
        digest, number = signing.Digest(report), 0
        chunk = list(islice(lines, CHUNK))
        # Most reports fit in one chunk: they are written once, with their digest.
        small = len(chunk) < CHUNK
        if not small:
            report.save(using=self._using, force_insert=True)
        while chunk:
            corrected = self._known({line.corrects_line_id for line in chunk} - {""})
            for number, line in enumerate(chunk, number + 1):  # noqa: B020
                line.report, line.number = report, number
                if line.corrects_line_id not in corrected and line.charge_category == USAGE:
                    line.corrects_line_id = ""
                digest.add(row(report, line, FINAL))
                totals.add(line)
            if small:
                break
            ReportLine.objects.using(self._using).bulk_create(chunk)
            chunk = list(islice(lines, CHUNK))
        report.line_count, report.digest = number, digest.hexdigest()
        report.signature, report.amounts = signatures.sign(report.digest), totals.amounts()
        if small:
            report.save(using=self._using, force_insert=True)
            crash.reached("close:report-written")
            ReportLine.objects.using(self._using).bulk_create(chunk)
        else:
            report.save(using=self._using, update_fields=["line_count", "digest", "signature", "amounts"])
        crash.reached("close:lines-written")
        if adjustments:
            pks = [adjustment.pk for adjustment in adjustments]
            Adjustment.objects.using(self._using).filter(pk__in=pks).update(report=report)
            crash.reached("close:adjustments-marked")
        self._reports.append(report)
        return report


def _not_yet(state: ShardState, end: int, now: int) -> str:
    """Why a shard's usage is not complete until `end`, as a sentence; "" if it is."""
    name = f"shard {state.shard:02d}"
    if state.frozen:
        return f"{name} has a quarantined batch: accept or discard it"
    if is_ahead(state.watermark, now):
        return f"{name} is complete until {iso(state.watermark)}, which is yet to come: the next drain puts that right"
    if state.watermark < end:
        until = iso(state.watermark) if state.watermark else "nothing yet"
        known = f"{name} is complete until {until}, and {iso(end)} is needed"
        if state.ahead:
            lead = f"{state.ahead // SECOND:,} seconds"
            return f"{known}: its server's clock is {lead} ahead of the worker's, put the wrong one right"
        if state.shard >= conf.SHARDS:
            return f"{known}: it is not drained any more, since SHARDS is {conf.SHARDS}"
        return f"{known}: is a worker sealing and draining?"
    if state.tallied != state.position:
        return f"{name} has batches that are not added up yet: the next drain does that"
    return ""
