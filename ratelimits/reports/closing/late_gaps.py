"""Find closed periods in which a gap was declared or changed after they were closed.

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
    """The gaps that changed since closed periods were last checked for gaps; they are read once.

    starts  by account: the starts (µs since 1970 UTC) of the closed periods that these gaps touch
    """

    def __init__(self, using: str) -> None:
        self._using = using
        changes = GapChange.objects.using(using)
        self._newest: int = changes.aggregate(newest=Max("pk"))["newest"] or 0
        self._accounts: dict[int, set[str]] = {}
        self.starts: dict[str, set[int]] = defaultdict(set)
        if self._newest:
            rows = DurabilityGap.objects.using(using).filter(pk__in=self._changes().values("gap"))
            self._find_periods(list(rows.order_by("since")))

    def _changes(self) -> Any:
        return GapChange.objects.using(self._using).filter(pk__lte=self._newest)

    def _find_periods(self, gaps: list[DurabilityGap]) -> None:
        self._accounts = {gap.pk: set() for gap in gaps}
        own: dict[str, list[DurabilityGap]] = defaultdict(list)
        for gap in gaps:
            if gap.account:
                own["" if gap.account == ANONYMOUS else gap.account].append(gap)
        if own:
            _await_closings(self._using)
        for names in _in_chunks(own):
            gaps_of_names = [gap for name in names for gap in own[name]]
            for report in _closed(self._using, gaps_of_names, account__in=names):
                self._note(report, own[report.account])
        shared = [gap for gap in gaps if not gap.account]
        # Gaps of whole shards are mostly declared for times that no report covers yet, so this finds few reports.
        for report in _closed(self._using, shared) if shared else ():
            self._note(report, (gap for gap in shared if gap.shard is None or str(gap.shard) in report.chain))

    def _note(self, report: Report, gaps: Iterable[DurabilityGap]) -> None:
        for gap in gaps:
            if gap.since < report.period_end and gap.until >= report.period_start:
                self.starts[report.account].add(report.period_start)
                self._accounts[gap.pk].add(report.account)

    def forget(self, done: Collection[str]) -> None:
        """Delete the changes of gaps that the reports contain now. `done` are the accounts that were closed."""
        reported = [pk for pk, accounts in self._accounts.items() if accounts <= set(done)]
        for pks in _in_chunks(reported):
            self._changes().filter(gap__in=pks).delete()


def _await_closings(using: str) -> None:
    """Wait for the closings that are running now, by taking the lock of each shard once.

    Such a closing may have read the gaps before these gaps were declared, and may not have written its reports yet.
    Gaps of whole shards need no waiting: they are declared under the shard's lock.
    """
    for shard in ShardState.objects.using(using).order_by("shard").values_list("shard", flat=True):
        with transaction.atomic(using=using):
            ShardState.lock(using, shard)


def _closed(using: str, gaps: list[DurabilityGap], **filters: Any) -> Iterator[Report]:
    first, last = min(gap.since for gap in gaps), max(gap.until for gap in gaps)
    reports = Report.objects.using(using).filter(
        **filters, period_start__gt=first - MAX_LENGTH, period_start__lte=last, period_end__gt=first
    )
    rows: Iterator[Report] = reports.order_by().only("account", "period_start", "period_end", "chain").iterator(CHUNK)
    return rows


def _in_chunks(items: Iterable[Any]) -> Iterator[list[Any]]:
    all_items = list(items)
    return (all_items[first : first + CHUNK] for first in range(0, len(all_items), CHUNK))


def says_more(before: str, now: str) -> bool:
    """Return whether `now` contains a declared gap that `before` does not contain. Both are texts about gaps."""
    return bool(_declared(now) - _declared(before))


def _declared(text: str) -> set[str]:
    """Return the declared gaps in a report's text. The cross-check's results are left out: they change often."""
    return {part for part in text.split("; ") if part and not part.startswith("witness ")}
