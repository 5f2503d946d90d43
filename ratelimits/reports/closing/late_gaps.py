"""Find closed periods for which a gap was declared or changed after the closing.

A gap is a span of time in which usage may be missing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from django.db import transaction
from django.db.models import Max

from ratelimits.engine.keys import ANONYMOUS
from ratelimits.models import DurabilityGap, GapChange, Report, ShardState
from ratelimits.reports.build import CHUNK
from ratelimits.reports.periods import MAX_LENGTH

#: The starts of closed periods (µs since 1970 UTC), by account.
Starts = Mapping[str, Collection[int]]


class LateGaps:
    """The gaps that were declared or changed since the last closing, and the closed periods that they overlap.

    The database is read once. `starts` has the starts (µs since 1970 UTC) of these periods, by account.
    """

    def __init__(self, using: str) -> None:
        self._using = using
        changes = GapChange.objects.using(using)
        #: The primary key of the newest change that is handled here.
        self._newest: int = changes.aggregate(newest=Max("pk"))["newest"] or 0
        #: For each gap (its primary key), the accounts with closed periods that the gap overlaps.
        self._accounts: dict[int, set[str]] = {}
        self.starts: dict[str, set[int]] = defaultdict(set)
        if self._newest:
            rows = DurabilityGap.objects.using(using).filter(pk__in=self._changes().values("gap"))
            self._find_periods(list(rows.order_by("since")))

    def _changes(self) -> Any:
        return GapChange.objects.using(self._using).filter(pk__lte=self._newest)

    def _find_periods(self, gaps: list[DurabilityGap]) -> None:
        self._accounts = {gap.pk: set() for gap in gaps}
        by_account: dict[str, list[DurabilityGap]] = defaultdict(list)
        for gap in gaps:
            if gap.account:  # Without an account, the gap is about whole shards.
                by_account["" if gap.account == ANONYMOUS else gap.account].append(gap)
        if by_account:
            _await_closings(self._using)
        for names in _in_chunks(by_account):
            gaps_of_names = [gap for name in names for gap in by_account[name]]
            for report in _overlapping(self._using, gaps_of_names, account__in=names):
                self._note(report, by_account[report.account])
        of_shards = [gap for gap in gaps if not gap.account]
        # This finds few reports, because most gaps of whole shards are declared before a report of their span exists.
        for report in _overlapping(self._using, of_shards) if of_shards else ():
            self._note(report, (gap for gap in of_shards if gap.shard is None or str(gap.shard) in report.chain))

    def _note(self, report: Report, gaps: Iterable[DurabilityGap]) -> None:
        """Add the period of a report, and its account, for each of these gaps that overlaps the period."""
        for gap in gaps:
            if gap.since < report.period_end and gap.until >= report.period_start:
                self.starts[report.account].add(report.period_start)
                self._accounts[gap.pk].add(report.account)

    def forget(self, done: Collection[str]) -> None:
        """Delete the changes (GapChange) of each gap whose accounts are all in `done`: their periods were closed."""
        reported = [pk for pk, accounts in self._accounts.items() if accounts <= set(done)]
        for pks in _in_chunks(reported):
            self._changes().filter(gap__in=pks).delete()


def _await_closings(using: str) -> None:
    """Wait until the closings that are running now have ended: take the lock of each shard once.

    A closing that is running now may have read the gaps before the new gaps were declared. Until it has written its
    reports, the caller would not find them. (For a gap of a whole shard this wait is not needed: the gap was declared
    under the shard's lock, which a closing holds until its reports are written.)
    """
    for shard in ShardState.objects.using(using).order_by("shard").values_list("shard", flat=True):
        with transaction.atomic(using=using):
            ShardState.lock(using, shard)


def _overlapping(using: str, gaps: list[DurabilityGap], **filters: Any) -> Iterator[Report]:
    """Return the reports that overlap the span from the start of the first of these gaps to the end of the last gap."""
    first, last = min(gap.since for gap in gaps), max(gap.until for gap in gaps)
    # No period is longer than MAX_LENGTH. So the condition with MAX_LENGTH excludes no report, but with this condition
    # the database can use an index.
    reports = Report.objects.using(using).filter(
        **filters, period_start__gt=first - MAX_LENGTH, period_start__lte=last, period_end__gt=first
    )
    rows: Iterator[Report] = reports.order_by().only("account", "period_start", "period_end", "chain").iterator(CHUNK)
    return rows


def _in_chunks(items: Iterable[Any]) -> Iterator[list[Any]]:
    all_items = list(items)
    return (all_items[first : first + CHUNK] for first in range(0, len(all_items), CHUNK))


def says_more(before: str, now: str) -> bool:
    """Return whether the text `now` contains a declared gap that the text `before` does not contain."""
    return bool(_declared(now) - _declared(before))


def _declared(text: str) -> set[str]:
    """Return the declared gaps in a report's text.

    Leave out the parts that `cross_check.text` wrote, because they change often. These parts begin with "witness".
    """
    return {gap for gap in text.split("; ") if gap and not gap.startswith("witness ")}
