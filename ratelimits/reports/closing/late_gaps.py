"""Closed periods that a gap touches which was declared, or has changed, since they were closed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from django.db.models import Max

from ratelimits.engine.keys import ANONYMOUS
from ratelimits.models import DurabilityGap, GapChange, Report
from ratelimits.reports.build import CHUNK
from ratelimits.reports.periods import MAX_LENGTH

#: By account, when closed periods start (µs since 1970 UTC).
Starts = Mapping[str, Collection[int]]


class LateGaps:
    """The changes of gaps that closed periods were not looked at for yet, read once.

    starts  by account, when the closed periods start (µs since 1970 UTC) that they touch
    """

    def __init__(self, using: str) -> None:
        self._using = using
        changes = GapChange.objects.using(using)
        self._newest: int = changes.aggregate(newest=Max("pk"))["newest"] or 0
        self._accounts: dict[int, set[str]] = {}
        self.starts: dict[str, set[int]] = defaultdict(set)
        if self._newest:
            rows = DurabilityGap.objects.using(using).filter(pk__in=self._changes().values("gap"))
            self._look_at(list(rows.order_by("since")))

    def _changes(self) -> Any:
        return GapChange.objects.using(self._using).filter(pk__lte=self._newest)

    def _look_at(self, gaps: list[DurabilityGap]) -> None:
        self._accounts = {gap.pk: set() for gap in gaps}
        own: dict[str, list[DurabilityGap]] = defaultdict(list)
        for gap in gaps:
            if gap.account:
                own["" if gap.account == ANONYMOUS else gap.account].append(gap)
        for names in _in_chunks(own):
            those = [gap for name in names for gap in own[name]]
            for report in _closed(self._using, those, account__in=names):
                self._note(report, own[report.account])
        shared = [gap for gap in gaps if not gap.account]
        # What concerns whole shards is declared for times that are not closed yet, but for a few.
        for report in _closed(self._using, shared) if shared else ():
            self._note(report, (gap for gap in shared if gap.shard is None or str(gap.shard) in report.chain))

    def _note(self, report: Report, gaps: Iterable[DurabilityGap]) -> None:
        for gap in gaps:
            if gap.since < report.period_end and gap.until >= report.period_start:
                self.starts[report.account].add(report.period_start)
                self._accounts[gap.pk].add(report.account)

    def forget(self, done: Collection[str]) -> None:
        """Forget the gaps all of whose accounts are among these: their reports say what there is to say."""
        told = [pk for pk, accounts in self._accounts.items() if accounts <= set(done)]
        for pks in _in_chunks(told):
            self._changes().filter(gap__in=pks).delete()


def _closed(using: str, gaps: list[DurabilityGap], **about: Any) -> Iterator[Report]:
    first, last = min(gap.since for gap in gaps), max(gap.until for gap in gaps)
    reports = Report.objects.using(using).filter(
        **about, period_start__gt=first - MAX_LENGTH, period_start__lte=last, period_end__gt=first
    )
    found: Iterator[Report] = reports.order_by().only("account", "period_start", "period_end", "chain").iterator(CHUNK)
    return found


def _in_chunks(things: Iterable[Any]) -> Iterator[list[Any]]:
    rest = list(things)
    return (rest[first : first + CHUNK] for first in range(0, len(rest), CHUNK))


def says_more(before: str, now: str) -> bool:
    """Return whether a report that is made now prints a declared gap that the one before does not."""
    return bool(_declared(now) - _declared(before))


def _declared(text: str) -> set[str]:
    """The gaps in a report's text, without the cross-check, which is repeated again and again."""
    return {each for each in text.split("; ") if each and not each.startswith("witness ")}
