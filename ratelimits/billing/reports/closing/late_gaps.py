"""Find closed periods for which a gap was declared or changed after the closing.

A gap is a span of time in which usage may be missing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from django.db import transaction
from django.db.models import Max

from ratelimits.billing.models import Report
from ratelimits.billing.reports.build import CHUNK
from ratelimits.engine.keys import ANONYMOUS
from ratelimits.models import Name
from ratelimits.usage.models import DurabilityGap, GapChange, ShardState
from ratelimits.usage.periods import MAX_LENGTH, SECOND

#: The starts of closed periods (µs since 1970 UTC), by primary key of the customer.
Starts = Mapping[int, Collection[int]]


class LateGaps:
    """The gaps that were declared or changed since the last closing, and the closed periods that they overlap.

    The database is read once. `starts` has the starts (µs since 1970 UTC) of these periods, by primary key of the
    customer.
    """

    def __init__(self, using: str) -> None:
        self._using = using
        changes = GapChange.objects.using(using)
        #: The primary key of the newest change that is handled here.
        self._newest: int = changes.aggregate(newest=Max("pk"))["newest"] or 0
        #: For each gap (its primary key), the customers with closed periods that the gap overlaps.
        self._customers: dict[int, set[int]] = {}
        self.starts: dict[int, set[int]] = defaultdict(set)
        if self._newest:
            rows = DurabilityGap.objects.using(using).filter(pk__in=self._changes().values("gap"))
            self._find_periods(list(rows.order_by("since")))

    def _changes(self) -> Any:
        return GapChange.objects.using(self._using).filter(pk__lte=self._newest)

    def _find_periods(self, gaps: list[DurabilityGap]) -> None:
        self._customers = {gap.pk: set() for gap in gaps}
        of_texts = [gap for gap in gaps if gap.account]  # Without an account, the gap is about whole shards.
        if of_texts:
            _await_closings(self._using)
        for chunk in _in_chunks(of_texts):
            self._find_periods_of_texts(chunk)
        of_shards = [gap for gap in gaps if not gap.account]
        # This finds few reports, because most gaps of whole shards are declared before a report of their span exists.
        for report in _overlapping(self._using, of_shards) if of_shards else ():
            for gap in of_shards:
                if gap.shard is None or str(gap.shard) in report.chain:
                    self._note(report, gap, gap.since, gap.until)

    def _find_periods_of_texts(self, gaps: list[DurabilityGap]) -> None:
        """Find the closed periods of the customers whom the accounts of these gaps named at that time."""
        by_text: dict[str, list[DurabilityGap]] = defaultdict(list)
        for gap in gaps:
            by_text["" if gap.account == ANONYMOUS else gap.account].append(gap)
        names = Name.objects.using(self._using).filter(identifier__in=by_text).order_by("identifier", "since")
        by_token: dict[str, list[tuple[int, int, DurabilityGap]]] = defaultdict(list)
        for token, text, since, until in names.values_list("customer__token", "identifier", "since", "until"):
            for gap in by_text[text]:
                first = max(gap.since, since * SECOND)
                last = gap.until if until is None else min(gap.until, until * SECOND - 1)
                if first <= last:
                    by_token[token].append((first, last, gap))
        if by_token:
            for report in _overlapping(self._using, gaps, customer__token__in=list(by_token)):
                for first, last, gap in by_token[report.customer_id]:
                    self._note(report, gap, first, last)

    def _note(self, report: Report, gap: DurabilityGap, first: int, last: int) -> None:
        """Add the period of a report, and its customer, if the period overlaps the span from `first` to `last`."""
        if first < report.period_end and last >= report.period_start:
            pk = report.customer.pk
            assert pk is not None
            self.starts[pk].add(report.period_start)
            self._customers[gap.pk].add(pk)

    def forget(self, done: Collection[int]) -> None:
        """Delete the changes (GapChange) of each gap whose customers are all in `done`: their periods were closed."""
        reported = [pk for pk, customers in self._customers.items() if customers <= set(done)]
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
    rows: Iterator[Report] = (
        reports.order_by()
        .select_related("customer")
        .only("customer__token", "period_start", "period_end", "chain")
        .iterator(CHUNK)
    )
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
