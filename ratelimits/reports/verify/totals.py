"""Verify the totals of usage: compare them with the ledger and with reports. Verify the positions at which reports end.

A report ends at a position of a shard's chain if it contains the usage of batches up to this position.

A total has the usage of an account in a counted period, for one meter, rule and shard. A *counted period* is a period
under which Redis counted usage. Counted periods that overlap form one billing period. A batch is *tallied* when its
lines were added to the totals. The *covered* position of a total is the position up to which reports contain its usage.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

from django.db import connections, transaction
from django.db.models import Count, Max

from ratelimits.models import ArchivedRange, ChainMark, Line, PeriodUsage, Report, ShardState
from ratelimits.models.kept import period_ends
from ratelimits.models.ledger.sums import MAX_TOTAL, ExactSum
from ratelimits.reports.build import CHUNK, SUMS, between, in_order
from ratelimits.reports.periods import MAX_LENGTH, SECOND, iso
from ratelimits.reports.verify.report import has_readable_positions

#: The columns that say what a total is about.
_SUBJECT = ("account", "period", "meter", "rule")
#: The columns of which a total has the sums. `shadow_requests` is a newer column: in older totals it is None.
_SUMMED = (*SUMS, "shadow_requests")
#: Maximum number of times that an account is read again. An account that changes while it is read can seem wrong.
_TRIES = 50


def verify_totals(using: str, *sources: str, checked: Counter[str] | None = None) -> Generator[str]:
    """Yield an error for each total that contradicts the ledger or the reports.

    `sources` are the aliases of the databases that contain the ledger's lines, by default `using`. All accounts are
    read as streams. If an account has a difference, it is read again, because perhaps a drain or a closing has changed
    it meanwhile. `checked` counts the totals and the ends of reports.
    """
    databases = sources or (using,)
    checked = Counter() if checked is None else checked
    for account in _accounts(using, databases, {}):
        checked["totals"] += len(account.usage)
        try:
            findings = _confirmed(using, databases, account) if account.findings() else []
        except (ArithmeticError, ValueError, TypeError) as error:
            findings = [f"the totals of {account.name or 'anonymous'} cannot be verified: {error!r}"]
        yield from findings
    yield from _verify_marks(using, checked)


def _confirmed(using: str, sources: tuple[str, ...], account: _Account) -> list[str]:
    """Return the errors of an account. Read the account again until nothing changes it during the reading."""
    filters = {"account": account.name, "period__in": account.periods()}
    for _try in range(_TRIES):
        with _at_one_moment(using):
            before = _state(using, account.name)
            findings = [error for read_again in _accounts(using, sources, filters) for error in read_again.findings()]
            if _state(using, account.name) == before:
                return findings
    payer = account.name or "anonymous"
    return [f"the totals of {payer} cannot be compared: in each of {_TRIES} tries they changed while they were read"]


@contextmanager
def _at_one_moment(using: str) -> Iterator[None]:
    """Let all queries in this context read the same state of the database.

    If a transaction is already open, do nothing.
    """
    connection = connections[using]
    if connection.in_atomic_block:
        yield
        return
    with transaction.atomic(using=using):
        if connection.vendor == "postgresql":
            with connection.cursor() as cursor:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        yield


def _state(using: str, account: str) -> tuple[Any, ...]:
    """Return values that change whenever the account's totals, its reports or its ledger lines change."""
    return (
        list(ShardState.objects.using(using).order_by("shard").values_list("shard", "tallied")),
        Report.objects.using(using).filter(account=account).aggregate(Count("pk"), Max("pk")),
        ArchivedRange.objects.using(using).aggregate(Count("pk"), Max("pk")),
    )


def _accounts(using: str, sources: tuple[str, ...], filters: dict[str, Any]) -> Iterator[_Account]:
    """Yield each account that has usage or a report. `filters` selects accounts, and periods of their usage."""
    by_account = {name: value for name, value in filters.items() if name == "account"}
    states = {str(state.shard): state.tallied for state in ShardState.objects.using(using)}
    archived = set(ArchivedRange.objects.using(using).order_by().values_list("shard", flat=True))
    sums = [_sums(source, states, filters) for source in sources]
    usage = PeriodUsage.objects.using(using).filter(**filters).order_by(*in_order(using, "account"))
    reports = Report.objects.using(using).filter(**by_account).order_by(*in_order(using, "account"), "pk")
    # Each item has an account, a number and a row. The number says which method of `_Account` gets the row.
    streams: Iterator[tuple[str, int, Any]] = heapq.merge(
        *(((row["account"], 0, row) for row in source_sums) for source_sums in sums),
        ((row.account, 1, row) for row in usage.iterator(CHUNK)),
        ((row.account, 2, row) for row in reports.iterator(CHUNK)),
        key=lambda keyed: keyed[:2],
    )
    for name, rows in groupby(streams, key=lambda keyed: keyed[0]):
        account = _Account(using, name, states, archived if len(sources) == 1 else set())
        methods: tuple[Callable[[Any], None], ...] = (account.add_lines, account.add_usage, account.add_report)
        for _name, number, row in rows:
            methods[number](row)
        yield account


def _sums(using: str, states: dict[str, int], filters: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the sums of the tallied ledger lines for each account, counted period, meter, rule and shard.

    `newest` is the newest position of these lines.
    """
    lines = Line.objects.using(using).filter(between({}, states), **filters).values(*_SUBJECT, "batch__shard")
    rows: Iterator[dict[str, Any]] = (
        lines.order_by(*in_order(using, "account"))
        .annotate(**{name: ExactSum(name) for name in _SUMMED}, newest=Max("batch__first_position"))
        .iterator(CHUNK)
    )
    return rows


class _Account:
    """The ledger's sums, the totals and the reports of one account.

    `tallied` has, for each shard, the position of the last tallied batch. `archived` are the shards of which
    some lines were archived and are missing in the sources. This set is empty if there are several sources, because the
    archives are then among them.
    """

    def __init__(self, using: str, name: str, tallied: dict[str, int], archived: set[int]) -> None:
        self._using, self.name = using, name
        self.usage: dict[tuple[Any, ...], PeriodUsage] = {}
        self._tallied, self._archived = tallied, archived
        #: For each total: the sums of its ledger lines, and the newest position with such lines.
        self._lines: dict[tuple[Any, ...], tuple[list[int], int]] = {}
        #: By counted period (its start in s) and shard: the position up to which the newest report contains the usage.
        self._covered: dict[tuple[int, int], int] = {}
        #: By counted period (its start in s, as text) and shard: the position at which the last added report ends. The
        #: next report must begin there.
        self._chains: dict[str, dict[str, int]] = {}
        #: An error for each report that does not begin where the report before it ends.
        self._discontinuities: list[str] = []
        #: For each billing period, by its start: its end on its report, and the starts of the report's counted periods.
        #: All of these moments are in seconds since 1970 UTC.
        self._ends: dict[int, tuple[int, set[int]]] = {}

    def add_lines(self, row: dict[str, Any]) -> None:
        """Add the sums of some ledger lines (see `_sums`)."""
        key = (row["period"], row["meter"], row["rule"], row["batch__shard"])
        sums, newest = self._lines.get(key, ([0] * len(_SUMMED), 0))
        added = [count + row[name] for count, name in zip(sums, _SUMMED, strict=True)]
        self._lines[key] = added, max(newest, row["newest"])

    def add_usage(self, row: PeriodUsage) -> None:
        """Add a total."""
        self.usage[row.period, row.meter, row.rule, row.shard] = row

    def add_report(self, report: Report) -> None:
        """Add a report. Reports must be added in the order in which they were finalised."""
        if not has_readable_positions(report):
            return  # verify/report.py reports the error.
        for period, since in report.since.items():
            if since != self._chains.get(period, {}):
                self._discontinuities.append(
                    f"report {report} does not begin where the report before it ends (period of {_when(int(period))}):"
                    " some usage is on no report, or on two"
                )
            self._chains[period] = report.chain
            for shard, position in report.chain.items():
                self._covered[int(period), int(shard)] = position
        if report.version == 1:
            start, end = report.period_start // SECOND, report.period_end // SECOND
            self._ends[start] = end, {start, *map(int, report.since)}

    def periods(self) -> set[int]:
        """Return the starts (s since 1970 UTC) of the counted periods with lines or totals."""
        return {period for period, _meter, _rule, _shard in self._lines.keys() | self.usage.keys()}

    def findings(self) -> list[str]:
        """Return a sentence for each error."""
        keys = sorted(self._lines.keys() | self.usage.keys())
        compared = (finding for key in keys for finding in self._compared(*key))
        return [*self._discontinuities, *compared, *self._different_ends(), *self._impossible_ends()]

    def _impossible_ends(self) -> Iterator[str]:
        """Yield an error for each total with an impossible end. Its period would be closed too late, or never."""
        for row in self.usage.values():
            end = row.period_end
            if end is not None and not row.period < end <= row.period + MAX_LENGTH // SECOND:
                yield (
                    f"the total of {self.name or 'anonymous'} ({row.meter}) from {_when(row.period)} says that the"
                    f" period ends at {_when(end)}: no billing period has this length"
                )

    def _different_ends(self) -> Iterator[str]:
        """Yield an error for each report whose end differs from the end of its totals.

        Totals from old versions of the app have no end.
        """
        for period, (end, billed) in self._ends.items():
            totals = [(row, row.period_end) for row in self.usage.values() if row.period in billed]
            ends = {total_end for _row, total_end in totals if total_end is not None}
            # Counted periods that overlap are one billing period. Its end is the end of one of them.
            if len(billed) > 1 and end in ends:
                continue
            for row, total_end in totals:
                if total_end is None or total_end == end:
                    continue
                # It is no error if usage arrived after the report, and the account's terms had changed by then. The
                # total then has the end that the newer terms give.
                if total_end not in self._ends_by_terms(row.period):
                    yield (
                        f"the total of {self.name or 'anonymous'} ({row.meter}) from {_when(row.period)} says that the"
                        f" period ends at {_when(total_end)}, but its report from {_when(period)} says {_when(end)}"
                    )

    def _ends_by_terms(self, period: int) -> set[int | None]:
        """Return the ends (s since 1970 UTC) that the terms at a period's start and at its last usage give."""
        key = self.name, period
        lines = Line.objects.using(self._using).filter(account=self.name, period=period)
        last = lines.aggregate(last=Max("bin"))["last"] or period
        return {period_ends(self._using, {key: used}).get(key) for used in (period, last)}

    def _compared(self, period: int, meter: str, rule: int, shard: int) -> Iterator[str]:
        """Yield the errors of one total: compare it with the ledger's lines and with the reports."""
        sums, newest = self._lines.get((period, meter, rule, shard), ([0] * len(_SUMMED), 0))
        total = self.usage.get((period, meter, rule, shard))
        payer = self.name or "anonymous"
        name = f"the total of {payer} ({meter}, rule {rule}) from {_when(period)} in shard {shard:02d}"
        if total is None:
            yield f"{name} is missing: the ledger has {dict(zip(_SUMMED, sums, strict=True))}"
            return
        # Usage is archived only after it is on a report. Its total has a covered position then.
        partly_archived = shard in self._archived and total.covered is not None
        counts = [getattr(total, column) for column in _SUMMED]
        for column, count, in_lines in zip(_SUMMED, counts, sums, strict=True):
            if count is None:
                continue
            if count == MAX_TOTAL <= in_lines:
                yield (
                    f"{name} is full: the ledger's lines say {in_lines} {column}, and a total cannot be above"
                    f" {MAX_TOTAL}. So its period is not closed"
                )
                continue
            if count < in_lines or (count > in_lines and not partly_archived):
                yield f"{name} says {count} {column}, but the ledger's lines say {in_lines}"
        covered = self._covered.get((period, shard))
        # If all usage of a total is newer than the reports, the total has no covered position yet. This is no error.
        if total.covered != covered and not (total.covered is None and total.position > (covered or 0)):
            yield f"{name} says that reports contain it up to position {total.covered}, but the reports say {covered}"
        tallied = self._tallied.get(str(shard), 0)
        if total.position < newest:
            yield f"{name} ends at position {total.position}, but has usage of position {newest}"
        elif total.position > tallied:
            yield f"{name} ends at position {total.position}, but the shard is tallied only up to {tallied}"
        elif total.position > (covered or 0) >= newest:
            yield (
                f"{name} ends at position {total.position}, but the ledger has no usage of it after position"
                f" {covered or 0}, where its reports end"
            )


def _when(seconds: int) -> str:
    """Return a moment (s since 1970 UTC) as text, even if it is outside the calendar."""
    try:
        return iso(seconds * SECOND)
    except OverflowError:
        return f"{seconds} s"


def _verify_marks(using: str, checked: Counter[str]) -> Iterator[str]:
    """Compare the rows of `ChainMark` with the positions at which reports end."""
    marked_before = set(ChainMark.objects.using(using).values_list("shard", "position"))
    ends: set[tuple[int, int]] = set()
    for report in Report.objects.using(using).only("chain", "since").order_by().iterator(CHUNK):
        if has_readable_positions(report):
            ends.update((int(shard), position) for shard, position in report.chain.items())
    # Read the marks again. A report that was finalised meanwhile has added marks, and is perhaps not in `ends`.
    marked_after = set(ChainMark.objects.using(using).values_list("shard", "position"))
    checked["ends of reports"] += len(ends)
    for shard, position in sorted(ends - marked_before - marked_after):
        yield (
            f"position {position} of shard {shard:02d}, at which a report ends, is not marked, so compaction can join"
            " batches across it: in a database older than these marks, ratelimits_compact --mark adds them"
        )
    for shard, position in sorted((marked_before & marked_after) - ends):
        yield f"position {position} of shard {shard:02d} is marked as the end of a report, but no report ends there"
