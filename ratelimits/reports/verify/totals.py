"""Verifying what stands between ledger and reports: running totals, what reports cover of them, and reports' ends."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

from django.db import connections, transaction
from django.db.models import Count, Max, Sum

from ratelimits.models import ArchivedRange, ChainMark, Line, PeriodUsage, Report, ShardState
from ratelimits.models.kept import period_ends
from ratelimits.reports.build import CHUNK, SUMS, between, in_order
from ratelimits.reports.periods import MAX_LENGTH, SECOND, iso
from ratelimits.reports.verify.report import readable

_SUBJECT = ("account", "period", "meter", "rule")
#: How often an account that differs is read again, where it was drained or closed each time.
_TRIES = 50


def verify_totals(using: str, *sources: str, checked: Counter[str] | None = None) -> Generator[str]:
    """Say what of the totals, and of the positions that reports cover, is not what ledger and reports make of it.

    `sources` are the databases that the ledger's lines are in, by default `using`. Accounts are read in streams; one
    in which something differs is read again by itself, since it may have been drained or closed in between.
    `checked` is given the number of totals and of ends of reports.
    """
    places = sources or (using,)
    checked = Counter() if checked is None else checked
    for account in _accounts(using, places, {}):
        checked["totals"] += len(account.usage)
        if account.findings():
            yield from _settled(using, places, account)
    yield from _verify_marks(using, checked)


def _settled(using: str, sources: tuple[str, ...], account: _Account) -> list[str]:
    """Return what does not hold of an account, read while nothing of it was drained, added up, archived or closed."""
    about = {"account": account.name, "period__in": account.periods()}
    for _try in range(_TRIES):
        with _at_one_moment(using):
            before = _standing(using, account.name)
            found = [finding for each in _accounts(using, sources, about) for finding in each.findings()]
            if _standing(using, account.name) == before:
                return found
    payer = account.name or "anonymous"
    return [f"the totals of {payer} cannot be compared: they changed each of the {_TRIES} times that they were read"]


@contextmanager
def _at_one_moment(using: str) -> Iterator[None]:
    """Read what the database has at one moment, whatever is written meanwhile; unless a transaction is under way."""
    connection = connections[using]
    if connection.in_atomic_block:
        yield
        return
    with transaction.atomic(using=using):
        if connection.vendor == "postgresql":
            with connection.cursor() as cursor:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        yield


def _standing(using: str, account: str) -> tuple[Any, ...]:
    """Return what changes with everything that changes an account's totals or reports."""
    return (
        list(ShardState.objects.using(using).order_by("shard").values_list("shard", "tallied")),
        Report.objects.using(using).filter(account=account).aggregate(Count("pk"), Max("pk")),
        ArchivedRange.objects.using(using).aggregate(Count("pk"), Max("pk")),
    )


def _accounts(using: str, sources: tuple[str, ...], about: dict[str, Any]) -> Iterator[_Account]:
    """Yield each account that has usage or a report. `about` limits them, and the periods of their usage."""
    mine = {name: value for name, value in about.items() if name == "account"}
    states = {str(state.shard): state.tallied for state in ShardState.objects.using(using)}
    archived = set(ArchivedRange.objects.using(using).order_by().values_list("shard", flat=True))
    sums = [_sums(source, states, about) for source in sources]
    usage = PeriodUsage.objects.using(using).filter(**about).order_by(*in_order(using, "account"))
    reports = Report.objects.using(using).filter(**mine).order_by(*in_order(using, "account"), "pk")
    streams: Iterator[tuple[str, int, Any]] = heapq.merge(
        *(((row["account"], 0, row) for row in each) for each in sums),
        ((row.account, 1, row) for row in usage.iterator(CHUNK)),
        ((row.account, 2, row) for row in reports.iterator(CHUNK)),
        key=lambda found: found[:2],
    )
    for name, rows in groupby(streams, key=lambda found: found[0]):
        account = _Account(using, name, states, archived if len(sources) == 1 else set())
        for _name, kind, row in rows:
            (account.add_lines, account.add_usage, account.add_report)[kind](row)
        yield account


def _sums(using: str, states: dict[str, int], about: dict[str, Any]) -> Iterator[dict[str, Any]]:
    lines = Line.objects.using(using).filter(between({}, states), **about).values(*_SUBJECT, "batch__shard")
    found: Iterator[dict[str, Any]] = (
        lines.order_by(*in_order(using, "account"))
        .annotate(**{name: Sum(name) for name in SUMS}, newest=Max("batch__first_position"))
        .iterator(CHUNK)
    )
    return found


class _Account:
    """What ledger, totals and reports say of one account.

    `tallied` are the positions up to which the shards were added up, `archived` the shards of whose lines some are not
    at hand.
    """

    def __init__(self, using: str, name: str, tallied: dict[str, int], archived: set[int]) -> None:
        self._using, self.name = using, name
        self.usage: dict[tuple[Any, ...], PeriodUsage] = {}
        self._tallied, self._archived = tallied, archived
        self._lines: dict[tuple[Any, ...], tuple[list[int], int]] = {}
        #: Billing period (s) and shard to the position up to which the newest report has the usage.
        self._covered: dict[tuple[int, int], int] = {}
        #: Billing period (s, as text) to the positions up to which the reports so far have its usage.
        self._chains: dict[str, dict[str, int]] = {}
        self._jumps: list[str] = []
        #: Billing period (s) to its end (s), as its own report has it, and the periods that are billed there.
        self._ends: dict[int, tuple[int, set[int]]] = {}

    def add_lines(self, row: dict[str, Any]) -> None:
        key = (row["period"], row["meter"], row["rule"], row["batch__shard"])
        had, newest = self._lines.get(key, ([0] * len(SUMS), 0))
        self._lines[key] = [one + row[name] for one, name in zip(had, SUMS, strict=True)], max(newest, row["newest"])

    def add_usage(self, row: PeriodUsage) -> None:
        self.usage[row.period, row.meter, row.rule, row.shard] = row

    def add_report(self, report: Report) -> None:
        if not readable(report):
            return  # verifying the report says so
        for period, since in report.since.items():
            if since != self._chains.get(period, {}):
                self._jumps.append(
                    f"report {report} does not have the usage from {_when(int(period))} on from where the report before"
                    " it ended: some is on no report, or on two"
                )
            self._chains[period] = report.chain
            for shard, position in report.chain.items():
                self._covered[int(period), int(shard)] = position
        if report.version == 1:
            start, end = report.period_start // SECOND, report.period_end // SECOND
            self._ends[start] = end, {start, *map(int, report.since)}

    def periods(self) -> set[int]:
        """Return when the billing periods start of which it has lines or totals (s since 1970 UTC)."""
        return {key[0] for key in self._lines.keys() | self.usage.keys()}

    def findings(self) -> list[str]:
        """Return what does not hold, one sentence for each."""
        keys = sorted(self._lines.keys() | self.usage.keys())
        compared = (finding for key in keys for finding in self._compared(*key))
        return [*self._jumps, *compared, *self._other_ends(), *self._endless()]

    def _endless(self) -> Iterator[str]:
        """Name the totals whose period ends when none can: it would be closed too late, or never."""
        for row in self.usage.values():
            end = row.period_end
            if end is not None and not row.period < end <= row.period + MAX_LENGTH // SECOND:
                yield (
                    f"the total of {self.name or 'anonymous'} ({row.meter}) from {_when(row.period)} says that the"
                    f" period ends at {_when(end)}: no billing period is like that"
                )

    def _other_ends(self) -> Iterator[str]:
        """Name the reports that end when their totals do not; older totals do not say when they end."""
        for period, (end, billed) in self._ends.items():
            said = [(row, row.period_end) for row in self.usage.values() if row.period in billed]
            ends = {each for _row, each in said if each is not None}
            # Usage under several periods that overlap is billed as one, which ends when one of them does.
            if len(billed) > 1 and end in ends:
                continue
            for row, other in said:
                if other is None or other == end:
                    continue
                # Of usage that came after the report, the terms of then may say another end.
                if other not in self._ends_by_terms(row.period):
                    yield (
                        f"the total of {self.name or 'anonymous'} ({row.meter}) from {_when(period)} says that the"
                        f" period ends at {_when(other)}, its report {_when(end)}"
                    )

    def _ends_by_terms(self, period: int) -> set[int | None]:
        """Return when a period ends (s since 1970 UTC) by the terms of its first and of its last usage."""
        place = self.name, period
        lines = Line.objects.using(self._using).filter(account=self.name, period=period)
        last = lines.aggregate(last=Max("bin"))["last"] or period
        return {period_ends(self._using, {place: used}).get(place) for used in (period, last)}

    def _compared(self, period: int, meter: str, rule: int, shard: int) -> Iterator[str]:
        sums, newest = self._lines.get((period, meter, rule, shard), ([0] * len(SUMS), 0))
        total = self.usage.get((period, meter, rule, shard))
        payer = self.name or "anonymous"
        name = f"the total of {payer} ({meter}, rule {rule}) from {_when(period)} in shard {shard:02d}"
        if total is None:
            yield f"{name} is gone: the ledger has {dict(zip(SUMS, sums, strict=True))}"
            return
        # Of a period that is open nothing is ever archived, and of a closed one nothing that no report has.
        away = shard in self._archived and total.covered is not None
        said = [getattr(total, column) for column in SUMS]
        for column, one, other in zip(SUMS, said, sums, strict=True):
            if one < other or (one > other and not away):
                yield f"{name} says {one} {column}, the ledger's lines {other}"
        covered = self._covered.get((period, shard))
        if total.covered != covered and not (total.covered is None and total.position > (covered or 0)):
            yield f"{name} says that reports cover it up to position {total.covered}, the reports say {covered}"
        if not newest <= total.position <= self._tallied.get(str(shard), 0):
            yield f"{name} ends at position {total.position}, and has usage of position {newest}"
        elif total.position > (covered or 0) >= newest:
            yield f"{name} ends at position {total.position}, after its reports, and has no usage since"


def _when(seconds: int) -> str:
    """Return a moment in s since 1970 UTC as a text, also one that is none of a calendar."""
    try:
        return iso(seconds * SECOND)
    except OverflowError:
        return f"{seconds} s"


def _verify_marks(using: str, checked: Counter[str]) -> Iterator[str]:
    """Compare the marks with the ends of the reports."""
    before = set(ChainMark.objects.using(using).values_list("shard", "position"))
    ends: set[tuple[int, int]] = set()
    for report in Report.objects.using(using).only("chain", "since").order_by().iterator(CHUNK):
        if readable(report):
            ends.update((int(shard), position) for shard, position in report.chain.items())
    # A report that was finalised since the marks were read has brought its own, which have ends that were not read.
    since = set(ChainMark.objects.using(using).values_list("shard", "position"))
    checked["ends of reports"] += len(ends)
    for shard, position in sorted(ends - before - since):
        yield (
            f"position {position} of shard {shard:02d}, at which a report ends, is not marked as such, so compaction"
            " may join batches across it: in a database older than these marks ratelimits_compact --mark writes them"
        )
    for shard, position in sorted(before & since - ends):
        yield f"position {position} of shard {shard:02d} is marked as the end of a report, and no report ends there"
