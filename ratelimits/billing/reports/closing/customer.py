"""Close one customer: find the billing periods whose usage is complete, and write their reports.

A report has versions: each correction adds a version. Late usage is usage that arrives after its period was closed. A
lost reply is a reply of Redis that did not arrive: nobody knows whether Redis has counted the request. An allowance has
the quantities that the plan includes in a period, and the units that are used so far. A report has the usage of all
account texts while they named the customer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from itertools import chain as chained
from typing import Any

from django.utils.translation import gettext as _

from ratelimits.algorithms.billing_periods import Period
from ratelimits.billing.models import Adjustment, Report, ReportLine
from ratelimits.billing.reports import amounts, signing
from ratelimits.billing.reports.adjusting import check_sizes
from ratelimits.billing.reports.build import (
    Allowance,
    Group,
    adjustment_line,
    allowance_with_reported_units,
    gap_line,
    usage_lines,
)
from ratelimits.billing.reports.closing.closing_data import ClosingData
from ratelimits.billing.reports.closing.completeness import incomplete_because
from ratelimits.billing.reports.closing.customer_periods import CustomerPeriods
from ratelimits.billing.reports.closing.late_gaps import says_more
from ratelimits.billing.reports.closing.writing import ReportWriter
from ratelimits.billing.reports.lost_replies import KeyAndMeter
from ratelimits.billing.reports.rows import VERSION
from ratelimits.billing.reports.terms.price_book import RecordedPrices
from ratelimits.conf import conf
from ratelimits.models.accounts.named import NamedCustomer
from ratelimits.usage.models.sums import MAX_TOTAL, ExactSum
from ratelimits.usage.periods import SECOND, iso

#: For each shard, the position of a batch.
Positions = Mapping[str, int]


class TooLargeError(ValueError):
    """Raised if a period has more usage than a report can state."""


class Closing:
    """Closes one customer at `now` (µs since 1970 UTC). To write reports, the customer's shards must be locked.

    `with_new_gaps` are the starts of closed periods for which a gap was declared or changed after the closing. `writer`
    collects the reports until its `flush` writes them to the database.
    """

    def __init__(
        self,
        data: ClosingData,
        customer: NamedCustomer,
        shards: list[int],
        now: int,
        with_new_gaps: Collection[int] = frozenset(),
        writer: ReportWriter | None = None,
    ) -> None:
        self._data, self._using, self.customer, self._now = data, data.using, customer, now
        self._writer = ReportWriter(data.using) if writer is None else writer
        self._states = [data.states[shard] for shard in sorted(shards) if shard in data.states]
        self._usage = data.usage(customer)
        self._reports = list(data.reports(customer))
        self._with_new_gaps = with_new_gaps
        self._batch_may_be_missing = False
        self.periods = CustomerPeriods(data, customer)
        #: The position of the last tallied batch of each shard. New reports contain the usage up to these positions.
        self.chain = {str(state.shard): state.tallied for state in self._states}

    def close(self, only: Collection[int] | None = None) -> list[Report]:
        """Write the reports that can be written. Raise ValueError for an invalid adjustment or price.

        With `only`, write no new versions, and close only the periods that start at these moments (µs since 1970 UTC).
        """
        check_sizes(self._data.adjustments(self.customer))
        closed = (period for period in self.periods.periods if self.periods.is_closed(period))
        # The closed periods with late usage that is not on a report yet, by their starts.
        late = {period.start: period for period in closed if self._has_late_usage(period) and not self._is_full(period)}
        written = []
        for period in self.periods.periods:
            is_closed = self.periods.is_closed(period)
            if only is not None and (is_closed or period.start not in only):
                continue
            adjustments = self.periods.adjustments(period)
            if is_closed:
                with_late_usage = period.start in late and self._needs_new_version(period)
                has_new_gap = period.start in self._with_new_gaps
                if with_late_usage or adjustments or (has_new_gap and self._is_outdated(period.start)):
                    written.append(self._next_version(period, adjustments, with_late_usage=with_late_usage))
                if with_late_usage:
                    del late[period.start]
            elif period.end <= self._now and not self.open_because(period) and not self._is_full(period):
                # The new report also gets the late usage of earlier periods that need no version of their own.
                late_periods = [other for start, other in late.items() if start < period.start]
                late_periods = [other for other in late_periods if not self._needs_new_version(other)]
                written.append(self._first_version(period, adjustments, late_periods))
                late = {start: other for start, other in late.items() if other not in late_periods}
        return written

    def _needs_new_version(self, period: Period) -> bool:
        """Return whether late usage of a closed period goes into a new version of its report.

        With LATE_USAGE "period", late usage normally goes into the report of a later period. A new version is needed
        only if perhaps no later report will ever be written: the customer has no later open period that can be closed,
        and its next period is over, without usage.
        """
        if conf.LATE_USAGE == "version":
            return True
        if any(other.start > period.start and not self._is_full(other) for other in self.periods.open()):
            return False
        return not self.open_because(self.periods.next())

    def open_because(self, period: Period) -> str:
        """Return why a period cannot be closed yet, as a sentence; "" if it can be closed."""
        end = period.end + conf.GRACE_SECONDS * SECOND
        if self._now < end:
            values = {"zone": period.timezone, "end": period.local_end(), "from": iso(end)}
            if self._now < period.end:
                text = _(
                    "in %(zone)s it ends only at %(end)s, and it can be closed from %(from)s on, by this machine's"
                    " clock"
                )
                return text % values
            return _("it can be closed from %(from)s on, by this machine's clock") % values
        if not self._states:
            return _(
                "no usage of the account's shard is in the ledger yet: start a Celery worker with beat, or run"
                " ratelimits_seal and then ratelimits_drain"
            )
        return next(filter(None, (incomplete_because(state, end, self._now) for state in self._states)), "")

    @property
    def quarantined(self) -> list[int]:
        """Return the customer's shards that have an unresolved quarantined batch."""
        return [state.shard for state in self._states if state.frozen]

    def obstacle(self, period: Period) -> str:
        """Return what prevents a report of a period, as a sentence; "" if nothing prevents it."""
        reason = self.open_because(period)
        if reason:
            return reason
        try:
            self._chain_head()
        except signing.BrokenChainError as error:
            return _("%(error)s: restore it from a backup, or close by force") % {"error": error}
        try:
            self.check(period)
        except TooLargeError as error:
            return str(error)
        except ValueError as error:
            return _("%(error)s: correct it") % {"error": error}
        return ""

    def _is_full(self, period: Period) -> bool:
        """Return whether the period has more usage than a total can store. Then no report can state its usage."""
        return any(usage.is_full and usage.period * SECOND == period.start for usage in self._usage)

    def check(self, period: Period) -> None:
        """Raise ValueError for an invalid price of the period or an invalid adjustment of the customer.

        Raise TooLargeError if the period has more usage than a report can state.
        """
        if self._is_full(period):
            text = _(
                "its usage is above %(most)s, the largest number that a report can state, so it is never closed: bill"
                " it by hand, from the lines of the ledger"
            )
            raise TooLargeError(text % {"most": f"{MAX_TOTAL:,}"})
        self._prices_at_end(period)
        check_sizes(self._data.adjustments(self.customer))

    def _chain_head(self) -> str:
        """Return one digest for the ledger's chains, up to the positions in `self.chain`.

        If a batch is missing, raise signing.BrokenChainError. But if the period is closed by force, return "".
        """
        try:
            return self._data.chain_head(self.chain)
        except signing.BrokenChainError:
            if self._batch_may_be_missing:
                return ""  # Verification of the report names the missing batch.
            raise

    def close_by_force(self, period: Period) -> Report:
        """Write the first report of a period, even if usage is missing.

        If the newest tallied batch of a shard is missing in the ledger, the report's `chain_head` is empty.
        """
        self._batch_may_be_missing = True
        report = self._first_version(period, self.periods.adjustments(period), [])
        self._writer.flush()
        return report

    def _versions(self, start: int) -> list[Report]:
        """Return the versions of a period's report, oldest first."""
        versions = (report for report in self._reports if report.period_start == start)
        return sorted(versions, key=lambda report: report.version)

    def _is_outdated(self, start: int) -> bool:
        """Return whether a closed period has gaps or lost replies that its report does not contain."""
        versions = self._versions(start)
        shards = [state.shard for state in self._states]
        gaps = self._data.gaps(self.customer, shards, start, versions[-1].period_end)
        return says_more(versions[-1].gaps, gaps) or bool(self._late_lost_replies(versions))

    def _late_lost_replies(self, versions: list[Report]) -> Counter[KeyAndMeter]:
        """Return the lost replies of a closed period that are not on its report, by key and meter."""
        self._writer.flush()
        lines = ReportLine.objects.using(self._using).filter(report__in=versions, unknown_count__gt=0).order_by()
        sums = lines.values_list("key", "meter").annotate(ExactSum("unknown_count"))
        reported = Counter({(key, meter): count for key, meter, count in sums})
        first = versions[0]
        lost: Counter[KeyAndMeter] = self._data.lost_replies(self.customer, first.period_start, first.period_end)
        return lost - reported

    def _reported_until(self, start: int) -> Positions:
        """Return the positions up to which reports contain the usage of a billing period."""
        reports = [report for report in self._reports if str(start // SECOND) in report.since]
        positions: Positions = reports[-1].chain if reports else {}
        return positions

    def _has_late_usage(self, period: Period) -> bool:
        """Return whether a closed period has usage after the positions at which its reports end."""
        reported = self._reported_until(period.start)
        rows = (usage for usage in self._usage if usage.period * SECOND == period.start)
        return any(usage.position > reported.get(str(usage.shard), 0) for usage in rows)

    def _allowance(self, period: Period, included: Mapping[str, int], plan: str | None = None) -> Allowance:
        """Return an allowance with these included quantities and the units that a billing period's reports contain.

        If `plan` is None, lines with this allowance show the plan of the new report.
        """
        self._writer.flush()
        allowance = allowance_with_reported_units(self._using, self.customer.token, period.start, included)
        allowance.plan = plan
        return allowance

    def allowance_after_reports(self, period: Period) -> Allowance:
        """Return the allowance of a closed period, with the units that its reports contain."""
        return self._allowance(period, self._versions(period.start)[-1].included)

    def _first_version(self, period: Period, adjustments: list[Adjustment], late_periods: list[Period]) -> Report:
        """Write the first report of a billing period. The report also gets the late usage of `late_periods`."""
        report = self._report(period, 1, [period, *late_periods])
        included = self._data.included(self.customer, period)
        report.plan, report.included = included.plan, dict(included.included)
        report.prices = self._prices(report, [period, *late_periods], self._prices_at_end(period))
        allowances = {period.start: Allowance(report.included)}
        for late in late_periods:
            before = self._versions(late.start)[-1]
            allowances[late.start] = self._allowance(late, before.included, before.plan)
        lost = self._data.lost_replies(self.customer, period.start, period.end)
        groups = self._data.limits.of(self._groups([period, *late_periods], report.since), self.customer)
        lines = usage_lines(report, groups, self._data.rules, allowances, lost)
        return self._write(report, lines, adjustments, allowances[period.start])

    def _next_version(self, period: Period, adjustments: list[Adjustment], *, with_late_usage: bool) -> Report:
        """Write a new version of a closed period's report, with the gaps and the lost replies that are known now."""
        versions = self._versions(period.start)
        before = versions[-1]
        late_periods = [period] if with_late_usage else []
        report = self._report(period, before.version + 1, late_periods)
        report.plan, report.included, report.previous_digest = before.plan, before.included, before.digest
        report.prices = self._prices(report, [period], {})
        allowances = {period.start: self._allowance(period, report.included)}
        lost = self._late_lost_replies(versions)
        groups = self._data.limits.of(self._groups(late_periods, report.since), self.customer)
        lines = usage_lines(report, groups, self._data.rules, allowances, lost)
        if not (with_late_usage or lost or adjustments):
            lines = iter([gap_line(report)])
        return self._write(report, lines, adjustments, allowances[period.start])

    def _groups(self, periods: list[Period], since: Mapping[str, Positions]) -> Iterator[Group]:
        """Return the groups of ledger lines of these billing periods that are not on a report yet."""
        return chained.from_iterable(
            self._data.groups(self.customer, period, since[str(period.start // SECOND)], self.chain)
            for period in sorted(periods)
        )

    def _report(self, period: Period, version: int, periods: list[Period]) -> Report:
        """Return an unsaved report version. Its lines will have the new usage of the billing periods `periods`."""
        shards = [state.shard for state in self._states]
        return Report(
            customer=self.customer.row,
            account=self.customer.account,
            period_start=period.start,
            period_end=period.end,
            timezone=period.timezone,
            label=period.label,
            version=version,
            since={str(one.start // SECOND): self._reported_until(one.start) for one in sorted(periods)},
            chain=self.chain,
            chain_head=self._chain_head(),
            columns_version=VERSION,
            gaps=self._data.gaps(self.customer, shards, period.start, period.end),
        )

    def _prices(self, report: Report, periods: list[Period], at_end: RecordedPrices) -> dict[str, Any]:
        """Return the prices for the report's lines; {} if there are none.

        The usage of the lines belongs to the billing periods `periods`. `at_end` are the prices at the end of the
        report's period, for its first version.
        """
        starts = {str(period.start // SECOND) for period in periods}
        records = amounts.recorded_prices(report, self._reports, starts, at_end)
        return {"account_name": self._data.account_name(self.customer), "periods": records} if records else {}

    def _prices_at_end(self, period: Period) -> RecordedPrices:
        """Return the prices of the customer's plan at the end of a billing period; {} if there are none.

        Raise ValueError for an invalid price.
        """
        return self._data.prices.of(*self._data.included(self.customer, period).price_source)

    def _write(
        self, report: Report, usage: Iterator[ReportLine], adjustments: list[Adjustment], allowance: Allowance
    ) -> Report:
        """Write a report with these lines and the lines of its adjustments, and return it."""
        lines = chained(usage, (adjustment_line(report, adjustment, allowance) for adjustment in adjustments))
        self._writer.write(report, lines, adjustments, self._reports)
        self._reports.append(report)
        return report
