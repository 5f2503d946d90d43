"""Closing one account: find the billing periods whose usage is complete, and write their reports.

A report has versions: each correction adds one. Late usage is usage that arrives after its period was closed. Lost
replies are requests of which nobody knows whether Redis has counted them. An allowance is what the plan includes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain as chained
from itertools import islice
from typing import Any

from django.db.models import Sum

from ratelimits import signatures
from ratelimits.conf import conf
from ratelimits.models import Adjustment, Report, ReportLine
from ratelimits.reports import amounts, signing
from ratelimits.reports.adjusting import check
from ratelimits.reports.billing_periods import BillingPeriod
from ratelimits.reports.build import (
    CHUNK,
    Allowance,
    Group,
    adjustment_line,
    gap_line,
    remaining,
    usage_lines,
    with_billing_starts,
)
from ratelimits.reports.closing.account_periods import AccountPeriods
from ratelimits.reports.closing.closing_data import ClosingData
from ratelimits.reports.closing.completeness import incomplete_because
from ratelimits.reports.closing.late_gaps import says_more
from ratelimits.reports.closing.writing import ReportWriter
from ratelimits.reports.included import Included
from ratelimits.reports.periods import SECOND, Period, iso
from ratelimits.reports.rows import FINAL, USAGE, VERSION, RowMaker
from ratelimits.reports.terms.price_book import Record
from ratelimits.reports.unknown import KeyAndMeter

Positions = Mapping[str, int]


class Closing:
    """The closing of one account at `now` (µs since 1970 UTC). The account's shards must be locked.

    `gapped` are the starts of periods in which a gap was declared or changed after they were closed. `writer` collects
    the reports, and its flush() writes them to the database.
    """

    def __init__(
        self,
        data: ClosingData,
        account: str,
        shards: list[int],
        now: int,
        gapped: Collection[int] = frozenset(),
        writer: ReportWriter | None = None,
    ) -> None:
        self._data, self._using, self.account, self._now = data, data.using, account, now
        self._writer = ReportWriter(data.using) if writer is None else writer
        self._states = [data.states[shard] for shard in sorted(shards) if shard in data.states]
        self._usage = data.usage(account)
        self._reports = list(data.reports(account))
        self._gapped = gapped
        self._head_may_be_missing = False
        self.periods = AccountPeriods(data, account)
        self.chain = {str(state.shard): state.tallied for state in self._states}

    def close(self) -> list[Report]:
        """Write the reports that can be written. Raises ValueError for an invalid adjustment or price."""
        check(self._data.adjustments(self.account))
        late = {
            period.start: period for period in self.periods.billing_periods if period.closed and self._is_late(period)
        }
        written = []
        for billing_period in self.periods.billing_periods:
            adjustments = self.periods.adjustments(billing_period)
            if billing_period.closed:
                versioned = billing_period.start in late and self._is_versioned(billing_period)
                if (
                    versioned
                    or adjustments
                    or (billing_period.start in self._gapped and self._is_outdated(billing_period.start))
                ):
                    written.append(self._next_version(billing_period, adjustments, versioned=versioned))
                if versioned:
                    del late[billing_period.start]
            elif billing_period.end <= self._now:
                period = self.periods.period(billing_period)
                if not self.open_because(period):
                    carried = [other for start, other in late.items() if start < billing_period.start]
                    carried = [other for other in carried if not self._is_versioned(other)]
                    written.append(self._first_version(period, billing_period, adjustments, carried))
                    late = {start: other for start, other in late.items() if other not in carried}
        return written

    def _is_versioned(self, billing_period: BillingPeriod) -> bool:
        """Return whether late usage of a closed period goes into a new version of its report.

        With LATE_USAGE "period", late usage normally goes into the report of a later period. It goes into a new version
        only in two cases: the account had another name in the closed period; or no later period will have a report,
        because the account's next period is over and has no usage.
        """
        if conf.LATE_USAGE == "version" or self._included(billing_period.start, billing_period.end).names:
            return True
        if any(other.start > billing_period.start for other in self.periods.open()):
            return False
        return not self.open_because(self.periods.next())

    def open_because(self, period: Period) -> str:
        """Return why a period cannot be closed yet, as a sentence; "" if it can."""
        end = period.end + conf.GRACE_SECONDS * SECOND
        if self._now < end:
            return f"it can be closed from {iso(end)} on, by this machine's clock"
        if not self._states:
            return "no usage of its shard is in the ledger yet: is a worker draining?"
        return next(filter(None, (incomplete_because(state, end, self._now) for state in self._states)), "")

    @property
    def quarantined(self) -> list[int]:
        """Return the account's shards that have an unresolved quarantined batch."""
        return [state.shard for state in self._states if state.frozen]

    def why(self, period: Period) -> str:
        """Return the reason why a period has no report yet, as a sentence."""
        reason = self.open_because(period)
        if reason:
            return reason
        try:
            self._head()
        except signing.BrokenChainError as error:
            return f"{error}: restore it from a backup, or close by force"
        try:
            self.check(period)
        except ValueError as error:
            return f"{error}: correct it"
        return "its usage is complete: the next ratelimits_finalise closes it"

    def check(self, period: Period) -> None:
        """Raise ValueError for an invalid price of the period or an invalid adjustment of the account."""
        self.charged(period.start, period.end)
        check(self._data.adjustments(self.account))

    def _head(self) -> str:
        try:
            return self._data.chain_head(self.chain)
        except signing.BrokenChainError:
            if self._head_may_be_missing:
                return ""  # Verification of the report names the missing batch.
            raise

    def close_one(self, billing_period: BillingPeriod) -> Report:
        """Write the first report of a period, even if usage is missing.

        If a batch is missing, the report has no chain head.
        """
        self._head_may_be_missing = True
        report = self._first_version(
            self.periods.period(billing_period), billing_period, self.periods.adjustments(billing_period), []
        )
        self._writer.flush()
        return report

    def _included(self, start: int, end: int) -> Included:
        return self._data.included(self.account, start, end)

    def _used_by(self, others: Iterable[str], start: int, end: int, since: int = 0) -> Counter[str]:
        """Return the included units, by meter, that the account's other names have used.

        `others` are these names. Only reports with a primary key above `since` count.
        """
        self._writer.flush()
        lines = ReportLine.objects.using(self._using).filter(report__account__in=others, report__gt=since)
        lines = lines.filter(usage_period__gte=start // SECOND, usage_period__lt=end // SECOND)
        return Counter(dict(lines.values_list("meter").order_by().annotate(Sum("included_quantity"))))

    def _left_by_other_names(
        self, included: Mapping[str, int], billing_period: BillingPeriod, since: int = 0
    ) -> dict[str, int]:
        """Return the part of these quantities that the account's other names have not used."""
        shared = self._included(billing_period.start, billing_period.end).shared
        used = self._used_by(shared, billing_period.start, billing_period.end, since) if shared else Counter()
        return {meter: quantity - used[meter] for meter, quantity in included.items()}

    def _versions(self, start: int) -> list[Report]:
        """Return the versions of a period's report, oldest first."""
        versions = (report for report in self._reports if report.period_start == start)
        return sorted(versions, key=lambda report: report.version)

    def _is_outdated(self, start: int) -> bool:
        """Return whether a closed period has gaps or lost replies that its report does not contain."""
        versions = self._versions(start)
        shards = [state.shard for state in self._states]
        now = self._data.gaps(self.account, shards, start, versions[-1].period_end)
        return says_more(versions[-1].gaps, now) or bool(self._late_unknown(versions))

    def _late_unknown(self, versions: list[Report]) -> Counter[KeyAndMeter]:
        """Return the lost replies of a closed period that are not on its report, by key and meter."""
        self._writer.flush()
        lines = ReportLine.objects.using(self._using).filter(report__in=versions, unknown_count__gt=0).order_by()
        sums = lines.values_list("key", "meter").annotate(Sum("unknown_count"))
        known = Counter({(key, meter): count for key, meter, count in sums})
        lost: Counter[KeyAndMeter] = self._data.unknown(self.account, versions[0].period_start, versions[0].period_end)
        return lost - known

    def _covered(self, start: int) -> Positions:
        """Return the position, by shard, up to which reports contain the usage of a period."""
        reports = [report for report in self._reports if str(start // SECOND) in report.since]
        covered: Positions = reports[-1].chain if reports else {}
        return covered

    def _is_late(self, billing_period: BillingPeriod) -> bool:
        covered = {start // SECOND: self._covered(start) for start in billing_period.members}
        rows = (usage for usage in self._usage if usage.period in covered)
        return any(usage.position > covered[usage.period].get(str(usage.shard), 0) for usage in rows)

    def _allowance(
        self, billing_period: BillingPeriod, included: Mapping[str, int], plan: str | None = None
    ) -> Allowance:
        self._writer.flush()
        left = remaining(self._using, self.account, {*billing_period.members, billing_period.start}, included)
        left.plan = plan
        return left

    def left(self, billing_period: BillingPeriod) -> Allowance:
        """Return the allowance of a closed period after its reports."""
        newest = self._versions(billing_period.start)[-1]
        assert newest.pk is not None
        return self._allowance(billing_period, self._left_by_other_names(newest.included, billing_period, newest.pk))

    def _first_version(
        self, period: Period, billing_period: BillingPeriod, adjustments: list[Adjustment], carried: list[BillingPeriod]
    ) -> Report:
        report = self._report(period, 1, [billing_period, *carried])
        includes = self._included(billing_period.start, billing_period.end)
        report.plan, report.included = includes.plan, self._left_by_other_names(includes.included, billing_period)
        report.prices = self._prices(report, [billing_period, *carried], sorted(includes.names))
        allowances = {billing_period.start: Allowance(report.included)}
        for late in carried:
            before = self._versions(late.start)[-1]
            allowances[late.start] = self._allowance(late, before.included, before.plan)
        lost = self._data.unknown(self.account, period.start, period.end)
        groups = self._data.limits.of(self._groups([billing_period, *carried], report.since))
        lines = usage_lines(report, groups, self._data.rules, allowances, lost)
        return self._write(report, lines, adjustments, allowances[billing_period.start])

    def _next_version(self, billing_period: BillingPeriod, adjustments: list[Adjustment], *, versioned: bool) -> Report:
        versions = self._versions(billing_period.start)
        before = versions[-1]
        taken = [billing_period] if versioned else []
        report = self._report(
            Period(billing_period.start, before.period_end, before.timezone), before.version + 1, taken
        )
        assert before.pk is not None
        report.plan, report.previous_digest = before.plan, before.digest
        report.included = self._left_by_other_names(before.included, billing_period, before.pk)
        report.prices = self._prices(report, [billing_period], before.prices.get("names", ()))
        allowances = {billing_period.start: self._allowance(billing_period, report.included)}
        lost = self._late_unknown(versions)
        groups = self._data.limits.of(self._groups(taken, report.since))
        lines = usage_lines(report, groups, self._data.rules, allowances, lost)
        if not (versioned or lost or adjustments):
            lines = iter([gap_line(report)])
        return self._write(report, lines, adjustments, allowances[billing_period.start])

    def _groups(self, taken: list[BillingPeriod], since: Mapping[str, Positions]) -> Iterator[Group]:
        """Return the groups of ledger lines of these billing periods that are not on a report yet."""
        billing_starts = {start: period.start for period in taken for start in period.members}
        groups = (
            self._data.groups(self.account, start // SECOND, since[str(start // SECOND)], self.chain)
            for start in sorted(billing_starts)
        )
        return with_billing_starts(chained.from_iterable(groups), billing_starts)

    def _report(self, period: Period, version: int, taken: list[BillingPeriod]) -> Report:
        shards = [state.shard for state in self._states]
        return Report(
            account=self.account,
            period_start=period.start,
            period_end=period.end,
            timezone=period.timezone,
            version=version,
            since={
                str(start // SECOND): self._covered(start)
                for start in sorted(start for period in taken for start in period.members)
            },
            chain=self.chain,
            chain_head=self._head(),
            columns_version=VERSION,
            gaps=self._data.gaps(self.account, shards, period.start, period.end),
        )

    def _reported(self, line_ids: set[str]) -> set[str]:
        """Return the line ids that are on reports. Late usage may correct a line that no report has."""
        if not line_ids:
            return set()
        self._writer.flush()
        lines = ReportLine.objects.using(self._using).filter(line_id__in=line_ids)
        return set(lines.values_list("line_id", flat=True))

    def _prices(self, report: Report, taken: list[BillingPeriod], names: Sequence[str]) -> dict[str, Any]:
        """Return the prices for the report's lines; {} if there are none.

        `taken` are the billing periods that the lines' usage belongs to. `names` are the account's other names in the
        report's period.
        """
        own = self.charged(report.period_start, report.period_end) if report.version == 1 else {}
        periods = amounts.recorded(
            report, self._priced_before(names), {str(period.start // SECOND) for period in taken}, own
        )
        if not periods:
            return {}
        billing_starts = {
            str(start // SECOND): str(period.start // SECOND) for period in taken for start in period.members
        }
        members = {member: billing_start for member, billing_start in billing_starts.items() if member != billing_start}
        prices = {"account_name": self._data.account_name(self.account), "periods": periods, "members": members}
        return prices | ({"names": list(names)} if names else {})

    def _priced_before(self, names: Sequence[str]) -> list[Report]:
        """Return the earlier reports on which a version's price depends; `names` are the account's other names."""
        if names:
            self._writer.flush()
        return amounts.priced_together(self._using, self._reports, self.account, names)

    def charged(self, start: int, end: int) -> Record:
        """Return the prices of the account's plan in a billing period; {} if there are none.

        Raises ValueError for an invalid price.
        """
        return self._data.prices.of(*self._included(start, end).priced)

    def _write(
        self, report: Report, usage: Iterator[ReportLine], adjustments: list[Adjustment], allowance: Allowance
    ) -> Report:
        lines = chained(usage, (adjustment_line(report, adjustment, allowance) for adjustment in adjustments))
        totals = amounts.Totals(report, self._priced_before(report.prices.get("names", ())))
        digest, number, make = signing.Digest(report), 0, RowMaker(report, FINAL)
        chunk = list(islice(lines, CHUNK))
        # Most reports fit in one chunk. Such a report is written later, together with those of other accounts.
        small = len(chunk) < CHUNK
        if not small:
            self._writer.begin(report)
        while chunk:
            corrected = self._reported({line.corrects_line_id for line in chunk} - {""})
            for line in chunk:
                number += 1
                line.report, line.number = report, number
                if line.corrects_line_id not in corrected and line.charge_category == USAGE:
                    line.corrects_line_id = ""
                digest.add(make.of_line(line))
                totals.add(line)
            if small:
                break
            self._writer.lines(chunk)
            chunk = list(islice(lines, CHUNK))
        report.line_count, report.digest = number, digest.hexdigest()
        report.signature, report.amounts = signatures.sign(report.digest), totals.amounts()
        if small:
            self._writer.add(report, chunk, adjustments)
        else:
            self._writer.end(report, adjustments)
        self._reports.append(report)
        return report
